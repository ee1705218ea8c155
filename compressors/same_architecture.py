"""Whether checkpoints can be merged tensor by tensor: one architecture, the same tensors, every value usable.

Each fault names the tensor or field, both values and the model, by its name in the request.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from compressors.weight_files import StoredTensor, WeightFiles
from modelpress.errors import InvalidModel
from modelpress.stored_folders import Source

ARCHITECTURE = ("model_type", "architectures", "architecture")
SHAPES = re.compile(r"(n|d|num)_\w+|\w+_(size|sizes|dim|dims)|depths")
"""Names of the fields that decide shapes or what they mean, in a config of transformers or timm."""
PROVENANCE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "pretrained_cfg")
"""Fields that say nothing about what the model computes."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json")
HEADS = re.compile(r"(.*\.)?(lm_head|embed_out|predictions\.decoder|output_projection)\.weight")
"""Heads that many architectures tie to the embeddings, and then do not store."""
SHOWN_CHARACTERS = 60

Config = Mapping[str, Any]


def check_full_precision(config: Config) -> None:
    """InvalidModel for the config of a quantized model."""
    if config.get("quantization_config"):
        raise InvalidModel(
            "the model is quantized (quantization_config): merge the full-precision models and quantize the result",
            field="quantization_config",
        )


def compare_configs(base: Config, other: Config, *, name: str) -> tuple[str, ...]:
    """InvalidModel where the models are of two architectures or differ in what decides shapes.

    Returns a warning that names the other fields in which they differ.
    """
    left, right = dict(_fields(base)), dict(_fields(other))
    differing = [field for field in sorted({*left, *right}) if left.get(field) != right.get(field)]
    for field in sorted(differing, key=_importance):
        _check_field(field, left, right, name=name)
    rest = [f for f in differing if f.partition(".")[0] not in PROVENANCE and (left.get(f) or right.get(f))]
    if not rest:
        return ()
    shown = ", ".join(f"{field} ({_shown(right, field)} there, {_shown(left, field)} here)" for field in rest[:5])
    more = f" and {len(rest) - 5} more" if len(rest) > 5 else ""
    return (f"model {name!r} has other config values than the base, whose are kept: {shown}{more}",)


def _check_field(field: str, left: Config, right: Config, *, name: str) -> None:
    values = f"{field} {_shown(right, field)} where the base has {_shown(left, field)}"
    if field not in left or field not in right:
        return
    if field in ARCHITECTURE:
        raise InvalidModel(f"model {name!r} has {values}: merge checkpoints of one architecture", field=field)
    leaf = field.rpartition(".")[2]
    if SHAPES.fullmatch(leaf):
        raise InvalidModel(f"model {name!r} has {values}: merge checkpoints of one size", field=field)
    if leaf == "tie_word_embeddings":
        raise InvalidModel(f"model {name!r} has {values}: save both tied, or both untied", field=field)
    if field.startswith("id2label."):
        raise InvalidModel(
            f"model {name!r} has {values}: merge classifiers whose labels have the same order", field=field
        )


def _importance(field: str) -> tuple[int, str]:
    """What says most about why two models do not fit comes first."""
    return (ARCHITECTURE.index(field) if field in ARCHITECTURE else len(ARCHITECTURE), field)


def _fields(config: Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every field that is no object, by its dotted path. Default label names say nothing and are left out."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _fields(value, f"{prefix}{key}.")
        elif not (prefix == "id2label." and value == f"LABEL_{key}"):
            yield f"{prefix}{key}", value


def _shown(fields: Config, field: str) -> str:
    return repr(fields[field])[:SHOWN_CHARACTERS] if field in fields else "not given"


def compare_tensors(base: WeightFiles, other: WeightFiles, *, name: str) -> None:
    """InvalidModel unless both store tensors of the same names and shapes, each floating in both or equal in both."""
    _check_none_alone(base, other, f"model {name!r} lacks tensor", "which the base has")
    _check_none_alone(other, base, f"model {name!r} has tensor", "which the base lacks")
    for left in base.tensors.values():
        right = other.tensors[left.name]
        if left.shape != right.shape:
            raise InvalidModel(
                f"tensor {left.name!r} has shape {list(right.shape)} in model {name!r} and {list(left.shape)} in the "
                "base: merge checkpoints of one size, with embeddings resized to one vocabulary",
                field=left.name,
            )
        if left.dtype.is_floating_point and right.dtype.is_floating_point:
            check_mergeable(left, of="the base")
            check_mergeable(right, of=f"model {name!r}")
        elif left.dtype != right.dtype or not torch.equal(base.load(left.name), other.load(left.name)):
            raise InvalidModel(
                f"tensor {left.name!r} of dtype {_dtype(left)} is another one in model {name!r}, of dtype "
                f"{_dtype(right)}: only floating-point tensors are merged, others must be equal",
                field=left.name,
            )


def check_mergeable(tensor: StoredTensor, *, of: str) -> None:
    """InvalidModel for a floating dtype that needs scales."""
    if tensor.dtype.itemsize == 1:
        raise InvalidModel(
            f"tensor {tensor.name!r} of {of} has the quantized dtype {_dtype(tensor)}: merge the full-precision models "
            "and quantize the result",
            field=tensor.name,
        )


def _check_none_alone(has: WeightFiles, lacks: WeightFiles, before: str, after: str) -> None:
    tensor = next((tensor for name, tensor in has.tensors.items() if name not in lacks.tensors), None)
    if tensor is None:
        return
    cure = "merge checkpoints of one architecture"
    if HEADS.fullmatch(tensor.name):
        cure = "one model's head is tied to its embeddings: save that model with tie_word_embeddings false first"
    raise InvalidModel(f"{before} {tensor.name!r} of shape {list(tensor.shape)}, {after}: {cure}", field=tensor.name)


def _dtype(tensor: StoredTensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def compare_tokenizers(base: Source, other: Source, *, name: str) -> tuple[str, ...]:
    """A warning for every tokenizer file that both have and that differs."""
    return tuple(
        f"model {name!r} has another {path} than the base, whose is kept: its token ids may stand for other tokens"
        for path in TOKENIZERS
        if path in base.files and path in other.files and base.files[path].digest != other.files[path].digest
    )
