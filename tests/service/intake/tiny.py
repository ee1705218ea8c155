"""A tiny BERT, its adapter and rows as plain bytes; a tiny Llama as a model of another architecture."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from modelpress.manifests import ArtifactKind
from service.intake.families import bert_for_sequence_classification, dimensions_of

Files = dict[str, bytes]
Inspect = Callable[[ArtifactKind, Mapping[str, bytes]], dict[str, Any]]

CONFIG: dict[str, Any] = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "vocab_size": 12,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 16,
    "type_vocab_size": 2,
    "id2label": {"0": "benign", "1": "injection"},
    "label2id": {"benign": 0, "injection": 1},
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 12,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}
ADAPTER_CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["query"]}
TOKENIZER = {"model": {"vocab": {f"w{i}": i for i in range(12)}}, "added_tokens": [{"id": 0, "content": "w0"}]}


def safetensors(tensors: Mapping[str, Any], *, dtype: str = "F32") -> bytes:
    """The bytes of a safetensors file, written by hand: what is read must not be written by the same library."""
    header, data = {}, b""
    for name, values in tensors.items():
        begin, data = len(data), data + np.ascontiguousarray(values).tobytes()
        header[name] = {"dtype": dtype, "shape": list(np.shape(values)), "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensors_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Seeded float32 weights in the shapes that a config asks for."""
    generator = np.random.default_rng(0)
    shapes = bert_for_sequence_classification(dimensions_of(config), len(config["id2label"]))
    return {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def llama_tensors(*, layers: int = 2, vocabulary: int = 12) -> dict[str, Any]:
    """Seeded float32 weights of a Llama of width 8 with one key-value head of two."""
    shapes = {"model.embed_tokens.weight": (vocabulary, 8), "model.norm.weight": (8,)}
    for layer in (f"model.layers.{i}" for i in range(layers)):
        shapes |= {f"{layer}.self_attn.q_proj.weight": (8, 8), f"{layer}.self_attn.k_proj.weight": (4, 8)}
        shapes |= {f"{layer}.mlp.down_proj.weight": (8, 16), f"{layer}.input_layernorm.weight": (8,)}
    shapes["lm_head.weight"] = (vocabulary, 8)
    generator = np.random.default_rng(1)
    return {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def lora_tensors(*weights: str, of: Mapping[str, Any], rank: int = 2) -> dict[str, Any]:
    """Pairs of ones for the named linear weights of a model."""
    tensors: dict[str, Any] = {}
    for weight in weights:
        module = "base_model.model." + weight.removesuffix(".weight")
        rows, columns = of[weight].shape
        tensors[f"{module}.lora_A.weight"] = np.ones((rank, columns), np.float32)
        tensors[f"{module}.lora_B.weight"] = np.ones((rows, rank), np.float32)
    return tensors


def encode(value: Any) -> bytes:
    return json.dumps(value).encode()


def jsonl(*rows: Any) -> bytes:
    return b"".join(encode(row) + b"\n" for row in rows)


def adapter_tensors() -> dict[str, Any]:
    """Rank-2 pairs for both layers' `query`, and a trained classifier."""
    tensors: dict[str, Any] = {}
    for i in range(2):
        module = f"base_model.model.bert.encoder.layer.{i}.attention.self.query"
        tensors[f"{module}.lora_A.weight"] = np.ones((2, 8), np.float32)
        tensors[f"{module}.lora_B.weight"] = np.ones((8, 2), np.float32)
    tensors["base_model.model.classifier.weight"] = np.ones((2, 8), np.float32)
    return tensors
