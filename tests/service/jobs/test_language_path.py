"""The plan of a language model's conversion, the steps that it asks for, and the report that is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from modelpress.digests import digest_bytes
from modelpress.errors import InternalError
from service.pipeline import make_candidate
from service.plan import make_plan
from service.requests import AdapterRequest, ConversionRequest
from service.steps import Step, StepResult
from tests.service.jobs.test_pipeline import DIGESTS, RECORDS

BASE, TRAIN, ROWS, PROBES = (digest_bytes(name.encode()) for name in ("base", "train", "rows", "probes"))
GPTQ = "{method: quantize_weights, algorithm: gptq}"
ROUNDED = "{method: quantize_weights, algorithm: rtn}"
PACKED = "{method: export, format: compressed-tensors}"
TASK = "{task: text-generation}"
MEASURED = ("evaluate/choices", "evaluate/generations")


def metric(name: str) -> dict[str, Any]:
    return {"name": name, "value": 1.0, "unit": "ratio", "n": 1}


FIGURES: Mapping[str, Any] = {
    "dataset": str(ROWS),
    "baseline_runtime": "r",
    "candidate_runtime": "r",
    "window": 8,
    "stride": 8,
    **{name: metric(name) for name in ("baseline_perplexity", "candidate_perplexity", "perplexity_ratio")},
    **{name: metric(name) for name in ("token_kl", "top1_agreement")},
    "windows": [{"tokens": 7, "baseline_nats": 1.0, "candidate_nats": 1.0, "kl_nats": 0.0, "agreements": 7}],
    "footprint": {"baseline_bytes": 4, "candidate_bytes": 1, "baseline_parameters": 2, "candidate_parameters": 2},
    "warnings": ["seen before"],
}
DRIFT: Mapping[str, Any] = {
    "probes": str(ROWS),
    "n": 7,
    "flips": 0,
    **{name: metric(name) for name in ("flip_share", "kl_mean", "kl_p99")},
    "kl_histogram": {"edges": [0.0, 1.0], "counts": [7]},
}
PARITY = {"max_logit_difference": 0.0, "mean_logit_difference": 0.0, "label_changes": 0, "n": 1}
LANGUAGE_RECORDS: Mapping[str, Mapping[str, Any]] = {
    **RECORDS,
    "choices": {"choices": None},
    "generate": {"generations": []},
    "language": FIGURES,
    "language_parity": PARITY,
    "token_drift": DRIFT,
    "compress/export_decoder_onnx": {"evidence": str(digest_bytes(b"evidence"))},
}
ONLY_FIGURES = ("merge_check", "choices", "generate", "language", "language_parity", "token_drift")


@dataclass
class Noted:
    """A runner that notes every step and answers with a record like a worker's; a folder is named by its step."""

    memory_limit_bytes: int = 8 << 30
    steps: list[Step] = field(default_factory=list)

    def run(self, step: Step) -> StepResult:
        self.steps.append(step)
        digest = None if step.operation in ONLY_FIGURES else digest_bytes(step.name.encode())
        return StepResult(digest, LANGUAGE_RECORDS.get(step.operation, {}), 1.0, "c1")

    def run_paired(self, step: Step) -> StepResult:
        return self.run(step)


def request(*stages: str, **fields: Any) -> ConversionRequest:
    recipe = f"stages: [{', '.join(stages)}]"
    given = {"base": BASE, "evaluation_dataset": ROWS, "policy_yaml": "gates: {kl_mean: {max: 1}}"}
    return ConversionRequest(**given | {"evaluation_yaml": TASK, "recipe_yaml": recipe} | fields)


def walked(asked: ConversionRequest) -> dict[str, Step]:
    """Every step by its name, in the order in which they are asked for."""
    noted = Noted()
    make_candidate(make_plan(asked), noted)
    assert tuple(step.name for step in noted.steps) == make_plan(asked).step_names
    return {step.name: step for step in noted.steps}


def test_a_quantized_decoder_is_compared_with_the_base_as_it_is():
    steps = walked(request(GPTQ, PACKED, train=TRAIN))
    compared = ("compare/evaluation", *MEASURED, "evaluate/language", "drift")
    assert tuple(steps) == ("compress/1-quantize_weights", "export/candidate", *compared)
    quantized, shipped = digest_bytes(b"compress/1-quantize_weights"), digest_bytes(b"export/candidate")
    assert steps["export/candidate"].inputs == {"model": quantized}
    assert steps["export/candidate"].operation == "compress/export_compressed_tensors"
    models = {"baseline": BASE, "candidate": shipped}
    assert steps["compare/evaluation"].inputs == {**models, "data": ROWS}
    figures = digest_bytes(b"compare/evaluation")
    assert steps["evaluate/language"].inputs == {**models, "figures": figures, "data": ROWS, "train": TRAIN}
    assert steps["drift"].inputs == {"figures": figures}


