"""A model that only a merge can take is taken in, and refused by every recipe with other stages, with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from modelpress.digests import digest_bytes
from modelpress.errors import InvalidModel
from modelpress.manifests import ArtifactKind
from service.preflight import preflight
from service.requests import ConversionRequest, ModelRequest
from tests.service.intake.test_preflight import Server
from tests.service.intake.tiny import CONFIG, Files, Inspect, encode, jsonl

BASE, ROWS = digest_bytes(b"base"), digest_bytes(b"rows")
EXPORT = ConversionRequest(
    base=BASE,
    evaluation_dataset=ROWS,
    recipe_yaml="stages: [{method: export}]",
    policy_yaml="gates: {size: {max_ratio: 1}}",
)
MERGE = ConversionRequest(
    base=BASE,
    models=(ModelRequest("same", BASE),),
    recipe_yaml="stages: [{method: merge_models}, {method: export, format: safetensors}]",
    policy_yaml="gates: {merge_change: {max: 1}}",
)


def obstacle(inspect: Inspect, files: Files) -> InvalidModel:
    """The refusal of an export of a model that intake has taken, and that merges unless it is quantized."""
    facts = {BASE: inspect(ArtifactKind.MODEL, files)}
    facts[ROWS] = inspect(ArtifactKind.DATASET, {"d.jsonl": jsonl({"text": "t", "label": "benign"})})
    assert (facts[BASE]["task"], facts[BASE]["labels"]) == (None, [])
    if not facts[BASE]["quantization"]:
        assert preflight(MERGE, facts, Server()).steps
    with pytest.raises(InvalidModel) as caught:
        preflight(EXPORT, facts, Server())
    assert caught.value.field == "inputs.base"
    assert caught.value.message.startswith("inputs.base: ")
    return caught.value


@pytest.mark.parametrize(
    ("change", "reason", "mentions"),
    [
        ({"model_type": "gpt2"}, "UNKNOWN_ARCHITECTURE", "bert"),
        ({"model_type": None}, "UNKNOWN_ARCHITECTURE", "bert"),
        ({"architectures": ["BertModel"]}, "UNKNOWN_ARCHITECTURE", "BertForSequenceClassification"),
        ({"architectures": [["x"]]}, "UNKNOWN_ARCHITECTURE", "architectures"),
        ({"hidden_size": 9}, "BAD_CONFIG", "num_attention_heads"),
        ({"hidden_size": True}, "BAD_CONFIG", "hidden_size"),
        ({"num_hidden_layers": 10**12}, "BAD_CONFIG", "num_hidden_layers"),
        ({"hidden_act": "evil"}, "BAD_CONFIG", "gelu"),
        ({"position_embedding_type": "relative_key"}, "BAD_CONFIG", "relative_key"),
        ({"quantization_config": {"bits": 4}}, "BAD_CONFIG", "quantization_config"),
        ({"problem_type": "regression"}, "BAD_CONFIG", "regression"),
        ({"problem_type": "multi_label_classification"}, "BAD_CONFIG", "multi_label"),
        ({"layer_norm_eps": 0}, "BAD_CONFIG", "layer_norm_eps"),
        ({"layer_norm_eps": "1e-12"}, "BAD_CONFIG", "layer_norm_eps"),
        ({"initializer_range": 1}, "BAD_CONFIG", "initializer_range"),
        ({"hidden_dropout_prob": "x"}, "BAD_CONFIG", "hidden_dropout_prob"),
        ({"attention_probs_dropout_prob": 1.5}, "BAD_CONFIG", "attention_probs_dropout_prob"),
        ({"classifier_dropout": True}, "BAD_CONFIG", "classifier_dropout"),
        ({"dtype": "rubbish"}, "BAD_CONFIG", "dtype"),
        ({"torch_dtype": ["float32"]}, "BAD_CONFIG", "torch_dtype"),
        ({"return_dict": False}, "BAD_CONFIG", "return_dict"),
        ({"chunk_size_feed_forward": 2}, "BAD_CONFIG", "chunk_size_feed_forward"),
        ({"pad_token_id": 12}, "BAD_CONFIG", "pad_token_id"),
        ({"pad_token_id": -1}, "BAD_CONFIG", "pad_token_id"),
        ({"max_position_embeddings": 7}, "BAD_CONFIG", "from 8"),
        ({"label2id": None}, "BAD_LABELS", "leave it out"),
        ({"id2label": None}, "BAD_LABELS", "id2label"),
        ({"id2label": {"0": "a", "2": "b"}}, "BAD_LABELS", "id2label"),
        ({"id2label": {"0": "a", "1": "a"}, "label2id": None}, "BAD_LABELS", "two classes"),
        ({"id2label": {"0": "a", "1": 3}, "label2id": None}, "BAD_LABELS", "3"),
        ({"label2id": {"benign": 1, "injection": 0}}, "BAD_LABELS", "label2id"),
        ({"num_labels": 3}, "BAD_LABELS", "num_labels"),
    ],
)
def test_a_config_that_other_stages_cannot_take_is_refused_by_them(
    inspect: Inspect, base_files: Files, change: dict[str, Any], reason: str, mentions: str
) -> None:
    base_files["config.json"] = encode(CONFIG | change)
    error = obstacle(inspect, base_files)
    assert (error.reason, mentions in error.message) == (reason, True), error.message


def test_a_model_without_a_tokenizer_is_only_merged(inspect: Inspect, base_files: Files) -> None:
    del base_files["tokenizer.json"]
    error = obstacle(inspect, base_files)
    assert error.reason == "NO_TOKENIZER"
    assert "save_pretrained" in error.message


def test_a_complete_model_has_no_obstacle(inspect: Inspect, base_files: Files) -> None:
    assert inspect(ArtifactKind.MODEL, base_files)["obstacle"] is None
