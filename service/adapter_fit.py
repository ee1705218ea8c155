"""Do adapters fit the base? Judged from names and shapes alone, each misfit one sentence with tensor and shapes.

A partial fit is none: an adapter with one layer too many is refused whole. Judged here are LoRA's factors on linear
layers, embeddings and convolutions, and tensors that were saved whole. The merge itself judges the rest, which passes
here: PEFT's other kinds, fused experts, a tied head that the base does not store, weights that are packed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from modelpress.errors import InvalidModel
from modelpress.merge_recipes import MergeLora
from service.base_tensors import BaseTensors, is_of_head
from service.fit import Facts
from service.intake.lora_tensors import (
    LoraModule,
    LoraTensors,
    Shape,
    endings,
    is_on_parameter,
    parameter_owners,
    sort_tensors,
)

LORA = "LORA"


def check_adapters(adapters: Mapping[str, Facts], base: Facts, merge: MergeLora) -> None:
    """Raise InvalidModel for the first of the request's adapters that does not fit the base, or the others."""
    sorted_by_name = {
        name: sort_tensors(adapter["tensors"], adapter["config"])
        for name, adapter in adapters.items()
        if adapter["peft_type"] == LORA
    }
    tensors = BaseTensors(base)
    for index, (name, adapter) in enumerate(adapters.items()):
        if name in sorted_by_name:
            field = f"inputs.adapters[{index}]"
            _Fit(sorted_by_name[name], adapter["config"], tensors, field, bool(merge.labels)).check()
    _check_apart(sorted_by_name)
    if merge.combination_type == "linear":
        _check_equal_ranks(sorted_by_name)


