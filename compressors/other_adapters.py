"""Adapters of PEFT's other kinds: their own tensors go through PEFT, module by module; what was saved whole is ours."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from compressors.adapter_config import OtherSettings, plain_name
from compressors.adapter_names import PREFIX, STEM
from compressors.adapters import Adapter
from compressors.base_layout import BaseLayout
from compressors.changes import Change
from compressors.edits import Edit, Replacement, Rewriting, RowsOf
from compressors.peft_kinds import read_other_kind
from compressors.stages import NamedSource
from compressors.weight_files import WeightFiles
from modelpress.errors import InvalidModel


@dataclass(frozen=True)
class ByPeft(Rewriting):
    """A tensor that PEFT's own layer merges."""

    change: Change

    def rewritten(self, stored: Tensor) -> RowsOf:
        rows = self.change.begin(stored)
        return lambda start, stop, base: rows(start, stop)


def read_other_adapter(source: NamedSource, settings: OtherSettings, layout: BaseLayout) -> Adapter:
    """Read an adapter that is not LoRA; InvalidModel names the tensor that does not fit, and both shapes."""
    files = WeightFiles.read(source.source, STEM)
    for file in files.files:
        source.source.verify(file.path)
    conv1d = {name.removesuffix(".weight") for name in layout.tensors if layout.is_conv1d(name.removesuffix(".weight"))}
    other = read_other_kind(settings.config, files, base=layout.files, layouts=dict.fromkeys(conv1d, "Conv1D"))
    edits: dict[str, Edit] = {name: ByPeft(change) for name, change in other.changes.items()}
    shapes: dict[str, tuple[int, ...]] = {}
    for key in other.leftovers:
        target = plain_name(key.removeprefix(PREFIX), trained_biases=False)
        if target is None or not settings.saves(target) or target in edits:
            raise InvalidModel(
                f"adapter {source.name!r}: {key} is of no {settings.peft_type} layer and not in modules_to_save: save "
                "the adapter again with PEFT",
                field=key,
            )
        edits[target] = Replacement(partial(files.load, key))
        shapes[target] = files.tensors[key].shape
    return Adapter(settings, edits, shapes=shapes)
