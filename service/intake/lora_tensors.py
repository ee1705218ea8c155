"""The tensors of a LoRA adapter by what they are on: pairs of factors, and tensors that were trained and saved whole.

    found = sort_tensors({"base_model.model.h.0.attn.c_attn.lora_A.weight": [4, 768], ...}, config)
    found.modules["h.0.attn.c_attn"].shape("lora_A.weight")      # [4, 768]

Pure and torch-free. Factors are PEFT's: A [r, in] and B [out, r] of a linear layer; of a convolution A [r, in, *kernel]
and B [out, r / groups, 1, ...]; of an embedding A [r, tokens] and B [width, r]; of the fused experts that
`target_parameters` names A [r * experts, in] and B [out, r * experts].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from compressors.adapter_tensor_names import PART, model_name, plain_name

Shape = list[int]
Shapes = Mapping[str, Shape]

PAIRS = (("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B"))
MAGNITUDE = "lora_magnitude_vector"
"""DoRA's, one value per output."""
LEVEL = ".base_layer"
"""What PEFT puts behind a module's name where several of its parameters have factors."""


@dataclass(frozen=True)
class LoraModule:
    """Tensors on one module: part (`lora_A.weight`, `lora_embedding_B`, ...) -> name, and their shapes by name."""

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


def sort_tensors(tensors: Shapes, config: Mapping[str, Any]) -> LoraTensors:
    """Every tensor in its place, rows of embeddings (`trainable_token_indices`) left out. Names have PEFT's prefix."""
    found, trained_biases = LoraTensors(), config.get("bias") == "all"
    parts: dict[str, dict[str, str]] = {}
    for name, shape in tensors.items():
        plain = plain_name(model_name(name) or name, trained_biases=trained_biases)
        if plain is None:
            continue
        match = PART.fullmatch(plain)
        if match is None and "lora_" in plain:
            found.unknown.append(name)
        elif match is None:
            found.whole[plain] = list(shape)
        elif match["base"]:
            found.whole[f"{match['module']}.{match['base']}"] = list(shape)
        elif match["factor"]:
            module = f"{match['module']}.{match['level']}".removesuffix(".")
            parts.setdefault(module, {})[match["factor"]] = name
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
    while module.endswith(LEVEL):
        module = module.removesuffix(LEVEL)
    return any(ending in owners for ending in endings(module))
