"""Tiny classifiers whose logits can be worked out on paper: the mean, over a text's tokens, of one table's rows."""

from __future__ import annotations

import json
import shutil

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(28)))
POSITIONS = 24


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """A word-level tokenizer: `[CLS] text [SEP]`, word `wI` is token I + 4."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=POSITIONS,
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def table():
    """Rows [V, 2] of the mean: seeded, so that no two words give the same logits."""
    return np.random.default_rng(7).normal(size=(len(WORDS), 2)).astype(np.float32)


@pytest.fixture
def mean_logits():
    """What the model of `write_model` answers for a text, with numpy alone."""

    def logits(table, text: str, max_length: int = POSITIONS):
        words = text.split()[: max_length - 2]
        ids = [2, *(WORDS.index(word) if word in WORDS else 1 for word in words), 3]
        return table[ids].mean(axis=0)

    return logits


def _graph(table, integer) -> onnx.GraphProto:
    """logits = sum over T of table[input_ids] * mask / sum of mask."""
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["wide"]),
        helper.make_node("Mul", ["rows", "wide"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "tokens"], ["sum"], keepdims=0),
        helper.make_node("ReduceSum", ["mask", "tokens"], ["count"], keepdims=1),
        helper.make_node("Div", ["sum", "count"], ["logits"]),
    ]
    constants = {"table": table, "last": np.array([2]), "tokens": np.array([1])}
    return helper.make_graph(
        nodes,
        "mean",
        [helper.make_tensor_value_info(name, integer, ["N", "T"]) for name in ("input_ids", "attention_mask")],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", table.shape[1]])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )


@pytest.fixture
def save_onnx():
    def save(graph: onnx.GraphProto, folder) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        onnx.save(
            helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), folder / "model.onnx"
        )

    return save


@pytest.fixture
def write_model(tokenizer_folder, save_onnx):
    """A complete model folder: graph, config with `labels`, tokenizer."""

    def write(folder, table, labels=("no", "yes"), integer=TensorProto.INT64):
        shutil.copytree(tokenizer_folder, folder)
        save_onnx(_graph(table, integer), folder)
        config = {
            "id2label": {str(i): label for i, label in enumerate(labels)},
            "vocab_size": len(WORDS),
            "max_position_embeddings": POSITIONS,
        }
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


@pytest.fixture
def write_rows():
    def write(folder, rows):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return write
