"""PEFT LoRA adapters, read into edits of the base model's tensors. What is not understood is refused.

Every tensor of the adapter ends in exactly one edit, and every module and pattern that the configuration names has
found what it is about.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from compressors.adapter_config import HEADS, LoraSettings
from compressors.adapter_fit import Fit, is_named
from compressors.adapter_names import AdapterTensors
from compressors.adapter_tensor_names import PART
from compressors.adapters import Adapter
from compressors.base_layout import BaseLayout, is_outside_layers
from compressors.edits import Additive, Chain, Edit, Replacement, TokenRows
from compressors.lora_experts import expert_edits, parameters_of
from compressors.lora_layers import Parts, layer_edits
from compressors.model_layouts import SINGLE_EXPERT, is_loaded, layer_count
from compressors.target_modules import matching_key
from compressors.weight_files import StoredTensor
from modelpress.errors import InvalidModel

TOKENS = "token_adapter.trainable_tokens_delta"


def read_lora(tensors: AdapterTensors, settings: LoraSettings, base: BaseLayout, *, name: str) -> Adapter:
    """Read one adapter for `base`; InvalidModel names the setting or tensor that does not fit, and both shapes."""
    fit = Fit(name, tensors, settings, base)
    found = _Found()
    modules: dict[str, dict[str, StoredTensor]] = {}
    for target, stored in tensors.plain.items():
        match = PART.fullmatch(target)
        if match is None:
            _read_whole(fit, target, stored, found)
        else:
            modules.setdefault(match["module"], {})[match["part"]] = stored
    for module, parts in modules.items():
        _read_module(fit, module, parts, found)
    _share_token_rows(fit, found)
    _check_complete(fit, found)
    _check_patterns(fit, found)
    return Adapter(settings, found.edits, found.bases, fit.shapes)


@dataclass
class _Found:
    """What has been read so far."""

    edits: dict[str, Edit] = field(default_factory=dict)
    bases: dict[str, Replacement] = field(default_factory=dict)
    targets: set[str] = field(default_factory=set)
    """Modules and parameters that have low-rank factors."""
    tables: set[str] = field(default_factory=set)
    """Embeddings that have trained rows."""

    def add(self, target: str, edit: Edit) -> None:
        """Several edits of one tensor apply in turn: what replaces it comes first."""
        before = self.edits.get(target)
        if before is None:
            self.edits[target] = edit
        elif isinstance(edit, Additive):
            self.edits[target] = Chain(before, edit)
        else:
            raise InvalidModel(f"the adapter changes {target!r} in two ways that exclude each other", field=target)


def _read_module(fit: Fit, module: str, parts: Parts, found: _Found) -> None:
    for part, stored in parts.items():
        if part.endswith("base_layer.bias"):
            _read_whole(fit, f"{module}.bias", stored, found)
        if part.endswith("base_layer.weight"):
            _read_base(fit, f"{module}.weight", stored, found)
    if TOKENS in parts:
        found.add(f"{module}.weight", _token_rows(fit, module, parts[TOKENS]))
        found.tables |= {module, fit.twin(f"{module}.weight").removesuffix(".weight")}
    factors = {part: stored for part, stored in parts.items() if "lora_" in part}
    parameters = parameters_of(fit, module)
    if parameters:
        for parameter, tensor, edit in expert_edits(fit, module, factors, parameters):
            found.targets.add(parameter)
            found.add(tensor, edit)
    elif factors:
        found.targets.add(module)
        for tensor, edit in layer_edits(fit, module, factors):
            found.add(tensor, edit)


def _read_whole(fit: Fit, target: str, stored: StoredTensor, found: _Found) -> None:
    """A tensor that stands for a base tensor as it is: of modules_to_save, a trained bias, or the base's own."""
    settings, base = fit.settings, fit.base.find(target)
    owner = target.rpartition(".")[0]
    trained_bias = target.endswith(".bias") and (
        settings.bias == "all" or (settings.bias == "lora_only" and settings.targeting.targets(owner))
    )
    if "lora_" in target or not (trained_bias or settings.saves(target) or settings.saves(fit.twin(target))):
        own_value = len(stored.shape) == 2 or stored.name.endswith(".base_layer.bias")
        if base is not None and own_value and is_outside_layers(target):
            _read_base(fit, target, stored, found)
            return
        unknown = "" if base else ", and the base has no such tensor: use the base that it was trained on"
        fit.fail(stored.name, f"is neither LoRA nor in modules_to_save nor a trained bias{unknown}")
    if base is not None and base.shape != stored.shape and not fit.is_resized(target, stored, base):
        fit.check_shape(stored, base.shape, f"the base's {target}")
    fit.shapes[target] = stored.shape
    found.add(target, Replacement(fit.load(stored)))


def _read_base(fit: Fit, target: str, stored: StoredTensor, found: _Found) -> None:
    """The base's own values, which PEFT saves of embeddings: they count where they are not the base's."""
    base = fit.base.find(target)
    if base is None:
        fit.fail(stored.name, f"stands for {target!r}, which the base does not have: use the base it was trained on")
    if base.shape == stored.shape:
        loaded = fit.tensors.load(stored.name)
        if torch.equal(fit.base.files.load(base.name).to(loaded.dtype), loaded):
            return
    elif not fit.is_resized(target, stored, base):
        fit.check_shape(stored, base.shape, f"the base's {target}")
    fit.shapes[target] = stored.shape
    found.bases[target] = Replacement(fit.load(stored))


