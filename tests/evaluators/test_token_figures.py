"""Stored token figures keep every bit and fit together; windows, drift and intervals come from them alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from evaluators.language import measure_language, measure_token_drift, token_windows
from evaluators.token_figures import PER_TOKEN, TokenFacts, TokenFigures, load_token_figures
from modelpress.errors import DataLoss, InvalidModel, InvalidRequest
from modelpress.language_intervals import paired_ratio_interval
from modelpress.language_reports import TokenWindow
from modelpress.metrics import Metric

FACTS = TokenFacts("torch", "onnx", 8, 4, {0: "a", 1: " b", 2: "\n"})


def figures(**changes) -> TokenFigures:
    parts = {
        "baseline_nats": np.array([1.0, 2.0, 3.0, 0.5, 0.25]),
        "candidate_nats": np.array([1.5, 2.0, 3.5, 0.5, 1.25]),
        "kl": np.array([0.1, 0.0, 0.4, 0.0, 0.3]),
        "baseline_top": np.array([0, 1, 2, 0, 1]),
        "candidate_top": np.array([0, 2, 2, 0, 0]),
        "window_tokens": np.array([3, 2]),
    }
    return TokenFigures(**{**parts, **changes}, facts=FACTS)


def test_saving_and_loading_keeps_every_bit(tmp_path):
    before = figures()
    before.save(tmp_path)
    after = load_token_figures(tmp_path)
    assert after.facts == before.facts
    assert after.kl.tobytes() == before.kl.tobytes()
    assert after.window_tokens.tolist() == [3, 2]


def test_equal_figures_are_equal_bytes(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        figures().save(tmp_path / name)
    files = [sorted((f.name, f.read_bytes()) for f in (tmp_path / name).iterdir()) for name in ("a", "b")]
    assert files[0] == files[1]


@pytest.mark.parametrize("name", ["token_figures.safetensors", "token_figures.json"])
def test_a_stored_file_that_is_cut_short_is_data_loss(tmp_path, name):
    figures().save(tmp_path)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-2])
    with pytest.raises(DataLoss, match="measure them again"):
        load_token_figures(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        {"kl": np.array([0.1, np.nan, 0, 0, 0])},
        {"kl": np.zeros(4)},
        {"window_tokens": np.array([3, 3])},
        {"window_tokens": np.array([], dtype=np.int64)},
        {"kl": np.array(0.1)},
        {"kl": None},
    ],
)
def test_stored_figures_that_cannot_have_been_saved_are_data_loss(tmp_path, damage):
    figures().save(tmp_path)
    file = tmp_path / "token_figures.safetensors"
    tensors = {name: tensor for name, tensor in {**load_file(file), **damage}.items() if tensor is not None}
    save_file(tensors, file)
    with pytest.raises(DataLoss, match="measure them again"):
        load_token_figures(tmp_path)


def test_the_figures_of_each_token_are_all_but_the_windows_lengths():
    assert PER_TOKEN == ("baseline_nats", "candidate_nats", "kl", "baseline_top", "candidate_top")


@pytest.mark.parametrize(
    "changes", [{"window_tokens": np.array([3, 3])}, {"window_tokens": np.array([5, 0])}, {"kl": np.zeros(4)}]
)
def test_figures_that_do_not_fit_together_are_refused(changes):
    with pytest.raises(InvalidRequest, match="do not fit together"):
        figures(**changes)


def test_a_figure_that_is_no_number_is_refused():
    with pytest.raises(InvalidModel, match="NaN or infinite"):
        figures(kl=np.array([0.1, np.nan, 0, 0, 0]))


def test_windows_are_the_sums_over_their_tokens():
    assert token_windows(figures()) == (
        TokenWindow(tokens=3, baseline_nats=6.0, candidate_nats=7.0, kl_nats=0.5, agreements=2),
        TokenWindow(tokens=2, baseline_nats=0.75, candidate_nats=1.75, kl_nats=0.3, agreements=1),
    )


def test_the_report_s_figures_are_those_of_all_tokens():
    measured = measure_language(figures(), dataset="sha256:0", confidence=0.9)
    values = {name: value["value"] for name, value in measured.items() if isinstance(value, dict)}
    assert values == pytest.approx(
        {
            "baseline_perplexity": math.exp(6.75 / 5),
            "candidate_perplexity": math.exp(8.75 / 5),
            "perplexity_ratio": math.exp(2 / 5),
            "token_kl": 0.16,
            "top1_agreement": 0.6,
        },
        rel=1e-12,
    )
    ratio = Metric.model_validate(measured["perplexity_ratio"])
    assert ratio.interval == paired_ratio_interval(token_windows(figures()), confidence=0.9)
    assert measured["warnings"] == []


def test_one_window_has_figures_and_no_interval():
    measured = measure_language(figures(window_tokens=np.array([5])), dataset="d", confidence=0.9)
    assert [value["interval"] for value in measured.values() if isinstance(value, dict)] == [None] * 5
    assert "one window only" in measured["warnings"][0]
    assert (
        measure_token_drift(figures(window_tokens=np.array([5])), probes="p", confidence=0.9).flip_share.interval
        is None
    )


def test_a_perplexity_that_no_float_holds_is_no_figure_and_says_so():
    measured = measure_language(figures(candidate_nats=np.full(5, 1e5)), dataset="d", confidence=0.9)
    assert measured["candidate_perplexity"]["value"] is None
    assert "candidate_perplexity is too large for a number" in measured["warnings"]


def test_drift_counts_flips_in_windows_and_names_what_moved_most():
    report = measure_token_drift(figures(), probes="sha256:1", confidence=0.95)
    assert (report.n, report.flips, report.flip_share.value) == (5, 2, 0.4)
    assert [(cluster.n, cluster.flips) for cluster in report.clusters] == [(3, 1), (2, 1)]
    assert report.kl_mean.value == pytest.approx(0.16)
    assert report.kl_p99.value == 0.4
    assert [(one.index, one.baseline_label, one.candidate_label) for one in report.largest[:2]] == [
        (2, "\n", "\n"),
        (4, " b", "a"),
    ]
    assert sum(report.kl_histogram.counts) == 5