def test_onnx_is_compared_with_the_base_in_onnx_and_with_torch():
    steps = walked(request(ROUNDED, "{method: export, format: onnx}"))
    exports = ("compress/1-quantize_weights", "export/baseline", "export/candidate")
    assert tuple(steps) == (*exports, "compare/evaluation", *MEASURED, "evaluate/parity", "evaluate/language", "drift")
    assert steps["export/baseline"].inputs == {"model": BASE}
    assert steps["compare/evaluation"].inputs["baseline"] == digest_bytes(b"export/baseline")
    parity = {"candidate": digest_bytes(b"export/candidate"), "parity": digest_bytes(b"evidence")}
    assert steps["evaluate/parity"].inputs == parity


def test_an_export_alone_needs_no_other_stage():
    steps = walked(request("{method: export}"))
    assert tuple(steps)[:2] == ("export/baseline", "export/candidate")
    assert {steps[name].operation for name in tuple(steps)[:2]} == {"compress/export_decoder_onnx"}


def test_a_merge_comes_first_and_is_the_baseline():
    adapters = (AdapterRequest("a", DIGESTS["a"]),)
    steps = walked(request("{method: merge_lora}", GPTQ, PACKED, train=TRAIN, adapters=adapters))
    assert tuple(steps)[:3] == ("compress/1-merge_lora", "evaluate/merge", "compress/2-quantize_weights")
    assert steps["compare/evaluation"].inputs["baseline"] == digest_bytes(b"compress/1-merge_lora")


def test_probes_are_compared_beside_the_evaluation_texts():
    steps = walked(request(ROUNDED, PACKED, probes=PROBES))
    assert tuple(steps)[2:4] == ("compare/evaluation", "compare/probes")
    assert steps["compare/probes"].inputs["data"] == PROBES
    assert steps["drift"].inputs == {"figures": digest_bytes(b"compare/probes")}
    assert steps["evaluate/language"].inputs["figures"] == digest_bytes(b"compare/evaluation")


@pytest.mark.parametrize(
    ("export_format", "scheme", "operation"),
    [
        ("gptq", "w4a16, scale_dtype: float16", "compress/export_gptq"),
        ("bitsandbytes", "nf4", "compress/export_bitsandbytes"),
        ("onnx", "w4a16", "compress/export_decoder_onnx"),
    ],
)
def test_each_format_has_its_operation(export_format: str, scheme: str, operation: str):
    stages = (
        f"{{method: quantize_weights, algorithm: rtn, scheme: {scheme}}}",
        f"{{method: export, format: {export_format}}}",
    )
    assert walked(request(*stages))["export/candidate"].operation == operation


def test_training_data_measures_every_quantizer_and_teaches_those_that_calibrate():
    steps = walked(request(ROUNDED, PACKED, train=TRAIN))
    assert steps["compress/1-quantize_weights"].inputs == {"model": BASE, "train": TRAIN}
    assert "train" not in steps["evaluate/language"].inputs
    assert "train" not in walked(request("{method: export}", train=TRAIN))["export/candidate"].inputs
    calibrated = walked(request(GPTQ, PACKED, train=TRAIN))["compress/1-quantize_weights"]
    assert calibrated.inputs == {"model": BASE, "train": TRAIN}
    assert calibrated.arguments["columns"] == {"text_column": "text"}


def test_a_field_that_changes_no_figure_changes_no_key():
    def keys(evaluation: str) -> dict[str, str]:
        steps = walked(request(GPTQ, PACKED, train=TRAIN, evaluation_yaml=evaluation))
        return {name: str(step.key({})) for name, step in steps.items()}

    def changed(fields: str) -> set[str]:
        plain, other = keys(TASK), keys(f"{{task: text-generation, {fields}}}")
        return {name for name in plain if plain[name] != other[name]}

    generations = "evaluate/generations"
    assert changed("generations: 2, confidence: 0.9") == {"evaluate/choices", generations, "evaluate/language", "drift"}
    assert changed("max_new_tokens: 7") == {generations}
    assert changed("stride: 4") == {"compare/evaluation"}
    assert changed("batch_size: 2, window: 64") == {"compare/evaluation", "evaluate/choices"}


def test_the_report_repeats_what_every_step_measured():
    candidate = make_candidate(make_plan(request(GPTQ, PACKED, train=TRAIN)), Noted())
    language = candidate.measured.language
    assert (language.dataset, language.measured_by, language.warnings) == (str(ROWS), "c1", ("seen before",))
    assert (language.choices, language.generations, language.parity) == (None, (), None)
    assert (candidate.measured.evaluation, candidate.measured.drift.n) == (None, 7)
    assert candidate.model == digest_bytes(b"export/candidate")
    in_onnx = make_candidate(make_plan(request("{method: export}")), Noted())
    assert in_onnx.measured.parity.model_dump() == PARITY


def test_a_plan_knows_the_evaluation_of_its_own_task_only():
    with pytest.raises(InternalError, match="language model"):
        _ = make_plan(request(ROUNDED, PACKED)).evaluation
