"""Every layer that PEFT touches: its unmerged outputs against those of the merged weights as they are stored.

One layer at a time has memory, in FP32: its base weight, its adapters and its merged weight. Memory is set by the
largest layer, whatever the size of the model.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor

from evaluators.architectures import StoredParameters
from evaluators.layer_probes import Products, difference, probes, tensor_difference
from evaluators.layer_tensors import memory_name, put, refuse_empty, tensors_of, with_constants
from evaluators.peft_adapters import CANNOT, Adapter, Brought, EmptyReference, combine, labels_of, one_line
from evaluators.stored_weights import NotComparable, OverMemoryLimit
from modelpress.errors import InvalidModel
from modelpress.merge_recipes import MergeLora


@dataclass(frozen=True)
class CheckSetting:
    """`progress` is called with layers done and layers in all."""

    seed: int
    device: str
    memory_limit_bytes: int
    progress: Callable[[int, int], None]


@dataclass(frozen=True)
class LayerDifferences:
    """Relative differences by layer, and reasons by what could not be compared; how many of those for memory."""

    found: dict[str, float] = field(default_factory=dict)
    not_compared: dict[str, str] = field(default_factory=dict)
    over_memory_limit: int = 0


@dataclass(frozen=True)
class Check:
    """One comparison of the layer `name`; `keys` are PEFT's names of the tensors that it covers."""

    name: str
    keys: tuple[str, ...]
    run: Callable[[], float]


