"""The tensors of a LoRA adapter by what they are on: pairs of factors, and tensors that were trained and saved whole.

    found = sort_tensors({"base_model.model.h.0.attn.c_attn.lora_A.weight": [4, 768], ...}, config)
    found.modules["h.0.attn.c_attn"].shape("A.weight")      # [4, 768]

Pure and torch-free. Factors are PEFT's: A [r, in] and B [out, r] of a linear layer; of a convolution A [r, in, *kernel]
and B [out, r / groups, 1, ...]; of an embedding A [r, tokens] and B [width, r]; of the fused experts that
`target_parameters` names A [r * experts, in] and B [out, r * experts].
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Shape = list[int]
Shapes = Mapping[str, Shape]

PREFIX = "base_model.model."
_WRAPPED = re.compile(r"((module|_orig_mod)\.)+(?=base_model\.)")
"""What DistributedDataParallel and torch.compile put before every name, in either order."""
_PART = re.compile(r"(?P<module>.+)\.lora_(?P<part>[AB]\.weight|B\.bias|embedding_[AB]|magnitude_vector)")
_WHOLE = re.compile(r"\.(base_layer|modules_to_save(\.default)?)(?=\.)")
"""What PEFT puts into the name of a tensor that it saved whole."""
_NESTED = re.compile(r"(\.base_layer)+$")
"""What PEFT puts behind a module's name where several of its parameters have factors."""
_UNUSED_COPY = re.compile(r".+\.original_module\.(.+\.)?bias")
"""With bias 'all' PEFT also writes the untrained biases of modules_to_save, which it never reads."""
PAIRS = (("A.weight", "B.weight"), ("embedding_A", "embedding_B"))


@dataclass(frozen=True)
class LoraModule:
    """Tensors on one module: part (`A.weight`, `embedding_B`, `magnitude_vector`, ...) -> name, and their shapes."""

    parts: Mapping[str, str]
    shapes: Shapes

    def shape(self, part: str) -> Shape:
        return list(self.shapes[self.parts[part]])


@dataclass
class LoraTensors:
    """`modules` by name; `whole`: the base's tensor -> the shape of what replaces it; `unknown`: no part of a LoRA."""

    modules: dict[str, LoraModule] = field(default_factory=dict)
    whole: dict[str, Shape] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)


def unwrapped(name: str) -> str:
    """The name without what training wrappers put before PEFT's own prefix."""
    return _WRAPPED.sub("", name, count=1) if _WRAPPED.match(name) else name


def sort_tensors(tensors: Shapes, config: Mapping[str, Any]) -> LoraTensors:
    """Every tensor in its place, rows of embeddings (`trainable_token_indices`) left out. Names have PEFT's prefix."""
    found = LoraTensors()
    parts: dict[str, dict[str, str]] = {}
    for name, shape in tensors.items():
        bare = unwrapped(name).removeprefix(PREFIX)
        match = _PART.fullmatch(bare)
        if match:
            parts.setdefault(match["module"], {})[match["part"]] = name
        elif ".lora_" in bare:
            found.unknown.append(name)
        elif ".trainable_tokens_" not in bare and not (config.get("bias") == "all" and _UNUSED_COPY.fullmatch(bare)):
            found.whole[_WHOLE.sub("", bare)] = list(shape)
    found.modules |= {module: LoraModule(names, tensors) for module, names in parts.items()}
    return found


def endings(module: str) -> Iterator[str]:
    """The names by which a list may mean the module, as PEFT's rule says: its own, and every one that it ends in."""
    parts = module.split(".")
    return (".".join(parts[index:]) for index in range(len(parts)))


def parameter_owners(config: Mapping[str, Any]) -> frozenset[str]:
    """Modules, by their names' ends, on whose parameters `target_parameters` puts factors: not on their weight."""
    return frozenset(str(name).rpartition(".")[0] for name in config.get("target_parameters") or ())


def is_on_parameter(module: str, owners: frozenset[str]) -> bool:
    return any(ending in owners for ending in endings(_NESTED.sub("", module)))
