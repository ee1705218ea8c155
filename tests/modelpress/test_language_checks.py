"""A language model's figures are those of its windows, its counts and its drift, or nothing is judged."""

from __future__ import annotations

from typing import Any

import pytest

from modelpress.clustered_intervals import clustered_share
from modelpress.errors import VerificationFailed
from modelpress.gates import decide
from modelpress.language_intervals import exponential, mean_per_token_interval
from modelpress.metrics import Interval, PairedCounts
from modelpress.policies import Gates, Policy
from modelpress.quantized_layers import check_layers
from modelpress.reports import Measured, Report
from tests.evidence import merge_samples, samples
from tests.evidence.language_samples import APPROVED, FEW_WINDOWS, LanguageCase

MEASURED = APPROVED.measured
POLICY = Policy(gates=Gates.model_validate({"size": {"max_ratio": 1}}))
CLASSIFIER = samples.sample_report(samples.APPROVED, samples.digest_bytes(b"model")).measured


def changed(part: str, change: dict[str, Any]) -> Measured:
    """The sample with some fields changed; `windows.0.tokens` is a path."""
    value = getattr(MEASURED, part).model_dump(mode="json")
    for path, new in change.items():
        *parents, last = path.split(".")
        inner = value
        for key in parents:
            inner = inner[int(key) if key.isdigit() else key]
        inner[last] = new
    parts = {"language": MEASURED.language, "drift": MEASURED.drift}
    return Measured(**{**parts, part: type(getattr(MEASURED, part)).model_validate(value)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stride": 513}, "language.stride is 513 of 512"),
        ({"windows.0.tokens": 0}, "language.windows[0] predicts 0 tokens"),
        ({"windows.0.tokens": 513}, "language.windows[0] predicts 513 tokens of 512"),
        ({"windows.3.agreements": 512}, "language.windows[3] counts 512 agreements of 511"),
        ({"windows.3.agreements": -1}, "language.windows[3] counts -1 agreements"),
        ({"windows.1.kl_nats": -1.0}, "language.windows[1].kl_nats is -1.0"),
        ({"windows.1.candidate_nats": 1.0}, "candidate_perplexity is"),
        ({"windows.1.baseline_nats": 1.0}, "baseline_perplexity is"),
        ({"windows.1.kl_nats": 1.0}, "token_kl is"),
        ({"baseline_perplexity.value": 25.0}, "language.baseline_perplexity is 25.0"),
        ({"perplexity_ratio.value": 1.0}, "language.perplexity_ratio is 1.0"),
        ({"perplexity_ratio.value": None}, "language.perplexity_ratio is None"),
        ({"perplexity_ratio.n": 999_999}, "comes from 999999 tokens, its windows have 8176"),
        ({"perplexity_ratio.interval.high": 1.125}, "language.perplexity_ratio has the interval"),
        ({"perplexity_ratio.interval.confidence": 0.99}, "language.perplexity_ratio has the interval"),
        ({"token_kl.value": 0.1}, "language.token_kl is 0.1"),
        ({"top1_agreement.value": 1.0}, "language.top1_agreement is 1.0"),
        ({"choices.baseline_accuracy.value": 0.9}, "language.choices.baseline_accuracy is 0.9"),
        ({"choices.candidate_accuracy.value": 0.9}, "language.choices.candidate_accuracy is 0.9"),
        ({"choices.accuracy_drop.value": 0.0}, "language.choices.accuracy_drop is 0.0"),
        ({"choices.paired.both_wrong": -1}, "the paired counts hold a negative number"),
        ({"choices.paired": dict.fromkeys(PairedCounts.model_fields, 0)}, "comes from 0 questions"),
        ({"generations.0.equal_tokens": 17}, "the generation of row 0 has 17 equal tokens of 16"),
        ({"generations.0.equal_tokens": 16}, "and two texts that differ"),
        ({"windows": []}, "comes from 8176 tokens, its windows have 0"),
    ],
)
def test_a_figure_that_its_windows_or_counts_contradict_is_refused(change, words):
    with pytest.raises(VerificationFailed, match="contradict") as raised:
        decide(POLICY, changed("language", change))
    assert words in raised.value.message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"clusters.0.flips": 0}, "its windows"),
        ({"clusters.0.flips": 512}, "512 flips among 511 tokens of a window"),
        ({"clusters.0.n": 0, "clusters.0.flips": 0}, "0 flips among 0 tokens of a window"),
        ({"clusters": []}, "which windows its tokens stand in"),
        ({"clusters": [{"n": 8176, "flips": 0}]}, "its windows 0 of 8176"),
        ({"flips": 0, "flip_share.value": 0.0}, "drift counts 0 flips of 8176"),
        ({"kl_mean.value": 0.0}, "kl_mean is 0.0"),
    ],
)
def test_a_drift_that_its_windows_contradict_is_refused(change, words):
    with pytest.raises(VerificationFailed, match="contradict") as raised:
        decide(POLICY, changed("drift", change))
    assert words in raised.value.message


