"""A decoder's folder as a torch model in FP32 whose quantized linear layers keep their codes.

Beside the codes no float copy of a quantized layer is made. The folder is a plain float one, or one that
`quantize_weights` wrote in compressed-tensors' layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from compressors import pack_quantized
from compressors.decoder_families import DECODERS, DecoderFamily
from compressors.folders import CONFIG, LOADING_ERRORS, check_finite, weight_files
from compressors.integer_grid import QuantizedWeight
from compressors.matmul_nbits import CodedLinear, MatMulNBits
from modelpress.errors import InvalidModel
from modelpress.strict_json import JsonError, read_object

QUANTIZATION = "quantization_config"


FREQUENCIES = "rotary_emb.inv_freq"
"""Ends the names of tensors that old checkpoints hold and that follow from the config."""


@dataclass(frozen=True)
class CodedDecoder:
    """`model` runs: a quantized layer is a `CodedLinear`, by its module's name in `quantized`."""

    model: Any
    family: DecoderFamily
    quantized: Mapping[str, QuantizedWeight]

    @property
    def float_linears(self) -> tuple[str, ...]:
        """Names of the linear layers that are not quantized, in the model's order."""
        return tuple(name for name, module in self.model.named_modules() if isinstance(module, nn.Linear))

    def with_onnx_products(self) -> Any:
        """The model with a `MatMulNBits` for each quantized layer, for the export alone: it no longer runs."""
        for name, weight in self.quantized.items():
            self.model.set_submodule(name, MatMulNBits(weight, self.model.get_submodule(name).bias))
        return self.model


def open_decoder(folder: Path) -> CodedDecoder:
    """InvalidModel for an unknown family, and for a missing, surplus, misshapen or not finite tensor."""
    config = read_decoder_config(folder)
    family = _family(config)
    model = _without_weights(config, family)
    stored = _StoredTensors.of(folder)
    quantized = _quantized(stored, config)
    tensors = {name: stored.load(name).float() for name in stored.files if not _is_coded(name, quantized)}
    check_finite(tensors, of="the model")
    for name, weight in quantized.items():
        model.set_submodule(name, CodedLinear(weight, _linear(model, name, like=weight).bias))
    _assign(model, _with_tied_head(tensors, model.config, family))
    return CodedDecoder(model.eval().requires_grad_(requires_grad=False), family, quantized)


def read_decoder_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json, of a float or a quantized model."""
    try:
        return read_object((folder / CONFIG).read_bytes())
    except (OSError, JsonError):
        raise InvalidModel(f"the model has no readable {CONFIG}: save it with save_pretrained", field=CONFIG) from None


def _family(config: Mapping[str, Any]) -> DecoderFamily:
    found = config.get("model_type")
    if not isinstance(found, str) or found not in DECODERS:
        raise InvalidModel(
            f"config.json: model_type {found!r} is no decoder that is exported; known: {', '.join(DECODERS)}",
            field="model_type",
        )
    return DECODERS[found]


def _without_weights(config: Mapping[str, Any], family: DecoderFamily) -> Any:
    """The model on torch's `meta` device, but for the rotary frequencies: no file holds those."""
    fields = {name: value for name, value in config.items() if name != QUANTIZATION}
    try:
        parsed = CONFIG_MAPPING[config["model_type"]].from_dict(fields)
        parsed._attn_implementation = "eager"
        with torch.device("meta"):
            model = getattr(transformers, family.architecture)(parsed)
        model.set_submodule(family.rotary, type(model.get_submodule(family.rotary))(config=parsed))
    except LOADING_ERRORS as error:
        raise InvalidModel(f"config.json makes no {family.architecture}: {_sentence(error)}", field=CONFIG) from None
    return model


def _quantized(stored: _StoredTensors, config: Mapping[str, Any]) -> dict[str, QuantizedWeight]:
    modules = [name.removesuffix(pack_quantized.SCALE) for name in stored.files if name.endswith(pack_quantized.SCALE)]
    if not modules:
        return {}
    quantization = config.get(QUANTIZATION)
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "compressed-tensors":
        raise InvalidModel(
            "the model has quantized weights, but its config.json no quantization_config of compressed-tensors",
            field=QUANTIZATION,
        )
    return {module: pack_quantized.read_weight(module, stored.load, quantization=quantization) for module in modules}


def _is_coded(name: str, quantized: Mapping[str, QuantizedWeight]) -> bool:
    """Whether the tensor is part of a quantized module, other than its bias."""
    module, _, last = name.rpartition(".")
    return module in quantized and last != "bias"


def _linear(model: Any, name: str, *, like: QuantizedWeight) -> nn.Linear:
    """The layer whose codes are stored; InvalidModel where the architecture has none of that shape."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        module = None
    if not isinstance(module, nn.Linear) or module.weight.shape != like.codes_OI.shape:
        raise InvalidModel(f"quantized weight {name!r} of shape {list(like.codes_OI.shape)} fits no layer", field=name)
    return module


def _with_tied_head(tensors: dict[str, Tensor], config: Any, family: DecoderFamily) -> dict[str, Tensor]:
    """One tensor for head and embeddings where the config ties them; as in transformers, two that differ stay two."""
    head, embeddings = f"{family.head}.weight", f"{family.embeddings}.weight"
    if not config.tie_word_embeddings:
        return tensors
    if head not in tensors or (embeddings in tensors and torch.equal(tensors[head], tensors[embeddings])):
        return {**tensors, head: tensors[embeddings]} if embeddings in tensors else tensors
    return {**tensors, embeddings: tensors.get(embeddings, tensors[head])}


def _assign(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Give the model these very tensors; the same tensor under two names becomes one parameter."""
    parameters = {id(tensor): nn.Parameter(tensor, requires_grad=False) for tensor in tensors.values()}
    wanted = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if missing := sorted(wanted - tensors.keys()):
        raise InvalidModel(f"{len(missing)} missing tensors, e.g. {missing[0]}: save the whole model", field=missing[0])
    if surplus := sorted(name for name in tensors.keys() - wanted if not name.endswith(FREQUENCIES)):
        raise InvalidModel(f"{len(surplus)} tensors too many, e.g. {surplus[0]}: no part of it", field=surplus[0])
    for name in wanted:
        module, _, attribute = name.rpartition(".")
        expected, found = model.get_parameter(name).shape, tensors[name].shape
        if found != expected:
            raise InvalidModel(f"tensor {name!r} is {list(found)} instead of {list(expected)}", field=name)
        setattr(model.get_submodule(module), attribute, parameters[id(tensors[name])])


@dataclass(frozen=True)
class _StoredTensors:
    """The file that holds each tensor, by the tensor's name."""

    files: Mapping[str, Path]

    @staticmethod
    def of(folder: Path) -> _StoredTensors:
        files: dict[str, Path] = {}
        for file in weight_files(folder):
            with _opened(file) as opened:
                files.update(dict.fromkeys(opened.keys(), file))
        return _StoredTensors(files)

    def load(self, name: str) -> Tensor:
        if name not in self.files:
            raise InvalidModel(f"tensor {name!r} is missing: quantize the model again", field=name)
        with _opened(self.files[name]) as opened:
            tensor: Tensor = opened.get_tensor(name)
            # A tensor that is kept would keep a map of its whole file, which counts against the worker's memory limit.
            return tensor.clone()


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise InvalidModel(f"{file.name} is not a valid safetensors file: {error}", field=file.name) from None


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
