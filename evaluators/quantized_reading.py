"""A model folder's tensors as those of the plain model: whatever layout quantized them, one reader gives the values."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from evaluators.bitsandbytes_weights import DequantizedWeights
from evaluators.compressed_weights import CompressedWeights
from evaluators.gptq_weights import GptqWeights
from evaluators.local_weights import LocalWeights
from evaluators.stored_weights import StoredTensor, Weights
from modelpress.errors import InvalidModel

PlainWeights = LocalWeights | CompressedWeights | GptqWeights | DequantizedWeights
"""Each has `tensors`, names and shapes of the plain model, and `load(name)`, their values."""

READERS: Mapping[str, Callable[[Weights], PlainWeights]] = {
    "compressed-tensors": CompressedWeights.of,
    "gptq": GptqWeights.of,
    "bitsandbytes": DequantizedWeights.of,
}
"""quant_method -> reader."""


def quantization_method(weights: Weights) -> str | None:
    """config.json's quant_method; None where nothing is quantized. InvalidModel for an unknown one."""
    settings = weights.config.get("quantization_config")
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if method not in READERS:
        raise InvalidModel(
            f"config.json: quant_method {str(method)[:40]!r} is unknown; known: {', '.join(READERS)}",
            field="quantization_config.quant_method",
        )
    return str(method)


def plain(stored: LocalWeights) -> PlainWeights:
    """The stored tensors as those of the model that was quantized."""
    method = quantization_method(stored)
    return stored if method is None else READERS[method](stored)


def count_parameters(tensors: Mapping[str, StoredTensor]) -> int:
    """Elements of the plain model's float tensors; a tied one is stored, and counted, once."""
    return sum(tensor.elements for tensor in tensors.values() if tensor.dtype.startswith(("F", "BF")))
