"""A trained classification head on a language model's base: kept exactly, with class and labels, or refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from modelpress.errors import InvalidRecipe
from tests.compressors.lora_merges import (
    PREFIX,
    QUERY,
    TOKENS,
    WIDTH,
    Bases,
    Bench,
    distance,
    factors,
    logits,
    quiet_peft,
    save,
    tensors_of,
    train,
    write_adapter,
)

LABELS = ("negative", "neutral", "positive")
SMALL = {"vocab_size": TOKENS, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16}


def classifier(bases: Bases, kind: str) -> nn.Module:
    """The base's body under a classification head that no training has seen."""
    config = transformers.LlamaConfig.from_pretrained(bases.folder(kind), num_labels=len(LABELS))
    model = transformers.LlamaForSequenceClassification(config)
    model.model.load_state_dict(bases.model(kind).model.state_dict())
    return model.eval()


@pytest.mark.parametrize("kind", ["llama", "tied"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"modules_to_save": ["score"]},
        {"task_type": None, "modules_to_save": ["score"]},
        {"modules_to_save": ["norm"]},
    ],
)
def test_a_trained_head_becomes_the_models(kind: str, fields: dict[str, Any], bases, bench, tmp_path) -> None:
    trained = train(classifier(bases, kind), **{"target_modules": ["v_proj"], "task_type": "SEQ_CLS"} | fields)
    adapter = save(trained, tmp_path / "adapter")

    merged = bench.merge(bases.folder(kind), adapter, labels=LABELS)

    model = transformers.AutoModelForSequenceClassification.from_pretrained(merged.folder)
    assert distance(logits(model), logits(trained)) < 1e-5
    assert torch.equal(merged.tensors["score.weight"], tensors_of(adapter)[f"{PREFIX}score.weight"])
    assert model.config.architectures == ["LlamaForSequenceClassification"]
    assert model.config.id2label == dict(enumerate(LABELS))
    assert model.config.label2id == {label: number for number, label in enumerate(LABELS)}
    assert "lm_head.weight" not in merged.tensors
    assert merged.record.details["tensors_added"] == ["score.weight"]
    assert merged.record.details["tensors_dropped"] == ([] if kind == "tied" else ["lm_head.weight"])
    assert any("LlamaForSequenceClassification" in warning for warning in merged.record.warnings)


