"""What cannot be is refused before it is queued: artifacts that are not there or do not fit, lengths, memory."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest

from modelpress.digests import Digest, digest_bytes
from modelpress.errors import InvalidDataset, InvalidModel, InvalidPolicy, InvalidRequest, NotFound, OverLimit
from modelpress.manifests import ArtifactKind
from modelpress.recipes import read_recipe
from modelpress.requests import Limits
from service.estimates import EVIDENCE_BYTES, RUNTIME_BYTES, memory_need
from service.preflight import preflight
from service.requests import AdapterRequest, ConversionRequest, ModelRequest
from tests.service.intake.tiny import Files, Inspect, jsonl

BASE, ADAPTER, TRAIN, TEST = (digest_bytes(name.encode()) for name in ("base", "adapter", "train", "test"))
RECIPE = "stages: [{method: merge_lora}, {method: prune}, {method: quantize, max_length: 16}, {method: export}]"
SHORT = "{max_length: 16, latency: {sequence_lengths: [8, 16]}}"
POLICY = "gates: {speed: {min_ratio: 3, sequence_length: 16}}"
ROWS = [{"text": f"t{i}", "label": "benign" if i % 2 else "injection"} for i in range(20)]


@dataclass(frozen=True)
class Server:
    default_memory_limit_bytes: int = 8 << 30


@pytest.fixture
def facts(inspect: Inspect, base_files: Files, adapter_files: Files) -> dict[Digest, dict[str, Any]]:
    return {
        BASE: inspect(ArtifactKind.MODEL, base_files),
        ADAPTER: inspect(ArtifactKind.ADAPTER, adapter_files),
        TRAIN: inspect(ArtifactKind.DATASET, {"train.jsonl": jsonl(*ROWS)}),
        TEST: inspect(
            ArtifactKind.DATASET, {"test.jsonl": jsonl(*({**row, "text": f"x{row['text']}"} for row in ROWS))}
        ),
    }


@pytest.fixture
def request_() -> ConversionRequest:
    return ConversionRequest(
        base=BASE,
        adapters=(AdapterRequest("a", ADAPTER),),
        train=TRAIN,
        evaluation_dataset=TEST,
        recipe_yaml=RECIPE,
        evaluation_yaml=SHORT,
        policy_yaml=POLICY,
    )


Facts = dict[Digest, dict[str, Any]]


def test_a_request_that_can_be_is_estimated(request_: ConversionRequest, facts: Facts) -> None:
    estimate = preflight(request_, facts, Server())
    model = 4 * facts[BASE]["parameters"]
    inputs = sum(found["size_bytes"] for found in facts.values())
    assert estimate.storage_bytes == inputs + 3 * model + 4 * model + model + model // 4 + EVIDENCE_BYTES
    assert estimate.parameters == facts[BASE]["parameters"]
    compress = [step for step in estimate.steps if step.startswith("compress/")]
    assert compress == ["compress/1-merge_lora", "compress/2-prune", "compress/3-quantize"]
    assert estimate.cached_steps == ()
    assert all("calibration_examples" in warning for warning in estimate.warnings)


def test_the_memory_estimate_is_the_documented_formula(request_: ConversionRequest, facts: Facts) -> None:
    need = memory_need(request_, facts[BASE])
    model, tokens, layers = 4 * facts[BASE]["parameters"], 32 * 16, 2
    kept = 4 * tokens * layers * (8 * 8 + 2 * 16 + 2 * 16)
    assert need.certain_bytes == RUNTIME_BYTES + 5 * model
    assert need.peak_bytes == RUNTIME_BYTES + 2 * model + 3 * kept
    untaught = replace(request_, recipe_yaml=RECIPE.replace("prune", "prune, importance: magnitude"))
    need = memory_need(untaught, facts[BASE])
    assert need.peak_bytes == RUNTIME_BYTES + 5 * model + 2 * kept
    recipe = untaught.recipe_yaml.replace("quantize,", "quantize, activation_checkpointing: true,")
    assert memory_need(replace(untaught, recipe_yaml=recipe), facts[BASE]).peak_bytes < need.peak_bytes


def merging(request: ConversionRequest, *, adapters: int = 1, setting: str = "") -> ConversionRequest:
    """The same base with so many adapters, merged and nothing else."""
    names = (f"a{index}" for index in range(adapters))
    return ConversionRequest(
        base=request.base,
        adapters=tuple(AdapterRequest(name, ADAPTER) for name in names),
        recipe_yaml=f"stages: [{{method: merge_lora{setting}}}, {{method: export, format: safetensors}}]",
        policy_yaml="gates: {merge_change: {max: 1}}",
    )


@pytest.fixture
def bare_adapter(facts: dict[Digest, dict[str, Any]]) -> None:
    """The adapter without its classifier, so that several of it fit together."""
    tensors = facts[ADAPTER]["tensors"]
    facts[ADAPTER]["tensors"] = {name: shape for name, shape in tensors.items() if "classifier" not in name}


@pytest.mark.usefixtures("bare_adapter")
def test_a_merge_needs_the_memory_of_its_largest_tensor_and_the_storage_of_its_output(
    request_: ConversionRequest, facts: Facts
) -> None:
    largest = 16 * 8
    for adapters in (1, 3):
        need = memory_need(merging(request_, adapters=adapters), facts[BASE])
        assert need.certain_bytes == RUNTIME_BYTES + 4 * largest
        assert need.peak_bytes == RUNTIME_BYTES + 4 * (2 + adapters) * largest
    stored = facts[BASE]["size_bytes"] + facts[ADAPTER]["size_bytes"] + facts[BASE]["weight_bytes"] + EVIDENCE_BYTES
    estimate = preflight(merging(request_), facts, Server())
    assert (estimate.storage_bytes, estimate.warnings) == (stored, ())
    half = {**facts[BASE], "weight_bytes": facts[BASE]["weight_bytes"] // 2}
    widened = merging(request_, setting=", output_dtype: float32")
    assert preflight(widened, facts | {BASE: half}, Server()).storage_bytes == stored


@pytest.mark.usefixtures("bare_adapter")
def test_a_merge_s_memory_limit_is_judged_by_its_largest_tensor(request_: ConversionRequest, facts: Facts) -> None:
    need = memory_need(merging(request_), facts[BASE])
    with pytest.raises(InvalidRequest, match=str(need.certain_bytes)):
        preflight(replace(merging(request_), limits=Limits(memory_limit_bytes=need.certain_bytes - 1)), facts, Server())
    [warning] = preflight(
        replace(merging(request_), limits=Limits(memory_limit_bytes=need.certain_bytes)), facts, Server()
    ).warnings
    assert str(need.peak_bytes) in warning
    assert "merge fewer at once" in warning


def test_an_adapter_or_a_model_that_is_not_there_is_named_by_its_place(
    request_: ConversionRequest, facts: Facts
) -> None:
    nowhere = digest_bytes(b"nowhere")
    with pytest.raises(NotFound) as missing:
        preflight(replace(merging(request_), adapters=(AdapterRequest("a", nowhere),)), facts, Server())
    assert missing.value.field == "inputs.adapters[0].artifact"
    recipe = "stages: [{method: merge_models}, {method: export, format: safetensors}]"
    models = (ModelRequest("same", BASE), ModelRequest("m", ADAPTER))
    with pytest.raises(InvalidRequest, match="kind MODEL") as wrong:
        preflight(replace(merging(request_), recipe_yaml=recipe, adapters=(), models=models), facts, Server())
    assert wrong.value.field == "inputs.models[1].artifact"


@pytest.mark.parametrize("role", ["base", "train", "evaluation_dataset", "validation", "probes"])
def test_an_artifact_that_is_not_there_or_of_another_kind_is_named(
    request_: ConversionRequest, facts: Facts, role: str
) -> None:
    field = {"evaluation_dataset": "inputs.evaluation"}.get(role, f"inputs.{role}")
    with pytest.raises(NotFound) as missing:
        preflight(replace(request_, **{role: digest_bytes(b"nowhere")}), facts, Server())
    assert missing.value.field == field
    with pytest.raises(InvalidRequest) as wrong:
        preflight(replace(request_, **{role: ADAPTER}), facts, Server())
    assert (wrong.value.field, wrong.value.reason) == (field, "WRONG_KIND")


def test_an_adapter_of_another_base_is_refused_by_its_field(request_: ConversionRequest, facts: Facts) -> None:
    tensors = {name.replace("layer.1", "layer.2"): shape for name, shape in facts[ADAPTER]["tensors"].items()}
    with pytest.raises(InvalidModel, match=r"it changes 'bert\.encoder\.layer\.2.*does not have") as caught:
        preflight(request_, facts | {ADAPTER: {**facts[ADAPTER], "tensors": tensors}}, Server())
    assert (caught.value.reason, caught.value.field) == ("ADAPTER_MISFIT", "inputs.adapters[0]")


def with_rows(inspect: Inspect, facts: Facts, digest: Digest, *rows: Any) -> Facts:
    return facts | {digest: inspect(ArtifactKind.DATASET, {"d.jsonl": jsonl(*rows)})}


@pytest.mark.parametrize("digest", [TRAIN, TEST])
@pytest.mark.parametrize(
    ("rows", "mentions"),
    [
        ([*ROWS, {"text": "t"}], ["line 21", "'label'"]),
        ([*ROWS, {"label": "benign"}], ["line 21", "'text'"]),
        ([*ROWS, {"text": None, "label": "benign"}], ["line 21", "null"]),
        ([*ROWS, {"text": "t", "label": None}], ["line 21", "null"]),
        ([*ROWS, {"text": "t", "label": float(1)}], ["line 21", "float"]),
        ([*ROWS, {"text": "t", "label": "unsure"}], ["line 21", "'unsure'", "benign, injection"]),
        ([*ROWS, {"text": "t", "label": 1}], ["line 21", "1"]),
        ([{"sentence": "t", "label": "benign"}], ["'text'", "sentence, label"]),
        ([{"text": f"t{i}", "label": f"l{i}"} for i in range(1100)], ["line 1", "'l0'"]),
    ],
)
def test_a_dataset_that_does_not_fit_is_refused_with_file_and_line(
    request_: ConversionRequest, facts: Facts, inspect: Inspect, digest: Digest, rows: list[Any], mentions: list[str]
) -> None:
    with pytest.raises(InvalidDataset) as caught:
        preflight(request_, with_rows(inspect, facts, digest, *rows), Server())
    assert all(part in caught.value.message for part in mentions), caught.value.message


def test_labels_are_matched_by_name_never_by_number(
    request_: ConversionRequest, facts: Facts, inspect: Inspect
) -> None:
    numbered = with_rows(inspect, facts, TEST, *({"text": f"x{i}", "label": i % 2} for i in range(20)))
    named = replace(request_, evaluation_yaml=SHORT.replace("{max", "{label_names: [injection, benign], max", 1))
    preflight(named, numbered, Server())
    with pytest.raises(InvalidDataset, match="label_names"):
        preflight(named, with_rows(inspect, facts, TEST, {"text": "x", "label": 2}), Server())


def test_what_is_odd_and_possible_is_a_warning(request_: ConversionRequest, facts: Facts, inspect: Inspect) -> None:
    rows = [{"text": f"t{i}", "label": "Benign"} for i in range(5)] + [
        {"text": f"y{i}", "label": "benign"} for i in range(5)
    ]
    warnings = preflight(request_, with_rows(inspect, facts, TEST, *rows), Server()).warnings
    assert any("'Benign' is taken for the model's 'benign'" in warning for warning in warnings)
    assert any("every row has the label 'benign'" in warning for warning in warnings)
    assert any(warning.startswith("50.0% of the different evaluation texts") for warning in warnings)
    assert any("calibration_examples is 512, and the training dataset has 20 rows" in warning for warning in warnings)


def test_probes_need_texts_and_no_labels(request_: ConversionRequest, facts: Facts, inspect: Inspect) -> None:
    probes = digest_bytes(b"probes")
    asked = replace(request_, probes=probes)
    preflight(asked, with_rows(inspect, facts, probes, {"text": "x"}), Server())
    with pytest.raises(InvalidDataset, match=r"inputs\.probes"):
        preflight(asked, with_rows(inspect, facts, probes, {"text": 3}), Server())


def test_a_single_training_row_cannot_be_split(request_: ConversionRequest, facts: Facts, inspect: Inspect) -> None:
    one = with_rows(inspect, facts, TRAIN, ROWS[0])
    with pytest.raises(InvalidDataset, match="one row"):
        preflight(request_, one, Server())
    preflight(replace(request_, validation=TEST), one, Server())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"evaluation_yaml": "{max_length: 17, latency: {sequence_lengths: [16]}}"}, "evaluation.max_length"),
        ({"evaluation_yaml": "{max_length: 16}"}, "evaluation.latency.sequence_lengths"),
        ({"recipe_yaml": RECIPE.replace("max_length: 16", "max_length: 17")}, "recipe.stages[2].max_length"),
    ],
)
def test_nothing_is_longer_than_the_models_positions(
    request_: ConversionRequest, facts: Facts, change: dict[str, str], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        preflight(replace(request_, **change), facts, Server())
    assert (caught.value.field, caught.value.reason) == (field, "TOO_LONG")
    assert "16" in caught.value.message


def test_texts_are_not_longer_than_the_tokenizer_is_made_for(request_: ConversionRequest, facts: Facts) -> None:
    facts[BASE]["tokenizer"] |= {"model_max_length": 12}
    preflight(replace(request_, evaluation_yaml=SHORT.replace("max_length: 16", "max_length: 12")), facts, Server())
    with pytest.raises(
        InvalidRequest, match="max_length is 16: the model's tokenizer takes at most 12 tokens: set it to 12 or less"
    ):
        preflight(request_, facts, Server())


def test_a_speed_gate_at_a_shape_that_is_not_timed_is_refused(request_: ConversionRequest, facts: Facts) -> None:
    with pytest.raises(InvalidPolicy):
        preflight(replace(request_, policy_yaml=POLICY.replace("16", "12")), facts, Server())


def test_a_module_to_leave_float_must_exist(request_: ConversionRequest, facts: Facts) -> None:
    def ignoring(name: str) -> ConversionRequest:
        return replace(request_, recipe_yaml=RECIPE.replace("quantize,", f"quantize, ignore: ['{name}'],"))

    for name in ("classifier", "bert.encoder.layer.0", "re:.*pooler.*"):
        preflight(ignoring(name), facts, Server())
    with pytest.raises(InvalidRequest, match="did you mean 'classifier'"):
        preflight(ignoring("classifer"), facts, Server())


def test_a_memory_limit_that_can_never_do_is_refused_with_the_figure(request_: ConversionRequest, facts: Facts) -> None:
    need = memory_need(request_, facts[BASE])
    tight = replace(request_, limits=Limits(memory_limit_bytes=need.certain_bytes - 1))
    with pytest.raises(InvalidRequest) as caught:
        preflight(tight, facts, Server())
    assert caught.value.reason == "MEMORY_LIMIT_TOO_LOW"
    assert str(need.certain_bytes) in caught.value.message
    with pytest.raises(OverLimit, match=str(need.certain_bytes)):
        preflight(request_, facts, Server(default_memory_limit_bytes=1 << 20))
    may_do = replace(request_, limits=Limits(memory_limit_bytes=need.certain_bytes))
    assert any(str(need.peak_bytes) in warning for warning in preflight(may_do, facts, Server()).warnings)


def test_preflight_changes_no_facts(request_: ConversionRequest, facts: Facts) -> None:
    before = copy.deepcopy(facts)
    preflight(request_, facts, Server())
    assert facts == before
    assert read_recipe(RECIPE) == request_.recipe
