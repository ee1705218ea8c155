"""Llama checkpoints of any size, and adapters for them, written to a content store without ever being in memory.

    base = write_base(LLAMA_7B.with_layers(2), store)
    adapter = write_adapter(LLAMA_7B.with_layers(2), store)
    link_folder(base, root, folder)                 # the same files as a folder, without a copy

The values are seeded noise that repeats, but not in step with the layers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch

from compressors.output_plan import OutputTensor, header_bytes
from modelpress.manifests import Manifest
from service.storage.store import ContentStore
from service.storage.stored_folders import StoreSink

SHARD_BYTES = 1_000_000_000
RANK = 16
ALPHA = 32
SCALING = ALPHA / RANK
SPREAD = 0.02
NOISE_VALUES = 16_000_001
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Llama:
    """A Llama in bfloat16. `key_values` is the width of a layer's keys, and of its values."""

    name: str
    hidden: int
    feed_forward: int
    layers: int
    heads: int
    key_values: int
    vocabulary: int = 32_000

    def with_layers(self, layers: int) -> Llama:
        return replace(self, layers=layers)

    @property
    def title(self) -> str:
        return f"{self.name}, {self.layers} layers"

    @property
    def linear_layers(self) -> Shapes:
        """Within a layer: module -> its weight's [outputs, inputs]. The adapter is on all of them."""
        wide, narrow = (self.feed_forward, self.hidden), (self.hidden, self.feed_forward)
        square, part = (self.hidden, self.hidden), (self.key_values, self.hidden)
        attention = {"q_proj": square, "k_proj": part, "v_proj": part, "o_proj": square}
        return {
            **{f"self_attn.{name}": shape for name, shape in attention.items()},
            **{f"mlp.{name}": shape for name, shape in (("gate_proj", wide), ("up_proj", wide), ("down_proj", narrow))},
        }

    @property
    def adapted(self) -> Shapes:
        """Module -> its weight's shape, of all linear layers of the model."""
        layers = (f"model.layers.{number}" for number in range(self.layers))
        return {f"{layer}.{name}": shape for layer in layers for name, shape in self.linear_layers.items()}

    @property
    def tensors(self) -> Shapes:
        """Every tensor of the checkpoint, in the order in which it is written."""
        table, vector = (self.vocabulary, self.hidden), (self.hidden,)
        norms = ("input_layernorm", "post_attention_layernorm")
        layers = range(self.layers)
        return {
            "model.embed_tokens.weight": table,
            **{f"{module}.weight": shape for module, shape in self.adapted.items()},
            **{f"model.layers.{number}.{norm}.weight": vector for number in layers for norm in norms},
            "model.norm.weight": vector,
            "lm_head.weight": table,
        }

    @property
    def size_bytes(self) -> int:
        return sum(map(prod, self.tensors.values())) * torch.bfloat16.itemsize

    @property
    def config(self) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.feed_forward,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads * self.key_values // self.hidden,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }


LLAMA_1B = Llama("1.1B", hidden=2048, feed_forward=5632, layers=22, heads=32, key_values=256)
"""The shapes of TinyLlama (Zhang et al. 2024)."""
LLAMA_7B = Llama("7B", hidden=4096, feed_forward=11_008, layers=32, heads=32, key_values=4096)
"""The shapes of Llama 7B (Touvron et al. 2023)."""


class Noise:
    """Bytes of seeded normal values of one dtype, without end."""

    def __init__(self, dtype: torch.dtype, *, seed: int) -> None:
        values = torch.randn(NOISE_VALUES, generator=torch.Generator().manual_seed(seed)).mul_(SPREAD)
        self._bytes = values.to(dtype).view(torch.uint8).numpy().data
        self._next = 0
        self.dtype = dtype

    def take(self, size: int) -> Iterator[memoryview]:
        while size:
            piece = self._bytes[self._next : self._next + size]
            yield piece
            size -= len(piece)
            self._next = (self._next + len(piece)) % len(self._bytes)


def write_base(llama: Llama, store: ContentStore) -> Manifest:
    """The model's folder: config, shards and their index."""
    sink, noise = StoreSink(store), Noise(torch.bfloat16, seed=0)
    shards = shards_of(llama.tensors, noise.dtype)
    weight_map: dict[str, str] = {}
    for number, shapes in enumerate(shards, 1):
        path = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_weights(sink, path, shapes, noise)
        weight_map |= dict.fromkeys(shapes, path)
    index = {"metadata": {"total_size": llama.size_bytes}, "weight_map": weight_map}
    _write_json(sink, "model.safetensors.index.json", index)
    _write_json(sink, "config.json", llama.config)
    return sink.finish()


def shards_of(tensors: Shapes, dtype: torch.dtype) -> list[dict[str, tuple[int, ...]]]:
    """The tensors in their order, in shards of at most SHARD_BYTES."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in tensors.items():
        tensor_bytes = prod(shape) * dtype.itemsize
        if size + tensor_bytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += tensor_bytes
    return shards


def write_adapter(llama: Llama, store: ContentStore) -> Manifest:
    """A LoRA of rank 16 in FP32 on all linear layers, as PEFT saves it."""
    sink = StoreSink(store)
    shapes: dict[str, tuple[int, ...]] = {}
    for module, (outputs, inputs) in llama.adapted.items():
        shapes |= {lora_name(module, "A"): (RANK, inputs), lora_name(module, "B"): (outputs, RANK)}
    _write_weights(sink, "adapter_model.safetensors", shapes, Noise(torch.float32, seed=1))
    targets = sorted({module.rpartition(".")[2] for module in llama.adapted})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": targets,
    }
    _write_json(sink, "adapter_config.json", settings | {"bias": "none", "inference_mode": True})
    return sink.finish()


def lora_name(module: str, factor: str) -> str:
    """The adapter's tensor of the factor `A` or `B`."""
    return f"base_model.model.{module}.lora_{factor}.weight"


def link_folder(manifest: Manifest, root: Path, folder: Path) -> Path:
    """The manifest's files as a folder of hard links to the blobs of the store at `root`: on disk and cached once."""
    folder.mkdir(parents=True)
    for entry in manifest.files:
        os.link(root / "blobs/sha256" / entry.digest.hex[:2] / entry.digest.hex, folder / entry.path)
    return folder


def _write_weights(sink: StoreSink, path: str, shapes: Shapes, noise: Noise) -> None:
    tensors = tuple(OutputTensor(name, noise.dtype, shape, None) for name, shape in shapes.items())
    with sink.write(path) as write:
        write(header_bytes(tensors))
        for tensor in tensors:
            for piece in noise.take(tensor.size_bytes):
                write(piece)


def _write_json(sink: StoreSink, path: str, value: Mapping[str, object]) -> None:
    with sink.write(path) as write:
        write(json.dumps(value, indent=2).encode())
