"""Fold adapters into the base model: FP32 arithmetic on files, one rounding to the stored dtype (Hu et al. 2021).

    W' = round(W + sum over adapters of weight * scaling * B @ A)

Tensors that no adapter touches keep their bytes. No model is made: what an adapter names is found in the files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from compressors.adapter_changes import Named, merged_model
from compressors.adapter_config import FILE, LoraSettings, read_adapter_settings
from compressors.adapter_names import read_adapter_tensors, refuse_non_finite
from compressors.adapters import Adapter
from compressors.base_layout import BaseLayout
from compressors.dequantized_base import open_base
from compressors.edits import (
    Chain,
    Dora,
    Edit,
    Experts,
    LowRank,
    OneExpert,
    Replacement,
    Shift,
    TokenRows,
    TransposedLowRank,
    lora_factors,
)
from compressors.lora_adapters import read_lora
from compressors.merged_folder import write_beside
from compressors.merged_model import MergedModel
from compressors.merged_sources import chosen, named
from compressors.other_adapters import ByPeft, read_other_adapter
from compressors.stages import Monitor, NamedSource, StreamJob
from compressors.streaming import MergeOutcome, merge_files
from compressors.weight_files import WeightFiles, read_json
from modelpress.errors import InvalidModel
from modelpress.merge_recipes import MergeLora
from modelpress.reports import StageRecord

VERSION = 3
KINDS: Mapping[type[Edit], str] = {
    LowRank: "low_rank",
    TransposedLowRank: "low_rank_transposed",
    Dora: "dora",
    Experts: "fused_experts",
    OneExpert: "single_expert",
    Shift: "bias_shift",
    Replacement: "replaced",
    TokenRows: "token_rows",
    Chain: "several",
    ByPeft: "merged_by_peft",
}
"""How the record calls what an adapter does to a tensor."""


def run(arguments: MergeLora, job: StreamJob, monitor: Monitor) -> StageRecord:
    """Merge the adapters that `arguments` names, all of them where it names none.

    Raises InvalidRecipe for an unknown adapter, InvalidModel for one that does not fit or changes nothing.
    """
    sources = chosen(arguments.adapters, job.merged, kind="adapter")
    files, config = WeightFiles.read(job.base), read_json(job.base, "config.json")
    layout = BaseLayout(config, open_base(files, config, arguments))
    adapters = [(source, read_adapter(source, layout)) for source in sources]
    if layout.files is files and not all(isinstance(a.settings, LoraSettings) for _, a in adapters):
        files.verify()  # PEFT's layers read biases out of the files' order; a dequantized base is verified already
    model = merged_model(layout, adapters, arguments, seed=job.seed)
    plan = model.plan(arguments)
    outcome = merge_files(files, plan, job, monitor)
    check_changed(outcome, model)
    left_out = write_beside(files, plan, config=model.config, sink=job.sink)
    return record(arguments, model, outcome, adapters=adapters, warnings=left_out)


def read_adapter(source: NamedSource, layout: BaseLayout) -> Adapter:
    """One adapter of any kind, checked against the base and every value of it finite."""
    with named("adapter", source.name):
        settings = read_adapter_settings(read_json(source.source, FILE))
    if not isinstance(settings, LoraSettings):
        return read_other_adapter(source, settings, layout)
    trained_biases = settings.bias == "all"
    tensors = read_adapter_tensors(source.source, name=source.name, trained_biases=trained_biases)
    adapter = read_lora(tensors, settings, layout, name=source.name)
    refuse_non_finite(tensors, name=source.name)
    return adapter


def check_changed(outcome: MergeOutcome, model: MergedModel) -> None:
    if not model.added and not any(tensor.changed for tensor in outcome.tensors.values()):
        raise InvalidModel(
            "the adapters change no tensor: their lora_B are all zero, as before any training, or alpha is 0, weights "
            "cancel each other, or are so small that every change is rounded away"
        )


def record(
    arguments: MergeLora, model: MergedModel, outcome: MergeOutcome, *, adapters: Named, warnings: Sequence[str]
) -> StageRecord:
    changed = {name: tensor.relative for name, tensor in sorted(outcome.tensors.items()) if tensor.changed}
    unchanged = sorted(outcome.tensors.keys() - changed.keys() - model.added.keys())
    stored = model.layout.tensors
    return StageRecord(
        method="merge_lora",
        arguments=arguments.model_dump(mode="json"),
        version=VERSION,
        touched=tuple(changed),
        details={
            "adapters": [_facts(source, adapter) for source, adapter in adapters],
            "combination_type": arguments.combination_type,
            "relative_change": {name: relative for name, relative in changed.items() if relative is not None},
            "tensors_added": sorted(model.added),
            "tensors_dropped": list(model.dropped),
            "tensors_byte_identical": len(stored) - len(model.dropped) - len(changed.keys() & stored.keys()),
            "config_changes": _config_changes(model),
        },
        warnings=(*model.notes, *(f"{name} was trained, and kept its bytes" for name in unchanged), *warnings),
    )


def _facts(source: NamedSource, adapter: Adapter) -> dict[str, Any]:
    """An adapter's part of the record: which edits it has of which kind, its ranks and scalings."""
    factors = [factor for edit in adapter.edits.values() for factor in lora_factors(edit)]
    return {
        "name": source.name,
        "weight": source.weight,
        "peft_type": adapter.settings.peft_type,
        "edits": dict(sorted(Counter(KINDS[type(edit)] for edit in adapter.edits.values()).items())),
        "ranks": sorted({factor.rank for factor in factors}),
        "scalings": sorted({factor.scaling for factor in factors}),
    }


def _config_changes(model: MergedModel) -> dict[str, Any]:
    """Fields of config.json that the merge changed, as [before, after]."""
    before, after = model.layout.config, model.config
    return {name: [before.get(name), value] for name, value in after.items() if before.get(name) != value}
