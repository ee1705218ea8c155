"""4-bit weights of bitsandbytes that have lost what their codes stand for, told by the headers alone; free of torch.

Without quant_state and absmax a loader that is not strict takes the codes for weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from modelpress.errors import InvalidModel

STATES = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")
PLAIN = ("absmax", "quant_map")


class Entry(Protocol):
    """A tensor in a safetensors header."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def refuse_stripped(tensors: Mapping[str, Entry]) -> None:
    """InvalidModel where a weight of 4-bit codes, uint8 of shape [n, 1], lacks its quant_state, absmax or quant_map."""
    for name, entry in tensors.items():
        if not f".{name}".endswith(".weight") or entry.dtype != "U8" or entry.shape[1:] != (1,):
            continue
        missing = [part for part in PLAIN if f"{name}.{part}" not in tensors]
        if not any(f"{name}.{state}" in tensors for state in STATES):
            missing.insert(0, "quant_state.bitsandbytes__nf4 (or __fp4)")
        if missing:
            raise InvalidModel(
                f"tensor {name!r} holds 4-bit codes of bitsandbytes and lacks {', '.join(missing)} beside it: save the "
                "model again with save_pretrained, or name the full-precision model",
                reason="STRIPPED_WEIGHTS",
                field=name,
            )