@dataclass(frozen=True)
class LayerComparison:
    """Base and merged model as stored, and PEFT's model between them, without memory."""

    base: StoredParameters
    merged: StoredParameters
    reference: EmptyReference
    adapters: Sequence[Adapter]
    arguments: MergeLora
    setting: CheckSetting

    def run(self) -> LayerDifferences:
        """Compare layer after layer; what is not comparable is named with its reason."""
        layers, checks, over_limit = LayerDifferences(), self._checks(), 0
        for done, check in enumerate(checks, 1):
            try:
                layers.found[check.name] = _finite(check.run(), check.name)
            except (NotComparable, *CANNOT) as reason:
                layers.not_compared[check.name] = one_line(reason)
                over_limit += isinstance(reason, OverMemoryLimit)
            self.setting.progress(done, len(checks))
        covered = {self._aliases.get(key, key) for check in checks for key in check.keys}
        for key in sorted(self.reference.tensors.keys() - covered):
            layers.not_compared[memory_name(key)] = "PEFT has no place for this tensor of the adapter"
        return replace(layers, over_memory_limit=over_limit)

    def _checks(self) -> list[Check]:
        """Layers and modules that PEFT wraps, then tensors that it replaces, then tensors tied to any of them."""
        wrapped = list(self._wrapped())
        left = sorted(self.reference.tensors.keys() - {key for check in wrapped for key in check.keys})
        by_name = {memory_name(key): key for key in left if memory_name(key) in self.base.shapes}
        replaced = [Check(name, (key,), partial(self._compare_tensor, name)) for name, key in by_name.items()]
        touched = {memory_name(key) for check in (*wrapped, *replaced) for key in check.keys}
        tied = sorted({partner for name in touched for partner in self.base.partners(name)} - touched)
        return [*wrapped, *replaced, *(Check(name, (), partial(self._compare_tensor, name)) for name in tied)]

    def _wrapped(self) -> Iterator[Check]:
        inside = None  # modules come before what they contain, and that comes before all others
        for path, module in self.reference.model.named_modules():
            if inside and path.startswith(inside):
                continue
            if isinstance(module, ModulesToSaveWrapper):
                yield self._saved_module(path, module)
            elif isinstance(module, ParamWrapper):
                yield self._parameter(path, module)
                continue  # another parameter of the same module may be wrapped inside
            elif isinstance(module, BaseTunerLayer):
                yield self._layer(memory_name(path), path, module)
            else:
                continue
            inside = f"{path}."

    def _layer(self, name: str, path: str, module: Any) -> Check:
        keys = tuple(f"{path}.{tensor}" for tensor, _ in tensors_of(module))
        return Check(name, keys, partial(self._compare_layer, name, path, module))

    def _parameter(self, path: str, module: Any) -> Check:
        alone = copy.copy(module)
        alone._modules = {**module._modules, "base_layer": Products(module.parameter_name, module.get_param())}
        return self._layer(f"{memory_name(path)}.{module.parameter_name}", path, alone)

    def _saved_module(self, path: str, module: Any) -> Check:
        saved = tuple(f"{path}.{key}" for key in module.state_dict() if key.startswith("modules_to_save."))
        beside = tuple(key for key in self.reference.tensors if key.startswith(f"{path}.") and key not in saved)
        return Check(memory_name(path), saved + beside, partial(self._compare_saved, saved))

    def _compare_layer(self, name: str, path: str, module: Any) -> float:
        reference, device = with_constants(copy.deepcopy(module)), self.setting.device
        merged = copy.deepcopy(reference.get_base_layer())
        self._check_memory(reference, merged)
        self._fill(reference, path, [key for key, _ in tensors_of(reference)])
        self._take_out_of_base(reference, path)
        refuse_empty(reference)
        combine(reference, self.adapters, tuner=self.reference.model.base_model, arguments=self.arguments)
        for key in (key for key, tensor in tensors_of(merged) if tensor.is_meta):
            put(merged, key, self.merged.load(f"{memory_name(path)}.{key}"), device=device)
        inputs = probes(merged, seed=self.setting.seed, name=name, device=device)
        return difference(reference, merged, inputs)

    def _check_memory(self, reference: Any, merged: Any) -> None:
        """Both layers in FP32, and beside them COPIES of a weight for reading and for what PEFT computes on the way."""
        reference_elements, merged_elements = (sum(t.numel() for _, t in tensors_of(m)) for m in (reference, merged))
        copies = COPIES_OF_VARIANTS if getattr(reference, "lora_variant", None) else COPIES
        needed = 4 * (reference_elements + (1 + copies) * merged_elements)
        if needed > self.setting.memory_limit_bytes:
            raise OverMemoryLimit(f"it takes {needed} bytes, the memory limit is {self.setting.memory_limit_bytes}")

    def _take_out_of_base(self, reference: Any, path: str) -> None:
        """Repeat what PiSSA and OLoRA do to the base when an adapter is loaded, then set the trained values again."""
        labels = labels_of(reference)
        for adapter in self.adapters:
            if adapter.initialisation and adapter.label in labels:
                INITIALISATIONS[adapter.initialisation](reference, adapter.label)
                self._fill(reference, path, [key for key, _ in tensors_of(reference) if f".{adapter.label}" in key])

    def _fill(self, layer: Any, path: str, keys: Sequence[str]) -> None:
        """Give `layer` the values that PEFT's model has under `path`; what is in no file stays as it is."""
        for key in keys:
            value = self._value(f"{path}.{key}")
            if value is not None:
                put(layer, key, value, device=self.setting.device)

    def _compare_saved(self, keys: Sequence[str]) -> float:
        """Tensors of `modules_to_save`, which one adapter brings, with weight 1."""
        brought = {key: self.reference.tensors.get(key, ()) for key in keys}
        missing = next((key for key, tensors in brought.items() if not tensors), None)
        if missing:
            raise NotComparable(f"{memory_name(missing)!r} is in no adapter's file")
        if len({memory_name(key) for key in keys}) < len(keys) or any(
            t[0].adapter.weight != 1 for t in brought.values()
        ):
            raise NotComparable(NO_WEIGHTED_SUM)
        return max(tensor_difference(t[0].tensor, self.merged.load(memory_name(key))) for key, t in brought.items())

    def _compare_tensor(self, name: str) -> float:
        return tensor_difference(self._unwrapped(name), self.merged.load(name))

    def _value(self, key: str) -> Tensor | None:
        """What PEFT's model has under `key`: from the base's files or an adapter's; None for what PEFT makes itself."""
        name, brought = memory_name(key), self.reference.tensors.get(self._aliases.get(key, key))
        if name in self.base.shapes:
            return self._unwrapped(name)
        return brought[0].tensor if brought else None

    def _unwrapped(self, name: str) -> Tensor:
        """The parameter below PEFT's layers: the base's, or another that one adapter brings with weight 1."""
        names = (name, *sorted(self.base.partners(name)))
        brought = next((self._replacements[held] for held in names if held in self._replacements), [])
        stored = self.base.load(name) if self.base.has(name) or not brought else None
        if all(stored is not None and torch.equal(each.tensor.float(), stored.float()) for each in brought):
            return self.base.load(name) if stored is None else stored
        if len(brought) > 1 or brought[0].adapter.weight != 1:
            raise NotComparable(NO_WEIGHTED_SUM)
        return brought[0].tensor

    @cached_property
    def _replacements(self) -> dict[str, list[Brought]]:
        """By parameter: what adapters bring in the place of the base's own tensor, for all that it is tied to."""
        found: dict[str, list[Brought]] = {}
        for key, brought in self.reference.tensors.items():
            if memory_name(key) in self.base.shapes and ".modules_to_save." not in key:
                found.setdefault(memory_name(key), []).extend(brought)
        return found

    @cached_property
    def _aliases(self) -> dict[str, str]:
        """Names of tensors that PEFT shares between layers -> the name under which an adapter's file has it."""
        tensors = dict(tensors_of(self.reference.model))
        names = {id(tensors[key]): key for key in self.reference.tensors if key in tensors}
        return {key: names[id(tensor)] for key, tensor in tensors.items() if id(tensor) in names}


COPIES = 2
COPIES_OF_VARIANTS = 5
"""DoRA computes its change as a whole matrix, and the norms of the sum."""
NO_WEIGHTED_SUM = "PEFT has no weighted sum of trained modules and biases"
INITIALISATIONS: Mapping[str, Callable[[Any, str], None]] = {
    "pissa": lambda layer, label: layer.pissa_init(label, "pissa"),
    "olora": lambda layer, label: layer.olora_init(label),
}


def _finite(difference: float, layer: str) -> float:
    if math.isnan(difference):
        raise InvalidModel(
            f"layer {layer!r} answers random inputs with NaN or infinity, merged or with its adapters beside it: go "
            "back to an earlier checkpoint of the adapter, or merge into a wider output_dtype",
            reason="NON_FINITE",
            field=layer,
        )
    return difference
