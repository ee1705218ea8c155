"""What watchers are told of a step: numbers of its record, before and after, and nothing else of it."""

from service.progress import figures_of


def test_a_stage_tells_held_out_quality_before_and_after() -> None:
    record = {
        "method": "prune",
        "version": 1,
        "before": {"n": 900.0, "kl": 0.0, "flips": 0.0, "accuracy": 0.95},
        "after": {"n": 900.0, "kl": 0.25, "flips": 57.0, "accuracy": 0.9},
        "details": {"parameters_after": 7, "size_bytes": 11},
        "seconds": 3.5,
        "peak_memory_bytes": 496,
    }
    assert figures_of(record) == {
        "held_out_accuracy_before": 0.95,
        "held_out_accuracy": 0.9,
        "held_out_flips_before": 0.0,
        "held_out_flips": 57.0,
        "held_out_kl_before": 0.0,
        "held_out_kl": 0.25,
        "size_bytes": 11.0,
        "peak_memory_bytes": 496.0,
    }


def test_quality_tells_accuracy_and_footprint_of_both_models() -> None:
    record = {
        "baseline": {"accuracy": {"value": 0.95}, "truncated": 3},
        "candidate": {"accuracy": {"value": 0.94}, "truncated": 3},
        "footprint": {"baseline_bytes": 90, "candidate_bytes": 23},
    }
    assert figures_of(record) == {
        "accuracy_before": 0.95,
        "accuracy": 0.94,
        "footprint_bytes_before": 90.0,
        "footprint_bytes": 23.0,
    }


def test_latency_tells_the_speedup_of_each_shape() -> None:
    rows = [
        {"batch_size": 1, "sequence_length": 64, "speedup": 3.5, "repeats": 30},
        {"batch_size": 8, "sequence_length": 64, "speedup": 2.5, "repeats": 30},
    ]
    assert figures_of({"rows": rows}) == {"speedup_1x64": 3.5, "speedup_8x64": 2.5}


def test_drift_and_parity_tell_how_far_apart_the_answers_are() -> None:
    drift = {"n": 900, "flips": 12, "flip_share": {"value": 0.0133}, "kl_mean": {"value": 0.125}}
    assert figures_of(drift) == {"flips": 12.0, "kl_mean": 0.125}
    parity = {"max_logit_difference": 0.5, "mean_logit_difference": 0.25, "label_changes": 0, "n": 64}
    assert figures_of(parity) == {"max_logit_difference": 0.5, "label_changes": 0.0}


def test_what_has_no_such_figure_tells_none() -> None:
    assert figures_of({"rows": 2101, "runtime": "onnxruntime", "accuracy": None, "before": {}}) == {}
