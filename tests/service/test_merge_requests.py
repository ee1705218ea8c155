"""Merges over the wire: any architecture is taken in, and what does not fit is refused before it is queued."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from modelpress.v1 import artifacts_pb2
from modelpress.v1 import conversions_pb2 as pb
from service.intake import INSPECTION
from tests.service.intake.tiny import (
    LLAMA,
    encode,
    jsonl,
    llama_tensors,
    lora_tensors,
    safetensors,
)
from tests.service.wire import sha256

CODE = grpc.StatusCode
LORA = "stages: [{method: merge_lora}, {method: export, format: safetensors}]"
MODELS = "stages: [{method: merge_models}, {method: export, format: safetensors}]"
QUERIES = tuple(f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2))
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
KINDS = {"config.json": artifacts_pb2.ARTIFACT_KIND_MODEL, "adapter_config.json": artifacts_pb2.ARTIFACT_KIND_ADAPTER}


def create(wire: Any, files: dict[str, bytes]) -> str:
    """The artifact's name; blobs that the server holds already are not sent again."""
    kind = next((KINDS[name] for name in files if name in KINDS), artifacts_pb2.ARTIFACT_KIND_DATASET)
    digests = {sha256(data): data for data in files.values()}
    missing = wire.artifacts.FindMissing(artifacts_pb2.FindMissingRequest(digests=digests)).missing_digests
    for digest in missing:
        wire.upload(digests[digest])
    listed = [artifacts_pb2.File(path=path, size_bytes=len(d), digest=sha256(d)) for path, d in files.items()]
    manifest = artifacts_pb2.Manifest(files=listed)
    return wire.artifacts.CreateArtifact(artifacts_pb2.CreateArtifactRequest(kind=kind, manifest=manifest)).name


def model(wire: Any, tensors: dict[str, Any] | None = None, **config: Any) -> str:
    weights = safetensors(llama_tensors() if tensors is None else tensors)
    return create(wire, {"config.json": encode(LLAMA | config), "model.safetensors": weights})


def adapter(wire: Any, tensors: dict[str, Any] | None = None, **config: Any) -> str:
    weights = safetensors(lora_tensors(*QUERIES, of=llama_tensors()) if tensors is None else tensors)
    return create(wire, {"adapter_config.json": encode(CONFIG | config), "adapter_model.safetensors": weights})


def request(recipe: str, policy: str = "merge_change: {max: 1}", **inputs: Any) -> pb.CreateConversionRequest:
    message = pb.CreateConversionRequest(validate_only=True, inputs=pb.ConversionInputs(**inputs))
    message.recipe.yaml, message.policy.yaml = recipe, f"gates: {{{policy}}}"
    return message


def merged(wire: Any, *names: str) -> list[pb.AdapterInput]:
    return [pb.AdapterInput(name=f"a{index}", artifact=name) for index, name in enumerate(names)]


def test_a_merge_needs_a_base_and_an_adapter(wire: Any) -> None:
    base, lora = model(wire), adapter(wire)
    message = request(LORA, base=base, adapters=merged(wire, lora))
    estimate = wire.conversions.CreateConversion(message).estimate
    assert list(estimate.steps) == ["compress/1-merge_lora", "evaluate/merge"]
    tensors = llama_tensors().values()
    assert estimate.parameters == sum(tensor.size for tensor in tensors)
    message.validate_only = False
    queued = wire.conversions.CreateConversion(message)
    assert (queued.inputs.evaluation, queued.inputs.adapters[0].artifact) == ("", lora)
    assert pb.ConversionState.Name(queued.state) == "CONVERSION_STATE_QUEUED"


def test_models_keep_their_names_and_weights(wire: Any) -> None:
    other = {name: value * 2 for name, value in llama_tensors().items()}
    models = [pb.ModelInput(name="m", artifact=model(wire, other), weight=0.0)]
    recipe = MODELS.replace("merge_models", "merge_models, merge_method: slerp")
    message = request(recipe, base=model(wire), models=models)
    message.validate_only = False
    assert list(wire.conversions.CreateConversion(message).inputs.models) == models


@pytest.mark.parametrize(
    ("tensors", "config", "mentions"),
    [
        (lora_tensors(*QUERIES[:1], of=llama_tensors()), {}, "model.layers.1.self_attn.q_proj"),
        (lora_tensors("model.layers.0.mlp.down_proj.weight", of=llama_tensors()), {"target_modules": ["up"]}, "'up'"),
        (
            lora_tensors(*QUERIES, of={name: np.ones((8, 7)) for name in QUERIES}),
            {},
            "'model.layers.0.self_attn.q_proj.weight' of shape [8, 7], the base's is [8, 8]",
        ),
    ],
)
def test_an_adapter_of_another_base_is_refused(
    wire: Any, tensors: dict[str, Any], config: dict[str, Any], mentions: str
) -> None:
    message = request(LORA, base=model(wire), adapters=merged(wire, adapter(wire, tensors, **config)))
    refused = wire.refused(lambda: wire.conversions.CreateConversion(message))
    assert (refused.code, refused.reason) == (CODE.INVALID_ARGUMENT, "ADAPTER_MISFIT")
    assert refused.fields == ["inputs.adapters[0]"]
    assert mentions in refused.message


