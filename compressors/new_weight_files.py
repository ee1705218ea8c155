"""What files of weights that are written anew have in common: the order of their tensors, and the shards' index.

Format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compressors.output_plan import OutputTensor


def byte_order(tensor: OutputTensor) -> tuple[int, str]:
    """Sorts a file's tensors: wide dtypes first, then by name, so that each begins at a multiple of its dtype's size,
    as loaders need it.
    """
    return -tensor.dtype.itemsize, tensor.name


def shard_index(paths: Mapping[str, str], *, total_bytes: int) -> dict[str, Any]:
    """The index of the shards that hold each tensor; `total_bytes` of all tensors together."""
    return {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(paths.items()))}