def _token_rows(fit: Fit, module: str, stored: StoredTensor) -> TokenRows:
    indices, shape = fit.settings.tokens_of(module), fit.shape_of(f"{module}.weight", asked_by=stored)
    if indices is None:
        fit.fail(stored.name, "is there, and trainable_token_indices does not name its module")
    fit.check_shape(stored, (len(indices), *shape[1:]), f"{len(indices)} trained tokens of {list(shape)}")
    outside = next((index for index in indices if not 0 <= index < shape[0]), None)
    if outside is not None:
        fit.fail(stored.name, f"is for token {outside}, and the base has {shape[0]} tokens")
    if len(set(indices)) < len(indices):
        fit.fail(stored.name, f"has {len(indices)} rows for {len(set(indices))} tokens: which one counts is not told")
    return TokenRows(fit.load(stored), indices)


def _share_token_rows(fit: Fit, found: _Found) -> None:
    """Trained rows of an embedding are its tied head's too, as PEFT runs it: another edit of the head goes on top."""
    for table, rows in list(found.edits.items()):
        head = found.edits.get(twin := fit.twin(table))
        if not isinstance(rows, TokenRows) or head is None or isinstance(head, TokenRows):
            continue
        if not isinstance(head, Additive):
            fit.fail(
                f"{fit.tensors.key(twin)}", f"is changed by more than LoRA, and {table!r}, tied to it, has trained rows"
            )
        found.edits[twin] = Chain(rows, head)


def _check_complete(fit: Fit, found: _Found) -> None:
    """Every module that the configuration names is there: half an adapter never passes as a whole one.

    Experts that the files hold one by one are fused in the loaded model, and no targets, unless the adapter has them.
    """
    settings, known = fit.settings, found.targets | found.edits.keys()
    one_by_one = any(SINGLE_EXPERT.search(name) for name in found.targets)
    prefix = next(filter(None, map(fit.base.prefix_of, found.edits)), "")
    layers = layer_count(fit.base.config)
    loaded = [(f"{prefix}{name}", stored) for name, stored in fit.base.tensors.items() if is_loaded(name, layers)]
    for name, stored in sorted(loaded):
        module = name.removesuffix(".weight")
        is_layer = module != name and len(stored.shape) > 1 and (one_by_one or not SINGLE_EXPERT.search(name))
        if is_layer and settings.targeting.targets(module) and not {module, name} & known:
            fit.fail(
                f"{fit.tensors.key(module)}.lora_A.weight",
                "is missing, and target_modules names its module: the adapter is incomplete, or of another base",
            )
        trained_bias = settings.bias == "all" and name.endswith(".bias")
        if (settings.saves(name) or trained_bias) and name not in known:
            fit.fail(fit.tensors.key(name), "was trained along and is missing: save the adapter again with PEFT")


def _check_patterns(fit: Fit, found: _Found) -> None:
    """Every name and pattern of the configuration has found something to be about."""
    for setting, names in _unused(fit, found):
        for name in names:
            raise InvalidModel(
                f"adapter {fit.name!r}: {setting} names {name!r}, which matches nothing that the adapter has: correct "
                "the configuration, or use the base that the adapter was trained on",
                field=setting,
            )


def _unused(fit: Fit, found: _Found) -> Iterator[tuple[str, Iterable[str]]]:
    settings = fit.settings
    targets = {*found.targets, *(f"{name}.weight" for name in found.targets)}
    modules = settings.target_modules if isinstance(settings.target_modules, tuple) else ()
    for setting, names, known in (
        ("target_modules", modules, found.targets | _excluded(fit, found)),
        ("target_parameters", settings.target_parameters or (), targets),
    ):
        yield setting, (name for name in names if not any(is_named(target, (name,)) for target in known))
    for setting in ("rank_pattern", "alpha_pattern"):
        pattern = getattr(settings, setting)
        yield setting, pattern.keys() - {matching_key(pattern, target) for target in targets}
    yield "trainable_token_indices", _tables_without_rows(settings, found.tables)
    saved = [name for name in settings.modules_to_save or () if name not in HEADS[settings.task_type]]
    owners = {edit.rpartition(".")[0] for edit in found.edits}
    yield "modules_to_save", (name for name in saved if not any(name in owner for owner in owners))


def _excluded(fit: Fit, found: _Found) -> set[str]:
    """Modules that other settings keep the adapter off, e.g. modules_to_save or layers_to_transform: a name in
    target_modules may mean such a module alone.
    """
    modules = {name.rpartition(".")[0] for name in (*fit.base.tensors, *found.edits)}
    return {module for module in modules if not fit.settings.targeting.targets(module)}


def _tables_without_rows(settings: LoraSettings, tables: Iterable[str]) -> Iterator[str]:
    """Embeddings whose trained rows are not there; by their indices where the configuration names no module."""
    indices = settings.trainable_token_indices
    if isinstance(indices, dict):
        yield from (name for name in indices if not any(is_named(table, (name,)) for table in tables))
    elif indices and not tables:
        yield ", ".join(map(str, indices))[:80]