@dataclass(frozen=True)
class _Fit:
    """One adapter beside the base. `brings_head`: the recipe names the classes of a head that the base lacks."""

    found: LoraTensors
    config: Facts
    base: BaseTensors
    field: str
    brings_head: bool

    def check(self) -> None:
        grown = self._grown()
        for name, shape in self.found.whole.items():
            if name not in grown:
                self._check_whole(name, shape)
        owners = parameter_owners(self.config)
        for name, module in self.found.modules.items():
            if not is_on_parameter(name, owners):
                self._check_module(f"{name}.weight", module, grown)
        self._check_targets()

    def _grown(self) -> dict[str, Shape]:
        """Tables of tokens that the adapter brings with more rows than the base has, all of them with equally many."""
        grown = {name: shape for name, shape in self.found.whole.items() if self.base.is_outgrown(name, shape)}
        if not grown:
            return grown
        name, shape = next(iter(grown.items()))
        brings = f"it brings {name!r} of shape {shape}, a larger vocabulary, and"
        for other, another in grown.items():
            if another[0] != shape[0]:
                self._fail(f"{brings} {other!r} of shape {another}", "save both with the same tokens")
        kept = next(iter(self.base.smaller_tables(grown).items()), None)
        if kept and self.base.is_untied:
            self._fail(f"{brings} the base's {kept[0]!r} keeps its shape {kept[1]}", "save both with the adapter")
        return grown

    def _check_whole(self, name: str, shape: Shape) -> None:
        if self.base.candidates(name):
            if not (self.brings_head and is_of_head(name)):
                self._check_shape(name, shape, found=self.base.shape(name))
        elif is_of_head(name) and not self.brings_head:
            self._fail(
                f"it brings the head {name!r} of shape {shape}, which the base does not have",
                "name its classes in recipe.stages[0].labels, or use a base with this head",
            )
        elif not (self.brings_head or self.base.may_be_tied(name)):
            self._fail(f"it replaces {name!r} of shape {shape}, which the base does not have")

    def _check_module(self, weight: str, module: LoraModule, grown: Mapping[str, Shape]) -> None:
        if not self.base.candidates(weight):
            if not self.base.may_be_tied(weight):
                self._fail(f"it changes {weight!r}, which the base does not have")
            return
        found = grown.get(weight, self.base.shape(weight))
        if "lora_embedding_A" in module.parts:
            wanted = [module.shape("lora_embedding_A")[1], module.shape("lora_embedding_B")[0]]
            self._check_shape(weight, wanted, found=found)
            return
        a, b = module.shape("lora_A.weight"), module.shape("lora_B.weight")
        if len(a) > 2:
            self._check_convolution(weight, a, b, found)
            return
        is_conv1d = self.base.is_conv1d(weight.removesuffix(".weight"))
        self._check_shape(weight, [a[1], b[0]] if is_conv1d else [b[0], a[1]], found=found)

    def _check_convolution(self, weight: str, a: Shape, b: Shape, found: Shape | None) -> None:
        """A grouped convolution's weight is [out, in / groups, *kernel]; lora_B's columns say the adapter's groups."""
        wanted = [b[0], a[1] * b[1] // a[0], *a[2:]]
        if found is not None and found != wanted and (found[:1], found[2:]) == (wanted[:1], wanted[2:]):
            self._fail(
                f"its change of {weight!r} has shape {wanted}, and the base's grouped convolution {found}",
                "no weight of that layer can hold it: train the adapter without the layer",
            )
        self._check_shape(weight, wanted, found=found)

    def _check_shape(self, name: str, wanted: Shape, *, found: Shape | None) -> None:
        if found is not None and found != wanted:
            self._fail(f"it needs {name!r} of shape {wanted}, the base's is {found}")

    def _check_targets(self) -> None:
        """Every layer that a plain list of target_modules stands for has its tensors."""
        changed = {f"{name}.weight" for name in self.found.modules} | self.found.whole.keys()
        covered = {candidate for name in changed for candidate in self.base.candidates(name)}
        targets = _plain_targets(self.config)
        for module in self.base.layers:
            target = next((ending for ending in endings(module) if ending in targets), None)
            if target is not None and f"{module}.weight" not in covered:
                self._fail(f"it has no tensors for {module!r}, which its target_modules {target!r} stands for")
        modules = (*self.base.modules, *self.found.modules)
        there = {ending for module in modules for ending in endings(module) if ending in targets}
        nowhere = next((target for target in targets if target not in there), None)
        if nowhere is not None:
            self._fail(f"its target_modules names {nowhere!r}, and the base has no such layer")

    def _fail(self, what: str, cure: str = "use the base that it was trained on") -> NoReturn:
        sentence = f"{self.field}: the adapter does not fit the base: {what}: {cure}"
        raise InvalidModel(sentence, reason="ADAPTER_MISFIT", field=self.field)


def _plain_targets(config: Facts) -> Mapping[str, None]:
    """`target_modules` where it is a list that stands for every layer of these names; empty where more decides."""
    narrowing = ("layers_to_transform", "layers_pattern", "exclude_modules", "target_parameters")
    targets = config.get("target_modules")
    if not isinstance(targets, list) or any(config.get(name) for name in narrowing):
        return {}
    return dict.fromkeys(target for target in targets if isinstance(target, str))


def _check_apart(adapters: Mapping[str, LoraTensors]) -> None:
    """No two adapters replace the same tensor: which one counts would be chance.

    What PEFT saves of an embedding or a head beside the factors on it is the base's own, and no replacement.
    """
    owners: dict[str, str] = {}
    for name, adapter in adapters.items():
        for tensor in adapter.whole:
            if tensor.rpartition(".")[0] in adapter.modules:
                continue
            if tensor in owners:
                _fail_together(f"{owners[tensor]!r} and {name!r} both replace {tensor!r}: merge one of them")
            owners[tensor] = name


def _check_equal_ranks(adapters: Mapping[str, LoraTensors]) -> None:
    """PEFT's `linear` adds up factors before it multiplies them."""
    first: dict[str, tuple[str, Shape]] = {}
    for name, adapter in adapters.items():
        for module, lora in adapter.modules.items():
            part = "lora_A.weight" if "lora_A.weight" in lora.parts else "lora_embedding_A"
            other, shape = first.setdefault(module, (name, lora.shape(part)))
            if shape[0] != lora.shape(part)[0]:
                _fail_together(
                    f"{other!r} and {name!r} have {part} {shape} and {lora.shape(part)} on {module!r}: "
                    "combination_type 'linear' needs equal ranks, 'cat' and 'svd' do not"
                )


def _fail_together(what: str) -> NoReturn:
    field = "inputs.adapters"
    raise InvalidModel(f"{field}: the adapters do not fit together: {what}", reason="ADAPTER_MISFIT", field=field)
