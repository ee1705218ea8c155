"""PEFT LoRA adapters, read into edits of the base model's tensors. What is not understood is refused.

Every tensor of the adapter ends in exactly one edit, and every module that the configuration names has its edit.
Shapes: O outputs, I inputs, R rank, E experts, V tokens, K a convolution's kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

import torch

from compressors.adapter_config import HEADS, LoraSettings
from compressors.adapter_names import AdapterTensors
from compressors.adapters import Adapter
from compressors.base_layout import SINGLE_EXPERT, BaseLayout, is_outside_layers
from compressors.edits import (
    Additive,
    Chain,
    Dora,
    Edit,
    Experts,
    Load,
    LowRank,
    OneExpert,
    Replacement,
    Shift,
    TokenRows,
    TransposedLowRank,
)
from compressors.target_modules import matching_key
from compressors.weight_files import StoredTensor
from modelpress.errors import InvalidModel

_PART = re.compile(
    r"(?P<module>.+?)\.(?P<part>(base_layer\.)*lora_[AB]\.(weight|bias)|lora_embedding_[AB]"
    r"|lora_magnitude_vector(\.weight)?|token_adapter\.trainable_tokens_delta|base_layer\.(weight|bias))"
)
_EXPERT_PART = re.compile(r"((base_layer\.)*)lora_[AB]\.weight")

Parts = Mapping[str, StoredTensor]
"""Tensors of one module by their part: `lora_A.weight`, `lora_embedding_B`, ..."""


def read_lora(tensors: AdapterTensors, settings: LoraSettings, base: BaseLayout, *, name: str) -> Adapter:
    """Read one adapter for `base`; InvalidModel names the setting or tensor that does not fit, and both shapes."""
    reading = _Reading(tensors, settings, base, name)
    reading.read()
    return Adapter(settings, reading.edits, reading.bases, reading.shapes)


@dataclass
class _Reading:
    tensors: AdapterTensors
    settings: LoraSettings
    base: BaseLayout
    name: str
    edits: dict[str, Edit] = field(default_factory=dict)
    bases: dict[str, Replacement] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    targets: set[str] = field(default_factory=set)
    """Modules and parameters that the adapter has low-rank factors for."""

    def read(self) -> None:
        modules: dict[str, dict[str, StoredTensor]] = {}
        for target, stored in self.tensors.plain.items():
            match = _PART.fullmatch(target)
            if match is None:
                self._replace(target, stored)
            else:
                modules.setdefault(match["module"], {})[match["part"]] = stored
        for module, parts in modules.items():
            self._read_module(module, parts)
        self._check_complete()
        self._check_patterns()

    def _read_module(self, module: str, parts: Parts) -> None:
        if "base_layer.bias" in parts:
            self._replace(f"{module}.bias", parts["base_layer.bias"])
        if "base_layer.weight" in parts:
            self._rebase(f"{module}.weight", parts["base_layer.weight"])
        if "token_adapter.trainable_tokens_delta" in parts:
            self._replace_rows(module, parts["token_adapter.trainable_tokens_delta"])
        factors = {part: stored for part, stored in parts.items() if "lora_" in part}
        parameters = self._parameters_of(module)
        if parameters:
            self._read_parameters(module, factors, parameters)
        elif factors:
            self._read_factors(module, factors)

    def _read_factors(self, module: str, parts: Parts) -> None:
        """Low-rank factors on the weight of a module, and on its bias."""
        stem, embedding = f"{self.tensors.key(module)}", any(part.startswith("lora_embedding") for part in parts)
        a_part, b_part = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A.weight", "lora_B.weight")
        for part in (a_part, b_part, *(["lora_B.bias"] if self.settings.lora_bias else [])):
            if part not in parts:
                self._fail(f"{stem}.{part}", "is missing: half of the adapter's pair is not there")
        if "lora_B.bias" in parts and not self.settings.lora_bias:
            self._fail(f"{stem}.lora_B.bias", "contradicts lora_bias false")
        if not self._is_targeted(module):
            self._fail(f"{stem}.{a_part}", "is on a module outside target_modules")
        shape = self._shape_of(f"{module}.weight", parts[a_part])
        low_rank = self._low_rank(module, parts[a_part], parts[b_part], shape)
        self.targets.add(module)
        self._add(f"{module}.weight", self._directed(module, parts, low_rank))
        if self.settings.lora_bias:
            self._shift(module, parts["lora_B.bias"], low_rank.scaling)

    def _is_targeted(self, module: str) -> bool:
        """By its name, by its weight's name, or by what it is tied to: PEFT can keep a tied pair alike."""
        weight = f"{module}.weight"
        twin = self._twin(weight).removesuffix(".weight")
        named = _is_named(weight, self.settings.target_parameters or ())
        return named or any(self.settings.targeting.targets(name) for name in (module, twin) if name)

    def _twin(self, parameter: str) -> str:
        """What the parameter is tied to in the base; empty where it is not."""
        if not is_outside_layers(parameter):
            return ""
        pairs = {**self.base.tied, **{source: target for target, source in self.base.tied.items()}}
        return pairs.get(parameter, "")

    def _low_rank(self, module: str, a: StoredTensor, b: StoredTensor, shape: tuple[int, ...]) -> LowRank:
        """The factors as the module's own kind has them: linear, Conv1D, embedding or convolution."""
        target = f"{module}.weight" if _is_named(f"{module}.weight", self.settings.target_parameters or ()) else module
        rank, transposed = self.settings.rank_of(target), "lora_embedding" in a.name or self.base.is_conv1d(module)
        if len(shape) < 2:
            self._fail(a.name, f"is on {module!r}, whose weight has shape {list(shape)}: it is no layer for LoRA")
        rows, columns = (shape[1], (shape[0],)) if transposed else (shape[0], shape[1:])
        if len(shape) > 2 and len(a.shape) == len(shape) and a.shape[1] != shape[1] and a.shape[2:] == shape[2:]:
            self._fail(
                a.name,
                f"{list(a.shape)} is on {module!r}, a convolution in groups with weight {list(shape)}: B @ A has "
                f"{a.shape[1]} input channels, which such a weight cannot hold; leave the module out of target_modules",
            )
        self._check_shape(a, (rank, *columns), f"rank {rank}, weight {list(shape)}")
        self._check_shape(b, (rows, rank, *[1] * (len(columns) - 1)), f"rank {rank}, weight {list(shape)}")
        kind = TransposedLowRank if transposed else LowRank
        return kind(self._load(a), self._load(b), self.settings.scaling_of(target), rank)

    def _directed(self, module: str, parts: Parts, low_rank: LowRank) -> Edit:
        """With DoRA's magnitude where the adapter is of that kind."""
        found = [stored for part, stored in parts.items() if part.startswith("lora_magnitude_vector")]
        if bool(found) != self.settings.use_dora:
            what = "is there without use_dora" if found else "is missing, which use_dora needs"
            self._fail(f"{self.tensors.key(module)}.lora_magnitude_vector", what)
        if not found:
            return low_rank
        shape = self._shape_of(f"{module}.weight", found[0])
        transposed = isinstance(low_rank, TransposedLowRank)
        outputs = shape[1] if transposed else shape[0]
        if found[0].elements != outputs:
            self._fail(found[0].name, f"has shape {list(found[0].shape)}, expected {outputs} values")
        return Dora(low_rank, self._load(found[0]), output_dim=int(transposed))

    def _parameters_of(self, module: str) -> list[str]:
        """Parameters of this module that target_parameters names, but for plain weights."""
        named = self.settings.target_parameters or ()
        ends = {name.rpartition(".")[2] for name in named if _is_named(f"{module}.{name.rpartition('.')[2]}", named)}
        return [f"{module}.{end}" for end in sorted(ends) if end != "weight"]

    def _read_parameters(self, module: str, parts: Parts, parameters: list[str]) -> None:
        """Each pair of factors belongs to the one parameter whose shape it fits: PEFT nests them without names."""
        for level in sorted({match[1] for match in map(_EXPERT_PART.fullmatch, parts) if match}):
            key = f"{self.tensors.key(module)}.{level}"
            pair = [parts.get(f"{level}lora_{half}.weight") for half in "AB"]
            if pair[0] is None or pair[1] is None:
                self._fail(f"{key}lora_{'A' if pair[0] is None else 'B'}.weight", "is missing")
            fitting = [name for name in parameters if self._fits(name, pair[0], pair[1])]
            if len(fitting) != 1:
                shapes = ", ".join(f"{name} {list(self._shape_of(name, pair[0]))}" for name in fitting or parameters)
                self._fail(key + "lora_A.weight", f"{list(pair[0].shape)} fits {len(fitting)} parameters: {shapes}")
            self._read_experts(fitting[0], pair[0], pair[1])

    def _read_experts(self, name: str, a: StoredTensor, b: StoredTensor) -> None:
        rank, (experts, *rest) = self.settings.rank_of(name), self._shape_of(name, a)
        transposed = (b.shape[0], a.shape[1]) != tuple(rest) or (
            rest[0] == rest[1] and self.base.has_transposed_experts
        )
        edit = Experts(self._load(a), self._load(b), self.settings.scaling_of(name), rank, transposed)
        self.targets.add(name)
        fused = None if self.base.find(name) else self.base.find_fused(name)
        if fused is None:
            self._add(name, edit)
            return
        for expert, stored in enumerate(fused.parts):
            first = 0
            for part in stored:
                self._add(part.name, OneExpert(edit, expert, first, first + part.shape[0]))
                first += part.shape[0]

    def _fits(self, name: str, a: StoredTensor, b: StoredTensor) -> bool:
        shape, rank = self._shape_of(name, a), self.settings.rank_of(name)
        if len(shape) != 3 or a.shape[0] != rank * shape[0] or b.shape[1] != rank * shape[0]:
            return False
        return (b.shape[0], a.shape[1]) in (shape[1:], shape[:0:-1])

    def _replace(self, target: str, stored: StoredTensor) -> None:
        """A tensor that stands for a base tensor as it is."""
        if "lora_" in target:
            self._fail(stored.name, "is no part of a LoRA adapter that is known: save it with PEFT")
        trained_bias = target.endswith(".bias") and (
            self.settings.bias == "all"
            or (self.settings.bias == "lora_only" and self.settings.targeting.targets(target.removesuffix(".bias")))
        )
        found = self.base.find(target)
        if not (trained_bias or self.settings.saves(target) or self.settings.saves(self._twin(target))):
            if found is not None and len(stored.shape) == 2 and is_outside_layers(target):
                self._rebase(target, stored)
                return
            unknown = "" if found else " and fits no tensor of the base: it was trained on another one"
            self._fail(stored.name, f"is neither LoRA nor in modules_to_save nor a trained bias{unknown}")
        if found is not None and found.shape != stored.shape and not self._is_resized(target, stored, found):
            self._fail(stored.name, f"has shape {list(stored.shape)}, the base's {target!r} {list(found.shape)}")
        self._add(target, Replacement(self._load(stored)))
        self.shapes[target] = stored.shape

    def _rebase(self, target: str, stored: StoredTensor) -> None:
        """The base's own values, as PEFT saves those of embeddings: they count where they are not the base's."""
        found = self.base.find(target)
        if found is None:
            self._fail(stored.name, f"stands for {target!r}, which the base does not have: it was trained on another")
        if found.shape == stored.shape:
            loaded = self.tensors.files.load(stored.name)
            if torch.equal(self.base.files.load(found.name).to(loaded.dtype), loaded):
                return
        elif not self._is_resized(target, stored, found):
            self._fail(stored.name, f"has shape {list(stored.shape)}, the base's {target!r} {list(found.shape)}")
        self.bases[target] = Replacement(self._load(stored))
        self.shapes[target] = stored.shape

    def _is_resized(self, target: str, stored: StoredTensor, found: StoredTensor) -> bool:
        """Whether it is the embedding or head of a vocabulary of another size."""
        return (
            is_outside_layers(target)
            and found.shape[0] >= (self.base.vocabulary or found.shape[0] + 1)
            and stored.shape[1:] == found.shape[1:]
        )

    def _replace_rows(self, module: str, stored: StoredTensor) -> None:
        indices, shape = self.settings.tokens_of(module), self._shape_of(f"{module}.weight", stored)
        if indices is None:
            self._fail(stored.name, "is there, and trainable_token_indices does not name its module")
        self._check_shape(stored, (len(indices), shape[1]), f"{len(indices)} trained tokens of {list(shape)}")
        if max(indices) >= shape[0]:
            self._fail(stored.name, f"is for token {max(indices)}, and the base has {shape[0]}")
        self._add(f"{module}.weight", TokenRows(self._load(stored), indices))

    def _shift(self, module: str, stored: StoredTensor, scaling: float) -> None:
        bias = self.base.find(f"{module}.bias")
        if bias is None:
            self._fail(stored.name, "needs a bias of the base layer to be added to, and it has none")
        self._check_shape(stored, bias.shape, "the base layer's bias")
        self._add(f"{module}.bias", Shift(self._load(stored), scaling))

    def _add(self, target: str, edit: Edit) -> None:
        before = self.edits.get(target)
        if before is None:
            self.edits[target] = edit
        elif isinstance(edit, Additive):
            self.edits[target] = Chain(before, edit)
        else:
            raise InvalidModel(f"adapter {self.name!r} changes {target!r} in two ways that exclude each other")

    def _shape_of(self, name: str, stored: StoredTensor) -> tuple[int, ...]:
        """Of the parameter that the adapter changes: what it is replaced by, else the base's."""
        if name in self.shapes:
            return self.shapes[name]
        found = self.base.find(name) or self.base.find_fused(name)
        if found is None:
            self._fail(stored.name, f"changes {name!r}, which the base does not have: it was trained on another base")
        return found.shape

    def _check_shape(self, stored: StoredTensor, expected: tuple[int, ...], why: str) -> None:
        if stored.shape != expected:
            self._fail(stored.name, f"has shape {list(stored.shape)}, expected {list(expected)} ({why})")

    def _check_complete(self) -> None:
        """Every module that the configuration names is there: half an adapter never passes as a whole one."""
        found = self.targets | self.edits.keys()
        expert_by_expert = any(SINGLE_EXPERT.search(name) for name in self.targets)
        for name, stored in sorted(self.base.tensors.items()):
            module = name.removesuffix(".weight")
            hidden = SINGLE_EXPERT.search(name) and not expert_by_expert
            if module != name and len(stored.shape) > 1 and not hidden and self.settings.targeting.targets(module):
                if not {module, name} & found:
                    self._fail(module, "is named by target_modules, and the adapter has no lora_A and lora_B for it")
            trained_bias = self.settings.bias == "all" and name.endswith(".bias")
            if (self.settings.saves(name) or trained_bias) and name not in found:
                self._fail(name, "was trained along, and the adapter does not hold it: save it again with PEFT")

    def _check_patterns(self) -> None:
        """Every name and pattern of the configuration has found something to be about."""
        for setting, names in self._named():
            for name, is_used in names:
                if not is_used:
                    raise InvalidModel(
                        f"adapter {self.name!r}: {setting} names {name!r}, which matches nothing that the adapter has: "
                        "correct the configuration, or use the base that the adapter was trained on",
                        field=setting,
                    )

    def _named(self) -> Iterator[tuple[str, Iterator[tuple[str, bool]]]]:
        settings = self.settings
        if isinstance(settings.target_modules, tuple):
            yield (
                "target_modules",
                ((n, any(_is_named(t, (n,)) for t in self.targets)) for n in settings.target_modules),
            )
        yield (
            "target_parameters",
            (
                (n, any(_is_named(t, (n,)) or _is_named(f"{t}.weight", (n,)) for t in self.targets))
                for n in settings.target_parameters or ()
            ),
        )
        for setting in ("rank_pattern", "alpha_pattern"):
            pattern = getattr(settings, setting)
            used = {matching_key(pattern, target) for target in self.targets}
            yield setting, ((name, name in used) for name in pattern)
        heads = HEADS[settings.task_type]
        saved = [name for name in settings.modules_to_save or () if name not in heads]
        yield "modules_to_save", ((n, any(_is_inside(target, n) for target in self.edits)) for n in saved)

    def _load(self, stored: StoredTensor) -> Load:
        return partial(self.tensors.load, stored.name)

    def _fail(self, tensor: str, what: str) -> NoReturn:
        raise InvalidModel(f"adapter {self.name!r}: {tensor} {what}", field=tensor)


def _is_named(target: str, names: tuple[str, ...]) -> bool:
    return any(target == name or target.endswith(f".{name}") for name in names)


def _is_inside(tensor: str, module: str) -> bool:
    return f".{module}." in f".{tensor}"
