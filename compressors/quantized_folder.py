"""A quantized model between `quantize` and `export`: a model folder, and beside it how to rebuild the INT8 graph.

    model.safetensors          FP32 weights, config.json and companions: loads as any model folder
    quantization.json          what is quantized, with compressed-tensors' QuantizationArgs fields, and on which codes
    quantization.safetensors   the fixed range of every quantized tensor

The three together give the very same graph again, bit for bit (`quantize.rebuild`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor

from compressors.embedding_tables import CODE_MAX as TABLE_CODE_MAX
from compressors.folders import companion_files, read_tensor_file
from compressors.int8_quantizer import ACTIVATION_CODE_MAX, WEIGHT_CODE_MAX
from modelpress.documents import Document
from modelpress.errors import InvalidModel

SETTINGS = "quantization.json"
RANGES = "quantization.safetensors"
FILES = (SETTINGS, RANGES)


class QuantizationArgs(Document):
    """How one kind of tensor is quantized: the fields of compressed-tensors, and the codes in use."""

    num_bits: int
    type: str
    symmetric: bool
    strategy: str
    """`tensor` or `channel` (one scale per output channel, or per row of a table)."""
    group_size: int | None = None
    dynamic: bool = False
    codes: tuple[int, int]
    """The smallest and the largest code."""


class QuantizationSettings(Document):
    linears: tuple[str, ...]
    """Module paths of the linear layers with INT8 weights and inputs."""
    embeddings: tuple[str, ...]
    """Module paths of the embedding tables with INT8 rows."""
    weights: QuantizationArgs
    inputs: QuantizationArgs
    tables: QuantizationArgs


def int8_settings(*, linears: tuple[str, ...], embeddings: tuple[str, ...]) -> QuantizationSettings:
    """The INT8 scheme of this service on these modules."""
    return QuantizationSettings(
        linears=linears,
        embeddings=embeddings,
        weights=_symmetric(WEIGHT_CODE_MAX),
        inputs=QuantizationArgs(
            num_bits=8, type="int", symmetric=False, strategy="tensor", codes=(0, ACTIVATION_CODE_MAX)
        ),
        tables=_symmetric(TABLE_CODE_MAX),
    )


def is_quantized(folder: Path) -> bool:
    return (folder / SETTINGS).is_file()


def write_quantization(folder: Path, settings: QuantizationSettings, ranges: Mapping[str, Tensor]) -> None:
    """Add the two files to a model folder."""
    (folder / SETTINGS).write_text(settings.model_dump_json(indent=2) + "\n", encoding="utf-8")
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in ranges.items()}, folder / RANGES)


def read_quantization(folder: Path) -> tuple[QuantizationSettings, dict[str, Tensor]]:
    """The settings and ranges; InvalidModel where they are not those of the INT8 scheme."""
    try:
        settings = QuantizationSettings.model_validate_json((folder / SETTINGS).read_bytes())
    except (OSError, ValidationError):
        raise InvalidModel(f"{SETTINGS} is missing or not valid: quantize the model again", field=SETTINGS) from None
    if settings != int8_settings(linears=settings.linears, embeddings=settings.embeddings):
        raise InvalidModel(f"{SETTINGS} names another scheme than INT8: quantize the model again", field=SETTINGS)
    return settings, read_tensor_file(folder / RANGES)


def shipped_companions(folder: Path) -> tuple[str, ...]:
    """Companion files without the two that only rebuild the graph."""
    return tuple(name for name in companion_files(folder) if name not in FILES)


def _symmetric(code_max: int) -> QuantizationArgs:
    return QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="channel", codes=(-code_max, code_max))
