"""Base models: a complete folder of a supported family, whose weights are what its config says, and finite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

from modelpress.errors import InvalidModel
from service.intake.configs import (
    labels_of,
    refuse_code_references,
    refuse_impossible_values,
    refuse_unsupported_settings,
)
from service.intake.families import Shapes, architecture_of, dimensions_of
from service.intake.folder import MAX_CONFIG_BYTES, Folder, refuse_other_weights, refuse_payloads
from service.intake.tokenizers import inspect_tokenizer
from service.intake.weights import Weight, read_weights, refuse_non_finite

FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
WRAPPERS: Mapping[str, str] = {
    "_orig_mod.": "torch.compile: save `model._orig_mod`",
    "_fsdp_wrapped_module.": "FSDP: save the gathered, full state_dict",
    "module.": "DistributedDataParallel: save `model.module`",
}
"""What a wrapper puts before tensors' names, and which model to save instead."""


RESERVED: Mapping[str, str] = {
    "adapter_config.json": "belongs to a LoRA adapter: upload that as an artifact of its own, of kind ADAPTER",
    "quantization.json": "is the name of a file that the stage `quantize` writes: rename it, or leave it out",
}
"""Files that would change how the model is loaded."""


def inspect_model(folder: Folder) -> dict[str, Any]:
    """Facts of a base model. Cheap checks come first: the weights' bytes are read last."""
    refuse_payloads(folder, InvalidModel)
    refuse_other_weights(folder, InvalidModel)
    refuse_reserved_names(folder)
    config = _read_config(folder)
    architecture, dimensions, labels = architecture_of(config), dimensions_of(config), labels_of(config)
    weights = read_weights(folder, "model")
    refuse_wrapper_names(weights)
    check_shapes(weights, architecture.shapes(dimensions, len(labels)), architecture.buffers)
    tokenizer = inspect_tokenizer(folder, vocabulary=dimensions.vocabulary)
    refuse_non_finite(folder, weights)
    return {
        "model_type": config["model_type"],
        "architecture": config["architectures"][0],
        "task": architecture.task,
        "labels": list(labels),
        "max_positions": dimensions.max_positions,
        "hidden": dimensions.hidden,
        "layers": dimensions.layers,
        "heads": dimensions.heads,
        "ffn": dimensions.ffn,
        "vocabulary": dimensions.vocabulary,
        "tokenizer": tokenizer,
        **weight_facts(weights),
        "warnings": [],
    }


def refuse_reserved_names(folder: Folder) -> None:
    for name, sentence in RESERVED.items():
        if folder.manifest.entry(name):
            raise InvalidModel(f"{name} {sentence}", reason="BAD_CONFIG", field=name)


def weight_facts(weights: Mapping[str, Weight]) -> dict[str, Any]:
    """Counts, bytes, dtypes and every tensor's shape."""
    tensors = [weight.tensor for weight in weights.values()]
    return {
        "parameters": sum(tensor.elements for tensor in tensors),
        "weight_bytes": sum(tensor.end - tensor.begin for tensor in tensors),
        "dtypes": dict(sorted(Counter(tensor.dtype for tensor in tensors).items())),
        "tensors": {tensor.name: list(tensor.shape) for tensor in tensors},
    }


def refuse_wrapper_names(weights: Mapping[str, Weight]) -> None:
    """Refuse tensors named by a training wrapper; `module.` counts at the start only, since models use it inside."""
    for name in weights:
        for wrapper, cure in WRAPPERS.items():
            if name.startswith(wrapper) or (wrapper.startswith("_") and f".{wrapper}" in name):
                raise InvalidModel(
                    f"{weights[name].file.path}: tensor {name!r} carries the {wrapper!r} of {cure} instead",
                    reason="WRAPPED_WEIGHTS",
                    field=name,
                )


def check_shapes(weights: Mapping[str, Weight], wanted: Shapes, buffers: frozenset[str]) -> None:
    """Every wanted tensor is there, floating, in its shape, and no other: no stage would know what it is for."""
    for name, shape in wanted.items():
        weight = weights.get(name)
        if weight is None:
            _fail(name, f"the weights have no tensor {name!r}, which config.json asks for: {_hint(weights, name)}")
        if weight.tensor.shape != shape:
            found = f"tensor {name!r} has shape {list(weight.tensor.shape)}, config.json makes it {list(shape)}"
            _fail(name, f"{found}: upload config and weights of one and the same model")
        if weight.tensor.dtype not in FLOAT_DTYPES:
            _fail(name, f"tensor {name!r} is {weight.tensor.dtype}: use one of {', '.join(sorted(FLOAT_DTYPES))}")
    surplus = min((name for name in weights if name not in wanted and name not in buffers), default=None)
    if surplus is not None:
        _fail(
            surplus,
            f"tensor {surplus!r} belongs to no part of the class under architectures: leave it out, or save "
            "the model again with `save_pretrained`",
        )


def _hint(weights: Mapping[str, Weight], name: str) -> str:
    """What helps where `name` is missing: most often a model was saved without its head, under bare names."""
    bare = name.partition(".")[2]
    if bare in weights:
        return f"there is {bare!r}, save the whole model, head included"
    return "save the whole model with `save_pretrained`"


def _read_config(folder: Folder) -> dict[str, Any]:
    file = folder.manifest.entry("config.json")
    if file is None:
        raise InvalidModel(
            "the model has no config.json: upload the whole folder that `save_pretrained` wrote",
            reason="NO_CONFIG",
            field="config.json",
        )
    config = folder.json_object(file, InvalidModel, limit=MAX_CONFIG_BYTES)
    refuse_code_references(config, file.path)
    refuse_unsupported_settings(config)
    refuse_impossible_values(config)
    return config


def _fail(name: str, what: str) -> NoReturn:
    raise InvalidModel(what, reason="BAD_TENSORS", field=name)
