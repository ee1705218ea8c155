"""Adapters of PEFT's other kinds: their own tensors go through PEFT, module by module; what was saved whole is ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial

from torch import Tensor

from compressors.adapter_config import OtherSettings
from compressors.adapter_names import STEM
from compressors.adapter_tensor_names import PREFIX, plain_name
from compressors.adapters import Adapter
from compressors.base_layout import BaseLayout
from compressors.changes import Change
from compressors.edits import Edit, Replacement, Rewriting, RowsOf
from compressors.model_layouts import is_loaded, layer_count
from compressors.peft_kinds import read_other_kind
from compressors.stages import NamedSource
from compressors.weight_files import StoredTensor, WeightFiles
from modelpress.errors import InvalidModel


@dataclass(frozen=True)
class ByPeft(Rewriting):
    """A tensor that PEFT's own layer merges."""

    change: Change

    def rewritten(self, stored: Tensor) -> RowsOf:
        rows = self.change.begin(stored)
        return lambda start, stop, base: rows(start, stop)


@dataclass(frozen=True)
class _Loaded:
    """The base without tensors of layers that the loaded model does not have, and no adapter has tensors for."""

    layout: BaseLayout

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        layers = layer_count(self.layout.config)
        return {name: stored for name, stored in self.layout.tensors.items() if is_loaded(name, layers)}

    def load(self, name: str) -> Tensor:
        return self.layout.files.load(name)


def read_other_adapter(source: NamedSource, settings: OtherSettings, layout: BaseLayout) -> Adapter:
    """Read an adapter that is not LoRA; InvalidModel names the tensor that does not fit, and both shapes.

    PEFT's layers read biases and other tensors beside the one that changes: whoever merges has verified the base.
    """
    files = WeightFiles.read(source.source, STEM)
    files.verify()
    conv1d = {name.removesuffix(".weight") for name in layout.tensors if layout.is_conv1d(name.removesuffix(".weight"))}
    other = read_other_kind(settings.config, files, base=_Loaded(layout), layouts=dict.fromkeys(conv1d, "Conv1D"))
    edits: dict[str, Edit] = {name: ByPeft(change) for name, change in other.changes.items()}
    saved = {_target(key): files.tensors[key] for key in other.leftovers}
    for target, stored in saved.items():
        _check_saved(target, stored, settings, layout, adapter=source.name)
        edits[target] = Replacement(partial(files.load, stored.name))
    for name in sorted(layout.tensors):
        if settings.saves(name) and name not in edits:
            raise InvalidModel(
                f"adapter {source.name!r}: {PREFIX}{name} was trained along and is missing: save the adapter again "
                "with PEFT",
                field=name,
            )
    return Adapter(settings, edits, shapes={target: stored.shape for target, stored in saved.items()})


def _target(key: str) -> str:
    return plain_name(key.removeprefix(PREFIX), trained_biases=False) or key


def _check_saved(
    target: str, stored: StoredTensor, settings: OtherSettings, layout: BaseLayout, *, adapter: str
) -> None:
    """A tensor that was saved whole belongs to modules_to_save and has the base's shape, where the base has it."""
    if not settings.saves(target):
        raise InvalidModel(
            f"adapter {adapter!r}: {stored.name} is of no {settings.peft_type} layer and not in modules_to_save: save "
            "the adapter again with PEFT",
            field=stored.name,
        )
    found = layout.find(target)
    if found is not None and found.shape != stored.shape:
        raise InvalidModel(
            f"adapter {adapter!r}: {stored.name} has shape {list(stored.shape)}, the base's {target!r} has "
            f"{list(found.shape)}: use the base that the adapter was trained on",
            field=stored.name,
        )