def test_on_the_evaluation_texts_drift_counts_the_tokens_of_the_language_report():
    other = FEW_WINDOWS.measured
    with pytest.raises(VerificationFailed, match="different tokens of the same dataset"):
        decide(POLICY, Measured(language=MEASURED.language, drift=other.drift))
    elsewhere = other.drift.model_copy(update={"probes": "sha256:" + "0" * 64})
    decide(POLICY, Measured(language=MEASURED.language, drift=elsewhere))


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        (Measured(language=MEASURED.language), "language and drift are measured together, and one is missing"),
        (Measured(drift=MEASURED.drift), "one is missing"),
        (
            Measured(evaluation=CLASSIFIER.evaluation, language=MEASURED.language, drift=MEASURED.drift),
            "a classifier or a language model, not both",
        ),
    ],
)
def test_language_and_drift_are_measured_together_and_no_model_is_of_both_kinds(measured, words):
    with pytest.raises(VerificationFailed) as raised:
        decide(POLICY, measured)
    assert words in raised.value.message


def test_a_merge_may_stand_beside_a_language_report():
    decide(POLICY, Measured(merge_samples.MERGED.merge, None, MEASURED.drift, MEASURED.language))


def with_intervals(confidence: float) -> dict[str, Any]:
    """Every interval of a report as the evaluator computes them."""
    windows = MEASURED.language.windows
    tokens = [window.tokens for window in windows]

    def mean(field: str) -> Interval:
        return mean_per_token_interval([getattr(w, field) for w in windows], tokens, confidence=confidence)

    agreed = clustered_share([(w.tokens, w.agreements) for w in windows], confidence=confidence)
    intervals = {
        "baseline_perplexity": exponential(mean("baseline_nats")),
        "candidate_perplexity": exponential(mean("candidate_nats")),
        "token_kl": mean("kl_nats"),
        "top1_agreement": agreed.interval,
    }
    return {f"{name}.interval": interval.model_dump(mode="json") for name, interval in intervals.items()}


@pytest.mark.parametrize("name", ["baseline_perplexity", "candidate_perplexity", "token_kl", "top1_agreement"])
def test_every_interval_is_that_of_the_windows(name):
    stated = with_intervals(0.9)
    decide(POLICY, changed("language", stated))
    path = f"{name}.interval"
    for end in ("low", "high"):
        forged = {**stated, path: {**stated[path], end: stated[path][end] * 1.001}}
        with pytest.raises(VerificationFailed, match=f"language.{name} has the interval"):
            decide(POLICY, changed("language", forged))


def test_one_window_has_figures_and_no_interval():
    decide(POLICY, LanguageCase(windows=1).measured)


def _report(change: dict[str, Any], *, arguments: dict[str, Any] | None = None) -> Report:
    """The sample with the first linear layer, and the stage's arguments, changed."""
    report = APPROVED.report(samples.digest_bytes(b"model"))
    stage = report.stages[0]
    layer = stage.layers[0].model_copy(update=change)
    update = {"layers": (layer, *stage.layers[1:]), "arguments": {**stage.arguments, **(arguments or {})}}
    return report.model_copy(update={"stages": (stage.model_copy(update=update), *report.stages[1:])})


@pytest.mark.parametrize(
    ("change", "arguments", "words"),
    [
        ({"name": "model.layers.0.self_attn.k_proj"}, {}, "names a layer twice"),
        ({"num_bits": 8}, {}, "has 8 bits, expected 4"),
        ({"algorithm": "none"}, {}, "has 4 bits, expected 16 or 32"),
        ({"algorithm": "rtn"}, {}, "by 'rtn' instead of 'gptq' without a reason"),
        ({"error": -0.1}, {}, "error of layer 'model.layers.0.self_attn.q_proj' is -0.1"),
        ({"rounding_error": float("nan")}, {}, "rounding_error of layer"),
        ({"seconds": float("inf")}, {}, "seconds of layer"),
        ({}, {"max_fallback_share": 0.0}, "1 of 209 layers fell back, above the limit of 0"),
        ({}, {"scheme": "int3"}, "the record of quantize_weights: scheme"),
    ],
)
def test_layers_that_cannot_be_what_the_recipe_asked_for_are_refused(change, arguments, words):
    with pytest.raises(VerificationFailed) as raised:
        check_layers(_report(change, arguments=arguments))
    assert words in raised.value.message


def test_a_layer_that_fell_back_with_a_reason_is_within_the_limit():
    check_layers(_report({"algorithm": "rtn", "fallback": "its Hessian is singular"}))


def test_a_report_without_a_quantizing_stage_has_no_layers_to_check():
    check_layers(merge_samples.MERGED.report(samples.digest_bytes(b"model")))