def test_models_of_two_shapes_are_refused(wire: Any) -> None:
    models = [pb.ModelInput(name="m", artifact=model(wire, llama_tensors(vocabulary=15)))]
    refused = wire.refused(lambda: wire.conversions.CreateConversion(request(MODELS, base=model(wire), models=models)))
    assert (refused.code, refused.reason) == (CODE.INVALID_ARGUMENT, "MODEL_MISFIT")
    assert "'model.embed_tokens.weight' has shape [15, 8] in model 'm' and [12, 8] in the base" in refused.message


def test_a_quantized_base_is_taken_in_and_merged_into_only_where_the_recipe_says_so(wire: Any) -> None:
    how = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    inputs = {"base": model(wire, quantization_config=how), "adapters": merged(wire, adapter(wire))}
    refused = wire.refused(lambda: wire.conversions.CreateConversion(request(LORA, **inputs)))
    assert (refused.code, refused.reason) == (CODE.INVALID_ARGUMENT, "QUANTIZED_BASE")
    assert "full-precision" in refused.message and "dequantize_base: true" in refused.message
    asked = LORA.replace("merge_lora", "merge_lora, dequantize_base: true")
    assert wire.conversions.CreateConversion(request(asked, **inputs)).estimate.steps


def test_other_stages_refuse_what_only_a_merge_takes(wire: Any) -> None:
    rows = create(wire, {"rows.jsonl": jsonl({"text": "t", "label": "benign"})})
    message = request(
        "stages: [{method: export}]", "size: {max_ratio: 1}", base=model(wire, model_type="gpt2"), evaluation=rows
    )
    refused = wire.refused(lambda: wire.conversions.CreateConversion(message))
    assert (refused.code, refused.reason) == (CODE.INVALID_ARGUMENT, "UNKNOWN_ARCHITECTURE")
    assert refused.fields == ["inputs.base"]
    assert "'gpt2' is not supported; known: bert, llama" in refused.message


@pytest.mark.parametrize(
    ("inputs", "reason", "field"),
    [
        ({"evaluation": "artifacts/sha256:" + "0" * 64}, "INPUT_NOT_READ", "inputs.evaluation"),
        ({"adapters": []}, "ADAPTER_MISSING", "inputs.adapters"),
    ],
)
def test_what_nothing_reads_and_what_is_missing_are_refused(
    wire: Any, inputs: dict[str, Any], reason: str, field: str
) -> None:
    message = request(LORA, **{"base": model(wire), "adapters": merged(wire, adapter(wire)), **inputs})
    refused = wire.refused(lambda: wire.conversions.CreateConversion(message))
    assert (refused.code, refused.reason, refused.fields) == (CODE.INVALID_ARGUMENT, reason, [field])


def test_a_gate_that_gets_no_figure_is_refused(wire: Any) -> None:
    message = request(LORA, "size: {max_ratio: 1}", base=model(wire), adapters=merged(wire, adapter(wire)))
    refused = wire.refused(lambda: wire.conversions.CreateConversion(message))
    assert (refused.code, refused.reason, refused.fields) == (
        CODE.INVALID_ARGUMENT,
        "INVALID_POLICY",
        ["policy.gates.size"],
    )


@pytest.mark.parametrize(
    ("tensors", "config", "reason", "mentions"),
    [
        ({"base_model.model.a.lora_A.weight": np.zeros((0, 8), np.float32)}, {}, "EMPTY_TENSOR", "stage3_gather"),
        ({"base_model.model.a.lora_A.weight": np.ones((2, 8), np.float32)}, {}, "BAD_ADAPTER", "lora_B.weight"),
        (None, {"init_lora_weights": "pissa"}, "BAD_ADAPTER", "init_lora_weights"),
        (None, {"peft_type": "PROMPT_TUNING"}, "BAD_ADAPTER", "PROMPT_TUNING"),
        (None, {"r": 3}, "BAD_ADAPTER", "[3]"),
    ],
)
def test_an_adapter_that_is_not_whole_is_no_artifact(
    wire: Any, tensors: dict[str, Any] | None, config: dict[str, Any], reason: str, mentions: str
) -> None:
    refused = wire.refused(lambda: adapter(wire, tensors, **config))
    assert (refused.code, refused.reason) == (CODE.INVALID_ARGUMENT, reason)
    assert mentions in refused.message


def test_facts_that_an_older_release_read_are_read_anew(start_server: Any, call: Any, tmp_path: Path) -> None:
    running = start_server(tmp_path / "data")
    wire = call(running)
    base, lora = model(wire), adapter(wire)
    database = sqlite3.connect(tmp_path / "data" / "modelpress.sqlite", timeout=30)
    with database:
        database.execute('UPDATE artifacts SET facts = \'{"kind": "model"}\' WHERE digest = ?', (base.split("/")[1],))
    estimate = wire.conversions.CreateConversion(request(LORA, base=base, adapters=merged(wire, lora))).estimate

    assert estimate.parameters == sum(tensor.size for tensor in llama_tensors().values())
    ((facts,),) = database.execute("SELECT facts FROM artifacts WHERE digest = ?", (base.split("/")[1],)).fetchall()
    assert json.loads(facts)["inspection"] == INSPECTION
    database.close()
