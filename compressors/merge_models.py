"""Merge whole checkpoints of one architecture into the base on the streaming engine; arithmetic: `tensor_merges.py`.

Config, tokenizer and companions are the base's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from compressors.folders import CONFIG
from compressors.merge_figures import Figures, FiguresMonitor
from compressors.merged_folder import OUTPUT_DTYPES, with_dtype, write_beside
from compressors.merged_sources import chosen, named
from compressors.output_plan import OutputPlan
from compressors.same_architecture import check_full_precision, compare_configs, compare_tensors, compare_tokenizers
from compressors.stages import Monitor, NamedSource, StreamJob
from compressors.streaming import MergeOutcome, merge_files
from compressors.tensor_merges import Checkpoint, TensorMerge
from compressors.weight_files import DTYPE_NAMES, WeightFiles, read_json
from modelpress.errors import InvalidModel, InvalidRecipe
from modelpress.merge_recipes import MergeModels
from modelpress.reports import StageRecord

VERSION = 1


def run(arguments: MergeModels, job: StreamJob, monitor: Monitor) -> StageRecord:
    """Merge the models that `arguments` names, all of them where it names none.

    Raises InvalidRecipe for models that the method cannot use, InvalidModel for one that does not fit or holds NaN or
    infinity, and where the output would be the base.
    """
    sources = choose(arguments, job.merged)
    base, models = WeightFiles.read(job.base), [read_checkpoint(source) for source in sources]
    config = read_json(job.base, CONFIG)
    warnings = check_fit(base, models, config=config)
    figures = Figures.resumed(monitor.checkpoint())
    floating = [tensor.name for tensor in base.tensors.values() if tensor.dtype.is_floating_point]
    changes = {name: TensorMerge(name, models, arguments, job.seed, figures.note) for name in floating}
    plan = OutputPlan.of(base, changes, dtype=OUTPUT_DTYPES[arguments.output_dtype])
    outcome = merge_files(base, plan, job, FiguresMonitor(monitor, figures))
    check_changed(outcome, figures)
    config = with_dtype(config, arguments.output_dtype)
    left_out = write_beside(base, plan, config=config, sink=job.sink)
    changed = {name: tensor.relative or 0.0 for name, tensor in sorted(outcome.tensors.items()) if tensor.changed}
    return StageRecord(
        method="merge_models",
        arguments=arguments.model_dump(mode="json"),
        version=VERSION,
        touched=tuple(changed),
        details={
            **described(arguments, models, seed=job.seed),
            **figures.summary(arguments.merge_method),
            "relative_change": changed,
            "tensors_added": [],
            "tensors_byte_identical": len(base.tensors) - len(changed),
            "dtypes": dtypes(base, models, plan),
        },
        warnings=(*warnings, *left_out),
    )


def choose(arguments: MergeModels, models: Sequence[NamedSource]) -> list[NamedSource]:
    """The models to merge, in the recipe's order; InvalidRecipe where the method cannot use them."""
    found = chosen(arguments.models, models, kind="model")
    if arguments.merge_method == "slerp":
        _check_way(found)
    return found


def _check_way(models: Sequence[NamedSource]) -> None:
    if len(models) != 1:
        raise InvalidRecipe(
            f"slerp goes from the base to one model, and {len(models)} are given: name one in `models`, or merge with "
            "'linear'",
            field="models",
        )
    if not 0 <= models[0].weight <= 1:
        raise InvalidRecipe(
            f"model {models[0].name!r} has the weight {models[0].weight:g}: for slerp it is the way from the base to "
            "the model, between 0 and 1",
            field="models.weight",
        )


def read_checkpoint(source: NamedSource) -> Checkpoint:
    """The model with its headers read and every byte of its weights verified; DataLoss where one is damaged."""
    with named("model", source.name):
        files = WeightFiles.read(source.source)
    files.verify()
    return Checkpoint(source.name, source.weight, files)


def check_fit(base: WeightFiles, models: Sequence[Checkpoint], *, config: Mapping[str, Any]) -> tuple[str, ...]:
    """InvalidModel for the first model that cannot be merged into the base; warnings about what differs.

    `config` is the base's.
    """
    check_full_precision(config)
    warnings: tuple[str, ...] = ()
    for model in models:
        with named("model", model.name):
            other = read_json(model.files.source, CONFIG)
            check_full_precision(other)
        warnings += compare_configs(config, other, name=model.name)
        compare_tensors(base, model.files, name=model.name)
        warnings += compare_tokenizers(base.source, model.files.source, name=model.name)
    return warnings


def check_changed(outcome: MergeOutcome, figures: Figures) -> None:
    """InvalidModel where the output is the base, in whatever dtype."""
    if figures.of_tensors and any(tensor.changed for tensor in outcome.tensors.values()):
        return
    raise InvalidModel(
        "the merge changes nothing: the models' tensors are those of the base, or their weights are 0 or so small that "
        "every change is rounded away"
    )


def described(arguments: MergeModels, models: Sequence[Checkpoint], *, seed: int) -> dict[str, Any]:
    """What was merged how. The seed matters to DARE only."""
    return {
        "models": [{"name": model.name, "weight": model.weight} for model in models],
        "merge_method": arguments.merge_method,
        "density": arguments.density,
        "seed": seed,
    }


def dtypes(base: WeightFiles, models: Sequence[Checkpoint], plan: OutputPlan) -> dict[str, dict[str, int]]:
    """How many tensors have which dtype: of the base, of each model, of the output."""
    return {
        "base": _counts(tensor.dtype for tensor in base.tensors.values()),
        **{f"model {m.name}": _counts(tensor.dtype for tensor in m.files.tensors.values()) for m in models},
        "output": _counts(tensor.dtype for tensor in plan.tensors),
    }


def _counts(dtypes: Iterator[torch.dtype]) -> dict[str, int]:
    return dict(sorted(Counter(DTYPE_NAMES[dtype] for dtype in dtypes).items()))
