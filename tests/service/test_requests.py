"""A request is valid once built: every part that cannot be is refused by its field, and JSON keeps it whole."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from modelpress.digests import Digest, digest_bytes
from modelpress.errors import InvalidPolicy, InvalidRecipe, InvalidRequest
from modelpress.requests import Limits
from modelpress.v1 import conversions_pb2 as pb
from service.edge.conversion_requests import request_from_proto
from service.requests import AdapterRequest, ConversionRequest, ModelRequest

RECIPE = "stages:\n- method: merge_lora\n- method: prune\n- method: export\n"
MODELS = "stages: [{method: merge_models}, {method: export, format: safetensors}]"
ONLY_MERGE = "stages: [{method: merge_lora}, {method: export, format: safetensors}]"
POLICY = "gates: {flips: {max_share: 0.1}}"


def name_of(text: str) -> str:
    return f"artifacts/{digest_bytes(text.encode())}"


def message(**changes: Any) -> pb.CreateConversionRequest:
    """A request with everything set; `changes` replace fields of it or of its inputs."""
    inputs = {role: name_of(role) for role in ("base", "train", "validation", "evaluation", "probes")}
    inputs["adapters"] = [pb.AdapterInput(name="a-1", artifact=name_of("adapter"), weight=0.5)]  # type: ignore[assignment]
    inputs |= {name: changes.pop(name) for name in list(changes) if name in inputs or name == "models"}
    fields: dict[str, Any] = {
        "request_id": "run-7",
        "recipe": {"yaml": RECIPE},
        "evaluation": {"yaml": "max_length: 64"},
        "policy": {"yaml": POLICY},
        "limits": {"queue_timeout": {"seconds": 5}, "run_timeout": {"seconds": 1, "nanos": 500_000_000}},
        "labels": {"team/owner": "ml platform"},
        "seed": 7,
        "priority": -3,
    }
    fields["evaluation"] = changes.pop("evaluation_source", fields["evaluation"])
    return pb.CreateConversionRequest(inputs=pb.ConversionInputs(**inputs), **(fields | changes))


def refused(**changes: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        request_from_proto(message(**changes))
    return caught.value


def test_every_field_of_the_wire_arrives() -> None:
    request = request_from_proto(message())
    assert request == ConversionRequest(
        base=digest_bytes(b"base"),
        adapters=(AdapterRequest("a-1", digest_bytes(b"adapter"), 0.5),),
        train=digest_bytes(b"train"),
        validation=digest_bytes(b"validation"),
        evaluation_dataset=digest_bytes(b"evaluation"),
        probes=digest_bytes(b"probes"),
        recipe_yaml=RECIPE,
        evaluation_yaml="max_length: 64",
        policy_yaml=POLICY,
        limits=Limits(queue_timeout_s=5.0, run_timeout_s=1.5),
        labels={"team/owner": "ml platform"},
        seed=7,
        priority=-3,
    )
    assert request.recipe.stages[1].method == "prune"
    assert request.evaluation.max_length == 64
    assert request.policy.gates.flips is not None


def test_json_keeps_a_request_whole_and_its_digest() -> None:
    request = request_from_proto(message())
    again = ConversionRequest.from_json(request.to_json())
    assert again == request
    assert again.digest == request.digest


def test_the_digest_tells_every_field_apart() -> None:
    request = request_from_proto(message())
    changes: list[dict[str, Any]] = [
        {"seed": 8},
        {"priority": 0},
        {"labels": {}},
        {"limits": Limits()},
        {"probes": None},
        {"validation": None},
        {"base": digest_bytes(b"x")},
        {"recipe_yaml": RECIPE + "\n"},
        {"evaluation_yaml": ""},
        {"adapters": (AdapterRequest("a-1", digest_bytes(b"adapter")),)},
    ]
    digests = {dataclasses.replace(request, **change).digest for change in changes}
    assert len(digests | {request.digest}) == len(changes) + 1


def test_what_is_left_out_has_its_documented_default() -> None:
    bare = message(
        train="",
        validation="",
        probes="",
        adapters=[],
        evaluation_source=None,
        limits=None,
        labels={},
        seed=0,
        priority=0,
    )
    bare.recipe.yaml = "stages: [{method: export}]"
    request = request_from_proto(bare)
    assert (request.train, request.validation, request.probes) == (None, None, None)
    assert request.limits == Limits(None, None, None)
    assert request.evaluation.text_column == "text"
    weightless = message(adapters=[pb.AdapterInput(name="a", artifact=name_of("a"))])
    assert request_from_proto(weightless).adapters[0].weight == 1.0


def bare(recipe: str, **changes: Any) -> pb.CreateConversionRequest:
    """A request without datasets; `changes` as of `message`."""
    nothing: dict[str, Any] = dict.fromkeys(("train", "validation", "evaluation", "probes"), "")
    nothing["evaluation_source"] = None
    return message(**{**nothing, "recipe": {"yaml": recipe}, **changes})


def test_a_request_that_only_merges_is_read_and_kept_whole() -> None:
    models = [pb.ModelInput(name="m", artifact=name_of("model"), weight=0.25)]
    request = request_from_proto(bare(MODELS, adapters=[], models=models))
    assert request.models == (ModelRequest("m", digest_bytes(b"model"), 0.25),)
    assert (request.evaluation_dataset, dict(request.datasets)) == (None, {})
    assert request.artifacts == (digest_bytes(b"base"), digest_bytes(b"model"))
    assert ConversionRequest.from_json(request.to_json()) == request


def test_a_request_that_was_stored_before_there_were_models_is_read() -> None:
    value = request_from_proto(message()).to_json()
    del value["models"]
    assert ConversionRequest.from_json(value).models == ()


@pytest.mark.parametrize(
    ("changes", "reason", "field"),
    [
        ({"evaluation": ""}, "EVALUATION_DATA_MISSING", "inputs.evaluation"),
        ({"recipe": {"yaml": ONLY_MERGE}}, "INPUT_NOT_READ", "inputs.evaluation"),
        ({"models": [pb.ModelInput(name="m", artifact=name_of("m"))]}, "MODEL_NOT_MERGED", "recipe.stages"),
        ({"recipe": {"yaml": MODELS}, "adapters": []}, "MODEL_MISSING", "inputs.models"),
        ({"models": [pb.ModelInput(name="m", artifact="m")]}, "INVALID_REQUEST", "inputs.models[0].artifact"),
    ],
)
def test_what_no_stage_reads_and_what_a_stage_lacks_are_refused(
    changes: dict[str, Any], reason: str, field: str
) -> None:
    error = refused(**changes)
    assert (error.reason, error.field) == (reason, field)


def test_an_evaluation_that_nothing_reads_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="evaluation is set, and nothing reads it") as caught:
        request_from_proto(bare(ONLY_MERGE, evaluation_source={"yaml": "max_length: 64"}))
    assert (caught.value.field, caught.value.reason) == ("evaluation", "INPUT_NOT_READ")


@pytest.mark.parametrize("request_id", ["a b", "x" * 64, "ä", "a_b"])
def test_a_request_id_of_another_shape_is_refused(request_id: str) -> None:
    assert refused(request_id=request_id).field == "request_id"


@pytest.mark.parametrize("name", ["x", "artifacts/", "sha256:" + "a" * 64, "artifacts/sha256:" + "A" * 64, "uploads/1"])
@pytest.mark.parametrize("role", ["base", "evaluation"])
def test_an_artifact_is_named_in_full(role: str, name: str) -> None:
    error = refused(**{role: name})
    assert error.field == f"inputs.{role}"
    assert "artifacts/sha256:" in error.message


def test_a_base_is_always_needed() -> None:
    assert refused(base="").field == "inputs.base"


def test_the_index_of_a_wrong_adapter_is_named() -> None:
    adapters = [pb.AdapterInput(name="a", artifact=name_of("a")), pb.AdapterInput(name="b", artifact="b")]
    assert refused(adapters=adapters).field == "inputs.adapters[1].artifact"


@pytest.mark.parametrize("name", ["", "A", "a.b", "x" * 64, "a\n"])
def test_an_adapters_name_of_another_shape_is_refused(name: str) -> None:
    assert refused(adapters=[pb.AdapterInput(name=name, artifact=name_of("a"))]).field == "inputs.adapters.name"


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf])
def test_an_adapters_weight_is_finite(weight: float) -> None:
    adapters = [pb.AdapterInput(name="a", artifact=name_of("a"), weight=weight)]
    assert refused(adapters=adapters).field == "inputs.adapters.weight"


def test_two_adapters_of_one_name_are_refused() -> None:
    adapters = [pb.AdapterInput(name="a", artifact=name_of(text)) for text in "xy"]
    assert "'a'" in refused(adapters=adapters).message


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seed": -1}, "seed"),
        ({"seed": 2**31}, "seed"),
        ({"priority": 101}, "priority"),
        ({"priority": -101}, "priority"),
        ({"limits": {"run_timeout": {}}}, "limits.run_timeout"),
        ({"limits": {"queue_timeout": {"seconds": -1}}}, "limits.queue_timeout"),
        ({"limits": {"queue_timeout": {"seconds": 2**60}}}, "limits.queue_timeout"),
        ({"limits": {"memory_limit_bytes": -1}}, "limits.memory_limit_bytes"),
        ({"labels": {"A": "x"}}, "labels"),
        ({"labels": {"": "x"}}, "labels"),
        ({"labels": {"a": "x" * 256}}, "labels.a"),
        ({"labels": {"a": "x\x00"}}, "labels.a"),
        ({"labels": {"a": "\x9b31m"}}, "labels.a"),
        ({"labels": {"a": "\u202egnp"}}, "labels.a"),
        ({"labels": {f"k{i}": "" for i in range(65)}}, "labels"),
    ],
)
def test_a_value_out_of_its_range_is_refused_by_its_field(changes: dict[str, Any], field: str) -> None:
    assert refused(**changes).field == field


@pytest.mark.parametrize(
    ("changes", "kind", "field"),
    [
        (
            {"recipe": {"yaml": RECIPE.replace("prune", "prune\n  ratio: 2")}},
            InvalidRecipe,
            "recipe.stages[1].prune.ratio",
        ),
        ({"recipe": {"yaml": ""}}, InvalidRecipe, "recipe"),
        ({"policy": {"yaml": "gates: {flips: {max_share: 2}}"}}, InvalidPolicy, "policy.gates.flips.max_share"),
        ({"policy": {"yaml": ""}}, InvalidPolicy, "policy"),
        ({"evaluation_source": {"yaml": "max_len: 3"}}, InvalidRequest, "evaluation.max_len"),
    ],
)
def test_a_fault_in_a_text_is_named_by_its_path_from_the_request_on(
    changes: dict[str, Any], kind: type[InvalidRequest], field: str
) -> None:
    error = refused(**changes)
    assert type(error) is kind
    assert error.field == field
    assert error.message.startswith(field)


@pytest.mark.parametrize(
    ("changes", "reason", "mentions"),
    [
        ({"adapters": []}, "ADAPTER_MISSING", "merge_lora"),
        ({"recipe": {"yaml": "stages: [{method: export}]"}}, "ADAPTER_NOT_MERGED", "a-1"),
        ({"recipe": {"yaml": RECIPE.replace("lora\n", "lora\n  adapters: [b]\n")}}, "ADAPTER_MISSING", "'b'"),
        ({"train": "", "validation": ""}, "TRAINING_DATA_MISSING", "prune"),
        (
            {"recipe": {"yaml": "stages: [{method: merge_lora}, {method: export}]"}, "train": ""},
            "INVALID_REQUEST",
            "held-out",
        ),
    ],
)
def test_parts_that_exclude_each_other_are_refused(changes: dict[str, Any], reason: str, mentions: str) -> None:
    error = refused(**changes)
    assert error.reason == reason
    assert mentions in error.message


def test_qat_without_training_data_names_the_stage() -> None:
    recipe = "stages: [{method: merge_lora}, {method: quantize}, {method: export}]"
    assert "quantize" in refused(recipe={"yaml": recipe}, train="", validation="").message


def test_an_adapter_that_the_recipe_leaves_out_is_refused() -> None:
    adapters = [pb.AdapterInput(name=name, artifact=name_of(name)) for name in "ab"]
    recipe = {"yaml": RECIPE.replace("lora\n", "lora\n  adapters: [b]\n")}
    assert refused(adapters=adapters, recipe=recipe).reason == "ADAPTER_NOT_MERGED"


def test_digests_are_checked_where_a_request_is_read_back() -> None:
    value = request_from_proto(message()).to_json()
    with pytest.raises(InvalidRequest):
        ConversionRequest.from_json(value | {"base": "x"})
    assert Digest(value["base"])
