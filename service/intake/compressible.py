"""What a model must be for stages other than a merge: of a known family and task, with weights as its config says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NoReturn

from modelpress.errors import InvalidModel
from service.intake.configs import labels_of, refuse_impossible_values, refuse_unsupported_settings
from service.intake.decoders import TASK, decoder_shapes, is_decoder, optional_tensors, read_decoder
from service.intake.families import Architecture, Dimensions, Shapes, architecture_of, dimensions_of
from service.intake.rotary import rope_type
from service.intake.weights import Weight

FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})


def compressible_facts(
    config: Mapping[str, Any], weights: Mapping[str, Weight], tokenizer: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The task, labels and sizes of a model that every stage for its task can take; else `obstacle`: why only a merge
    can.

    A classifier's config that passes promises tensors: InvalidModel where the weights do not keep that. A decoder whose
    weights do not can still be merged.
    """
    try:
        if is_decoder(config):
            return _decoder_facts(config, weights, tokenizer)
        architecture, dimensions, labels = _read_classifier(config, tokenizer)
    except InvalidModel as fault:
        obstacle = {"message": fault.message, "reason": fault.reason}
        return {"task": None, "labels": [], "obstacle": obstacle}
    check_shapes(weights, architecture.shapes(dimensions, len(labels)), architecture.buffers)
    return {
        "task": architecture.task,
        "labels": list(labels),
        "max_positions": dimensions.max_positions,
        "hidden": dimensions.hidden,
        "layers": dimensions.layers,
        "heads": dimensions.heads,
        "ffn": dimensions.ffn,
        "vocabulary": dimensions.vocabulary,
        "obstacle": None,
    }


def _read_classifier(
    config: Mapping[str, Any], tokenizer: Mapping[str, Any] | None
) -> tuple[Architecture, Dimensions, tuple[str, ...]]:
    architecture = architecture_of(config)
    refuse_unsupported_settings(config)
    refuse_impossible_values(config)
    dimensions, labels = dimensions_of(config), labels_of(config)
    _need_tokenizer(tokenizer)
    return architecture, dimensions, labels


def _decoder_facts(
    config: Mapping[str, Any], weights: Mapping[str, Weight], tokenizer: Mapping[str, Any] | None
) -> dict[str, Any]:
    sizes = read_decoder(config)
    _need_tokenizer(tokenizer)
    check_shapes(weights, decoder_shapes(config, sizes), optional_tensors(config, sizes))
    return {"task": TASK, "labels": [], **asdict(sizes), "rope_type": rope_type(config), "obstacle": None}


def _need_tokenizer(tokenizer: Mapping[str, Any] | None) -> None:
    if tokenizer is None:
        raise InvalidModel(
            "the model has no tokenizer: put tokenizer.json or vocab.txt beside the weights "
            "(`tokenizer.save_pretrained(folder)`)",
            reason="NO_TOKENIZER",
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


def _fail(name: str, what: str) -> NoReturn:
    raise InvalidModel(what, reason="BAD_TENSORS", field=name)
