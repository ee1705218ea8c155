"""Proof of a merge: the merged folder as it is stored, against base plus adapters run by PEFT, unmerged.

    check_merge(models, adapters, arguments=stage, setting=setting)["layer_difference"]

PEFT and transformers decide which module is what; nothing is shared with what made the merge. Layer by layer for a
model of any size, and the whole model's logits where the memory limit allows. That no other tensor moved is not looked
at here: the merge compares digests while it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import peft

from evaluators.adapter_files import CheckedAdapter, as_peft_reads
from evaluators.architectures import StoredParameters, empty_model, match_vocabulary
from evaluators.bitsandbytes_weights import DequantizedWeights
from evaluators.layer_comparison import CheckSetting, LayerComparison, LayerDifferences
from evaluators.logit_comparison import check_memory, combine_all, compare_logits, load, token_rows
from evaluators.peft_adapters import CANNOT, Adapter, attach, attach_empty, one_line, read_adapters
from evaluators.stored_weights import NotComparable, StoredWeights
from modelpress.merge_recipes import LAYERS_ALONE, MergeLora
from modelpress.merge_reports import LogitComparison
from modelpress.stored_folders import Source

__all__ = ["VERSION", "CheckSetting", "CheckedAdapter", "MergedModels", "StoredModel", "check_merge"]

VERSION = 1
OF_THE_HEAD = ("architectures", "id2label", "label2id", "num_labels")
"""Fields of the merged config that hold also for the reference: an adapter may bring a head that the base lacks."""


@dataclass(frozen=True)
class StoredModel:
    """A model folder in the content store; `fetch` makes a verified local copy of it."""

    source: Source
    fetch: Callable[[], Path]


@dataclass(frozen=True)
class MergedModels:
    base: StoredModel
    merged: StoredModel


def check_merge(
    models: MergedModels, adapters: Sequence[CheckedAdapter], *, arguments: MergeLora, setting: CheckSetting
) -> dict[str, Any]:
    """MergeReport's fields from `reference` to `logits_missing`, as JSON; equal for equal inputs and seed.

    What cannot be compared is named with its reason. Raises InvalidModel for a merged model that cannot be of this
    base: a tensor of another shape, or outputs that are no numbers.
    """
    base, merged = StoredWeights.open(models.base.source), StoredWeights.open(models.merged.source)
    with as_peft_reads(adapters) as readable:
        layers, logits, missing = _compared(_Check(models, base, merged, readable, arguments, setting))
    worst = max(layers.found, key=layers.found.__getitem__, default="")
    return {
        "reference": f"peft {peft.__version__}",
        "layers": len(layers.found),
        "layer_difference": layers.found.get(worst),
        "layer": worst,
        "not_compared": layers.not_compared,
        "over_memory_limit": layers.over_memory_limit,
        "logits": logits and logits.model_dump(mode="json"),
        "logits_missing": missing,
    }


def _compared(check: _Check) -> tuple[LayerDifferences, LogitComparison | None, str]:
    """Layers and logits, and why there are no logits."""
    try:
        check.refuse_without_reference()
        layers = check.layers()
    except (NotComparable, *CANNOT) as reason:
        return LayerDifferences(not_compared={"*": one_line(reason)}), None, one_line(reason)
    try:
        return layers, check.logits(), ""
    except (NotComparable, *CANNOT) as reason:
        return layers, None, one_line(reason)


@dataclass(frozen=True)
class _Check:
    models: MergedModels
    base: StoredWeights
    merged: StoredWeights
    adapters: Sequence[CheckedAdapter]
    arguments: MergeLora
    setting: CheckSetting

    def refuse_without_reference(self) -> None:
        if self.arguments.without_reference:
            raise NotComparable(self.arguments.without_reference)

    def layers(self) -> LayerDifferences:
        model, target = empty_model(self._reference_config), empty_model(self.merged.config)
        match_vocabulary(model, target)
        weights = DequantizedWeights.of(self.base) if self._is_quantized else self.base
        base, merged = StoredParameters.of(weights, model), StoredParameters.of(self.merged, target)
        adapters = read_adapters(self.adapters)
        reference = attach_empty(model, adapters)
        return LayerComparison(base, merged, reference, adapters, self.arguments, self.setting).run()

    def logits(self) -> LogitComparison:
        if self._is_quantized:
            raise NotComparable(LAYERS_ALONE)
        for weights in (self.base, self.merged):
            check_memory(weights, limit_bytes=self.setting.memory_limit_bytes)
        rows = token_rows(empty_model(self.merged.config), seed=self.setting.seed)
        return compare_logits(
            partial(self._run_by_peft, read_adapters(self.adapters)),
            lambda: load(self.models.merged.fetch(), config=self.merged.config, device=self.setting.device),
            rows,
        )

    def _run_by_peft(self, adapters: Sequence[Adapter]) -> Any:
        model = load(self.models.base.fetch(), config=self._reference_config, device=self.setting.device)
        match_vocabulary(model, empty_model(self.merged.config))
        attached = attach(model, adapters)
        combine_all(attached, adapters, self.arguments)
        return attached

    @property
    def _is_quantized(self) -> bool:
        return bool(self.base.config.get("quantization_config"))

    @property
    def _reference_config(self) -> Mapping[str, Any]:
        head = {name: self.merged.config[name] for name in OF_THE_HEAD if name in self.merged.config}
        return {**self.base.config, **head}