def test_a_head_has_the_bases_dtype_or_the_one_asked_for(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    base, head = bases.folder("llama", dtype=torch.bfloat16), torch.randn(3, WIDTH)
    adapter = write_head(tmp_path / "adapter", head)

    stored, wide = (bench.merge(base, adapter, labels=LABELS, **{"output_dtype": d}) for d in ("stored", "float32"))

    assert torch.equal(stored.tensors["score.weight"], head.bfloat16())
    assert torch.equal(wide.tensors["score.weight"], head)


def test_a_shard_that_held_the_old_head_alone_is_gone(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    base = bases.folder("llama", shards="5KB")
    index = json.loads((base / "model.safetensors.index.json").read_text())["weight_map"]
    assert list(index.values()).count(index["lm_head.weight"]) == 1
    adapter = write_head(tmp_path / "adapter", torch.ones(3, WIDTH))

    merged = bench.merge(base, adapter, labels=LABELS).folder

    written = json.loads((merged / "model.safetensors.index.json").read_text())["weight_map"]
    assert written.keys() == index.keys() - {"lm_head.weight"} | {"score.weight"}
    assert {path.name for path in merged.glob("*.safetensors")} == set(written.values())
    assert index["lm_head.weight"] not in written.values()


@pytest.mark.parametrize("base", ["BertForPreTraining", "RobertaForMaskedLM", "DistilBertForMaskedLM"])
def test_a_head_of_several_layers_becomes_the_models(base: str, bench: Bench, tmp_path: Path) -> None:
    folder, trained = bert_like(tmp_path, base)
    adapter = save(trained, tmp_path / "adapter")

    merged = bench.merge(folder, adapter, labels=LABELS)

    model, loading = type(trained.get_base_model()).from_pretrained(merged.folder, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert distance(logits(model.eval()), logits(trained)) < 1e-5


def test_a_part_that_neither_base_nor_adapter_has_is_refused(bench: Bench, tmp_path: Path) -> None:
    """BERT's pooler: a classifier needs it, a masked language model has none, and PEFT does not save it by itself."""
    folder, trained = bert_like(tmp_path, "BertForMaskedLM")

    error = bench.refused(folder, save(trained, tmp_path / "adapter"), labels=LABELS)

    assert all(part in error.message for part in ("bert.pooler.dense", "BertForSequenceClassification"))
    assert "modules_to_save" in error.message


def test_that_part_may_come_with_the_adapter(bench: Bench, tmp_path: Path) -> None:
    folder, trained = bert_like(tmp_path, "BertForMaskedLM", modules_to_save=["classifier", "pooler"])

    merged = bench.merge(folder, save(trained, tmp_path / "adapter"), labels=LABELS)

    model = transformers.BertForSequenceClassification.from_pretrained(merged.folder)
    assert distance(logits(model.eval()), logits(trained)) < 1e-5


def test_labels_and_head_must_agree(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    base, adapter = bases.folder("llama"), write_head(tmp_path / "adapter", torch.ones(3, WIDTH))

    for labels, mentions in (
        ((), ["score.weight", "labels"]),
        (("no", "yes"), ["score.weight", f"[3, {WIDTH}]", f"[2, {WIDTH}]"]),
    ):
        message = bench.refused(base, adapter, labels=labels).message
        assert all(mention in message for mention in mentions), message


def test_a_head_of_another_width_is_refused(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    adapter = write_head(tmp_path / "adapter", torch.ones(3, 16))

    message = bench.refused(bases.folder("llama"), adapter, labels=LABELS).message

    assert all(mention in message for mention in ("score.weight", "[3, 16]", f"[3, {WIDTH}]")), message


def test_a_model_that_has_no_classifier_class_is_refused(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    tensors = factors("backbone.layers.0.mixer.out_proj", 16, 32) | {f"{PREFIX}score.weight": torch.ones(3, 16)}
    adapter = write_adapter(tmp_path / "adapter", tensors, task_type="SEQ_CLS", target_modules=["out_proj"])

    message = bench.refused(bases.folder("mamba"), adapter, labels=LABELS).message

    assert all(mention in message for mention in ("mamba", "sequence classification")), message


@pytest.mark.parametrize("task", ["TOKEN_CLS", "QUESTION_ANS"])
def test_a_head_of_another_task_is_refused(task: str, bases: Bases, bench: Bench, tmp_path: Path) -> None:
    adapter = write_head(tmp_path / "adapter", torch.ones(3, WIDTH), task_type=task, modules_to_save=["score"])

    message = bench.refused(bases.folder("llama"), adapter, labels=LABELS).message

    assert all(mention in message for mention in ("task_type", task, "base")), message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("vocab_size", "64"), ("num_hidden_layers", "two"), ("num_attention_heads", 0), ("intermediate_size", -1)),
        *(("pad_token_id", 10**9), ("rope_parameters", "x"), ("text_config", [1]), ("tie_word_embeddings", None)),
    ],
)
def test_a_config_of_which_no_classifier_is_made_is_refused(
    field: str, value: object, bases: Bases, bench: Bench, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(bases.folder("llama"), base)
    config = json.loads((base / "config.json").read_text()) | {field: value}
    (base / "config.json").write_text(json.dumps(config))
    adapter = write_head(tmp_path / "adapter", torch.ones(2, WIDTH))

    error = bench.refused(base, adapter, labels=("no", "yes"))

    assert all(part in error.message for part in ("LlamaForSequenceClassification", "config.json")), error.message


def test_labels_without_a_head_are_refused(bases: Bases, bench: Bench, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", factors(QUERY, 32, WIDTH), target_modules=[QUERY])

    with pytest.raises(InvalidRecipe, match="labels"):
        bench.merge(bases.folder("llama"), adapter, labels=LABELS)


def write_head(folder: Path, head: torch.Tensor, **fields: Any) -> Path:
    tensors = factors(QUERY, 32, WIDTH) | {f"{PREFIX}score.weight": head}
    return write_adapter(folder, tensors, target_modules=[QUERY], **{"task_type": "SEQ_CLS"} | fields)


def bert_like(root: Path, base: str, **fields: Any) -> tuple[Path, nn.Module]:
    """A base's folder, and a classifier with an adapter that was trained on that base."""
    kind = getattr(transformers, base)
    torch.manual_seed(0)
    distil = {"dim": WIDTH, "hidden_dim": 48, "n_layers": 1, "n_heads": 2, "vocab_size": TOKENS}
    sizes = distil if "Distil" in base else SMALL | {"hidden_size": WIDTH, "intermediate_size": 48}
    kind(kind.config_class(**sizes)).save_pretrained(root / base)
    with quiet_peft():
        model = transformers.AutoModelForSequenceClassification.from_pretrained(root / base, num_labels=len(LABELS))
    targets = ["q_lin"] if "Distil" in base else ["query"]
    return root / base, train(model.eval(), **{"target_modules": targets, "task_type": "SEQ_CLS"} | fields)
