"""PEFT's kinds of adapters other than LoRA: which of them a merge can take, and how those are stored."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from compressors.peft_layers import BaseLayer

SHARED_PREFIX = "base_model."
"""What PEFT puts before the name of a tensor that belongs to the whole adapter."""
Part = Literal["weight", "bias"]
T = TypeVar("T")


def _nowhere(layer: BaseLayer) -> bool:
    return False


def _wider_than_a_point(layer: BaseLayer) -> bool:
    return layer.layout == "Conv" and prod(layer.shape[2:]) > 1


def _linear_with_bias(layer: BaseLayer) -> bool:
    return layer.layout == "Linear" and layer.has_bias


@dataclass(frozen=True)
class Kind:
    """How an adapter of this kind is stored: `<module>.<prefix>...` are a module's tensors.

    `changes` are the module's parameters that it changes. `shared` tensors belong to the whole adapter; a module may
    hold a copy of them. `needs` is the setting without which the file is not all of the adapter. `sized_on` is the
    device on which PEFT can make such a layer to see its shapes. Where `unsound` says so, PEFT's merge gives another
    model than PEFT runs before it.
    """

    prefix: str
    changes: tuple[Part, ...] = ("weight",)
    shared: tuple[str, ...] = ()
    needs: str | None = None
    least_dims: int = 2
    sized_on: Literal["meta", "cpu"] = "meta"
    unsound: Callable[[BaseLayer], bool] = _nowhere

    def module_of(self, name: str) -> str | None:
        """The module that a tensor named as this kind names its own belongs to; None for other names."""
        match = re.fullmatch(rf"(.+)\.{self.prefix}\w*(\.\w+)*", name)
        return match[1] if match else None

    def own(self, tensors: Mapping[str, T]) -> dict[str, T]:
        """Those of the tensors that are neither shared nor copies of shared ones."""
        return {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] not in self.shared}

    def common(self, tensors: Mapping[str, T]) -> dict[str, T]:
        """Those of the tensors that belong to the whole adapter."""
        return {name: tensor for name, tensor in tensors.items() if name.removeprefix(SHARED_PREFIX) in self.shared}


@dataclass(frozen=True)
class Unmergeable:
    """Why such an adapter cannot be merged from its file, and what to do instead."""

    why: str


_VIRTUAL_TOKENS = Unmergeable("it adds virtual tokens, which no weight can hold; serve it with PEFT, or train a LoRA")
_BY_INPUT = Unmergeable("what it does depends on the input, so no weight can hold it; serve it with PEFT")
_COMPUTED_ANEW = Unmergeable(
    "PEFT computes parts of it anew from the base weights (singular vectors, clusters), which need not come out as "
    "they did in training; merge it with PEFT where it was trained, and submit the merged model"
)
_DEALT_OUT = Unmergeable(
    "its values are dealt out over the modules in the order of the whole model, which files do not have; merge it "
    "with PEFT's merge_and_unload, and submit the merged model"
)

KINDS: Mapping[str, Kind | Unmergeable] = {
    "ADALORA": Kind("lora_"),
    "BEFT": Kind("beft_", changes=("bias",)),
    "BOFT": Kind("boft_"),
    "C3A": Kind("c3a_"),
    "DEFT": Kind("deft_"),
    "DELORA": Kind("delora_"),
    "FOURIERFT": Kind("fourierft_"),
    "GLORA": Kind("glora_", changes=("weight", "bias")),
    "GRALORA": Kind("gralora_"),
    "HIRA": Kind("hira_"),
    "HRA": Kind("hra_"),
    "IA3": Kind("ia3_", changes=("weight", "bias")),
    "LN_TUNING": Kind("ln_tuning_", changes=("weight", "bias"), least_dims=1),
    "LOHA": Kind("hada_"),
    "LOKR": Kind("lokr_"),
    "MISS": Kind("miss_"),
    "OFT": Kind("oft_", unsound=_wider_than_a_point),
    "OSF": Kind("osf_"),
    "PEANUT": Kind("peanut_"),
    "PVERA": Kind("pvera_", shared=("pvera_A", "pvera_B"), needs="save_projection"),
    "RANDLORA": Kind("randlora_", shared=("randlora_A", "randlora_B"), needs="save_projection"),
    "ROAD": Kind("road_", changes=("weight", "bias")),
    "SHIRA": Kind("shira_", sized_on="cpu"),
    "SUPERTUNING": Kind("supertuning_", needs="save_precomputed_indices"),
    "TRAINABLE_TOKENS": Kind("trainable_tokens_", unsound=_linear_with_bias),
    "VBLORA": Kind("vblora_", shared=("vblora_vector_bank",)),
    "VERA": Kind("vera_", shared=("vera_A", "vera_B"), needs="save_projection"),
    "WAVEFT": Kind("waveft_"),
    "ADAMSS": _COMPUTED_ANEW,
    "FROD": _COMPUTED_ANEW,
    "PSOFT": _COMPUTED_ANEW,
    "TINYLORA": _DEALT_OUT,
    "UNILORA": _DEALT_OUT,
    "CARTRIDGE": _VIRTUAL_TOKENS,
    "CPT": _VIRTUAL_TOKENS,
    "MULTITASK_PROMPT_TUNING": _VIRTUAL_TOKENS,
    "PREFIX_TUNING": _VIRTUAL_TOKENS,
    "PROMPT_TUNING": _VIRTUAL_TOKENS,
    "P_TUNING": _VIRTUAL_TOKENS,
    "ADAPTION_PROMPT": _BY_INPUT,
    "LILY": _BY_INPUT,
    "POLY": _BY_INPUT,
    "SHADOW": _BY_INPUT,
    "XLORA": _BY_INPUT,
    "BONE": Unmergeable("PEFT has replaced it by MISS; convert it with PEFT's convert-bone-to-miss.py"),
}
