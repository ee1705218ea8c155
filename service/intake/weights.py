"""A model's weights as safetensors, single or sharded: every tensor located, none twice, none unnamed.

    weights = read_weights(folder, "model")        # headers only
    refuse_empty(weights)                          # shapes
    refuse_non_finite(folder, weights)             # every byte, streamed

IEEE 754 formats have an all-ones exponent exactly for infinities and NaN, so one mask per dtype finds both without
arithmetic. F8 formats: "FP8 Formats for Deep Learning" (Micikevicius et al. 2022).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from modelpress.errors import InvalidModel
from modelpress.manifests import FileEntry
from modelpress.safetensors_header import TensorEntry, read_header
from service.intake.folder import Folder

MAX_INDEX_BYTES = 16 << 20
MAX_TENSORS = 200_000
"""Of all shards together."""

FINITE_MASKS: Mapping[str, tuple[str, int]] = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "C64": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F8_E5M2": ("<u1", 0x7C),
    "F8_E4M3": ("<u1", 0x7F),
    "F8_E8M0": ("<u1", 0xFF),
}
"""dtype -> (its bits as an unsigned integer, the mask that is full exactly where a value is infinite or NaN)."""


@dataclass(frozen=True)
class Weight:
    """A tensor and where its bytes lie: from `offset` on in `file`."""

    tensor: TensorEntry
    file: FileEntry
    offset: int


def read_weights(folder: Folder, stem: str) -> Mapping[str, Weight]:
    """Tensors by name, from `<stem>.safetensors` or from the shards that `<stem>.safetensors.index.json` names.

    Raises InvalidModel where there is neither or both, a shard is missing, index and headers disagree, or a further
    .safetensors file belongs to nothing.
    """
    single, index = (
        folder.manifest.entry(f"{stem}.safetensors"),
        folder.manifest.entry(f"{stem}.safetensors.index.json"),
    )
    if single and index:
        _fail(index.path, f"stands beside {single.path}: keep one of the two")
    if not single and not index:
        _fail(f"{stem}.safetensors", "is missing: save the weights with `save_pretrained`", reason="NO_WEIGHTS")
    weights = _read_shards(folder, index) if index else _read_files(folder, [single] if single else [])
    used = {weight.file.path for weight in weights.values()}
    extra = next((entry.path for entry in folder.with_suffix(".safetensors") if entry.path not in used), None)
    if extra:
        _fail(extra, f"belongs to no part of the model ({', '.join(sorted(used)[:3])}): leave it out")
    return weights


def refuse_empty(weights: Mapping[str, Weight]) -> None:
    """DeepSpeed's ZeRO stage 3 (Rajbhandari et al. 2020) leaves tensors of no elements where nothing gathers them."""
    for name, weight in weights.items():
        if weight.tensor.dtype in FINITE_MASKS and not weight.tensor.elements:
            raise InvalidModel(
                f"{weight.file.path}: tensor {name!r} is empty, of shape {list(weight.tensor.shape)}, as ZeRO-3 leaves "
                "it: train with `stage3_gather_16bit_weights_on_model_save: true`, or gather the weights before saving",
                reason="EMPTY_TENSOR",
                field=name,
            )


def refuse_non_finite(folder: Folder, weights: Mapping[str, Weight]) -> None:
    """Read every floating tensor and raise InvalidModel for the first that holds NaN or infinity."""
    for name, weight in weights.items():
        if weight.tensor.dtype in FINITE_MASKS:
            count = sum(count_non_finite(chunk, weight.tensor.dtype) for chunk in _aligned(folder, weight))
            if count:
                raise InvalidModel(
                    f"{weight.file.path}: tensor {name!r} holds {count} values that are NaN or infinite, of "
                    f"{weight.tensor.elements}: repair the training run, or go back to an earlier checkpoint",
                    reason="NON_FINITE_WEIGHTS",
                    field=name,
                )


def count_non_finite(data: bytes, dtype: str) -> int:
    """Values in little-endian `data` that are NaN or infinite. `data` holds whole values of a dtype of FINITE_MASKS."""
    bits, mask = FINITE_MASKS[dtype]
    values = np.frombuffer(data, dtype=bits)
    full = values.dtype.type(mask)
    return int(np.count_nonzero((values & full) == full))


def _aligned(folder: Folder, weight: Weight) -> Iterator[bytes]:
    """A tensor's bytes in pieces of whole values."""
    width = np.dtype(FINITE_MASKS[weight.tensor.dtype][0]).itemsize
    rest = b""
    for chunk in folder.chunks(weight.file, weight.offset, weight.tensor.end - weight.tensor.begin):
        data = rest + chunk
        whole = len(data) - len(data) % width
        yield data[:whole]
        rest = data[whole:]


def _read_files(folder: Folder, files: list[FileEntry]) -> dict[str, Weight]:
    weights: dict[str, Weight] = {}
    for file in files:
        header = read_header(
            lambda offset, length, file=file: folder.read(file, offset, length),  # type: ignore[misc]
            size_bytes=file.size_bytes,
            name=file.path,
        )
        for tensor in header.tensors:
            if tensor.name in weights:
                _fail(file.path, f"holds tensor {tensor.name!r}, which {weights[tensor.name].file.path} holds too")
            weights[tensor.name] = Weight(tensor, file, header.data_start + tensor.begin)
        if len(weights) > MAX_TENSORS:
            _fail(file.path, f"is one shard too many: at most {MAX_TENSORS} tensors are read")
    return weights


def _read_shards(folder: Folder, index: FileEntry) -> dict[str, Weight]:
    weight_map = folder.json_object(index, InvalidModel, limit=MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
        _fail(index.path, "has no `weight_map` from tensor names to shards: write it again with `save_pretrained`")
    names = sorted(set(weight_map.values()))
    shards = [folder.manifest.entry(name) for name in names]
    missing = next((name for name, shard in zip(names, shards, strict=True) if shard is None), None)
    if missing is not None:
        _fail(
            index.path,
            f"names the shard {missing[:120]!r}, which is not there: upload every shard",
            reason="NO_WEIGHTS",
        )
    weights = _read_files(folder, [shard for shard in shards if shard])
    for name in sorted(weight_map.keys() | weights.keys()):
        listed, found = weight_map.get(name), weights[name].file.path if name in weights else None
        if listed != found:
            _fail(index.path, f"puts tensor {name[:120]!r} into {listed or 'no shard'}; it is in {found or 'none'}")
    return weights


def _fail(path: str, what: str, *, reason: str = "BAD_WEIGHT_FILES") -> NoReturn:
    raise InvalidModel(f"{path} {what}", reason=reason, field=path)
