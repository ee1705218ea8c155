"""Structured pruning of FFN neurons: whole rows and columns go, the config says the new width.

Every layer keeps the same number of neurons, since the config has one width for all; which ones is each layer's
own choice. Nothing else changes: embeddings, attention, norms and classifier keep their bytes. Attention heads
stay: BERT's config derives the head size from hidden width and head count, so heads could go only together with
the width of every tensor on the residual stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch_pruning
from torch import Tensor, nn

from compressors import importance
from compressors.batches import spread
from compressors.families import family_of
from compressors.folders import left_out_warnings, load_model, read_config, save_model
from compressors.measuring import Rows, largest_difference, probe_logits, quality, read_rows, reference_logits
from compressors.stages import Job, Monitor, Progress
from modelpress.errors import InternalError, InvalidModel, InvalidRecipe
from modelpress.recipes import Prune
from modelpress.reports import StageRecord

VERSION = 3
MAX_RELOAD_DIFFERENCE = 1e-5


@dataclass(frozen=True)
class Cut:
    """What goes: from `width` to `kept_width` neurons in every (`ffn_in`, `ffn_out`) of `pairs`."""

    width_field: str
    width: int
    kept_width: int
    pairs: tuple[tuple[str, str], ...]

    @property
    def ratio(self) -> float:
        return 1 - self.kept_width / self.width

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that become smaller."""
        return tuple(f"{name}" for i, o in self.pairs for name in (f"{i}.weight", f"{i}.bias", f"{o}.weight"))


def run(arguments: Prune, job: Job, monitor: Monitor) -> StageRecord:
    """Remove the least important `arguments.ratio` of every layer's neurons and write the smaller model.

    Raises InvalidRecipe where the ratio removes nothing or everything, or where Taylor importance has no data.
    """
    model = load_model(job.model, device=job.device)
    cut = plan_cut(model.config, read_config(job.model), arguments)
    rows = read_rows(job, model.config)
    teacher = load_model(job.teacher, device=job.device) if job.teacher else model
    reference = reference_logits(teacher, rows, device=job.device)
    before, parameters_before = quality(model, rows, reference=reference, device=job.device), _parameters(model)

    scores = score(model, cut, rows, arguments=arguments, device=job.device)
    graph = dependency_graph(model, rows.probe_batch(job.device).inputs)
    for step, (pair, layer_scores) in enumerate(zip(cut.pairs, scores, strict=True), 1):
        removed = least_important(layer_scores, cut.width - cut.kept_width)
        remove_neurons(graph, (model.get_submodule(pair[0]), model.get_submodule(pair[1])), removed=removed)
        monitor.progress(Progress(step=step, steps=len(cut.pairs)))
    setattr(model.config, cut.width_field, cut.kept_width)
    save_model(model, source=job.model, output=job.output)

    return StageRecord(
        method="prune",
        arguments=arguments.model_dump(mode="json"),
        version=VERSION,
        touched=cut.tensors,
        before=before,
        after=quality(model, rows, reference=reference, device=job.device),
        details={
            "neurons_per_layer_before": cut.width,
            "neurons_per_layer": [model.get_submodule(ffn_in).out_features for ffn_in, _ in cut.pairs],
            "ratio_achieved": cut.ratio,
            "parameters_before": parameters_before,
            "parameters_after": _parameters(model),
            "quality_against": "the teacher" if job.teacher else "the model before pruning",
            "reload_max_abs_logit_difference": check_reload(model, job, rows),
        },
        warnings=(*_warnings(arguments, cut, rows), *left_out_warnings(job.model)),
    )


def plan_cut(model_config: Any, config: Mapping[str, Any], arguments: Prune) -> Cut:
    """How wide every layer becomes: the multiple of `round_to` nearest to what the ratio leaves."""
    family = family_of(config)
    width = int(getattr(model_config, family.ffn_width_field))
    pairs = family.ffn_pairs(getattr(model_config, family.layers_field))
    return Cut(family.ffn_width_field, width, rounded_width(width, arguments), pairs)


def rounded_width(width: int, arguments: Prune) -> int:
    """Neurons that stay; more than 0 and fewer than `width`, else InvalidRecipe."""
    step = arguments.round_to
    kept = int(width * (1 - arguments.ratio) / step + 0.5) * step
    if not 0 < kept < width:
        extreme = "nothing" if kept else "everything"
        raise InvalidRecipe(
            f"ratio {arguments.ratio} removes {extreme} of {width} neurons per layer, rounded to {step}: "
            "change ratio or round_to",
            field="ratio",
        )
    return kept


def score(model: Any, cut: Cut, rows: Rows, *, arguments: Prune, device: str) -> list[Tensor]:
    """Each layer's importance scores, [N]; InvalidModel where they cannot tell neurons apart."""
    if arguments.importance == "magnitude":
        scores = importance.magnitude(model, cut.pairs)
    elif rows.train is None:
        raise InvalidRecipe("importance 'taylor' needs training data: add it, or use 'magnitude'", field="importance")
    else:
        examples = spread(rows.train, limit=arguments.calibration_examples)
        scores = importance.taylor(model, cut.pairs, examples, device=device)
    for (ffn_in, _), layer_scores in zip(cut.pairs, scores, strict=True):
        if not torch.isfinite(layer_scores).all() or not layer_scores.any():
            raise InvalidModel(f"the {arguments.importance} importance of {ffn_in!r} is 0 or not finite everywhere")
    return scores


def least_important(scores_N: Tensor, count: int) -> list[int]:
    """Indices of the `count` lowest scores, ascending; of equal scores the lower index goes first."""
    return sorted(scores_N.argsort(stable=True)[:count].tolist())


def dependency_graph(model: Any, example: Mapping[str, Tensor]) -> torch_pruning.DependencyGraph:
    """torch-pruning's graph of which channels hang together (Fang et al. 2023), traced once on `example`."""
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return torch_pruning.DependencyGraph().build_dependency(model, example_inputs=dict(example))


def remove_neurons(
    graph: torch_pruning.DependencyGraph, ffn: tuple[nn.Linear, nn.Linear], *, removed: list[int]
) -> None:
    """Cut neurons out of one FFN.

    Raises InternalError where anything but these two layers depends on the neurons: the config could not say it.
    """
    group = graph.get_pruning_group(ffn[0], torch_pruning.prune_linear_out_channels, idxs=removed)
    reached = {dependency.target.module for dependency, _ in group}
    if {module for module in reached if list(module.parameters())} != set(ffn):
        raise InternalError("FFN neurons reach beyond their two linear layers: this architecture is not understood")
    group.prune()


def check_reload(model: Any, job: Job, rows: Rows) -> float:
    """Largest logit difference between `model` and what plain loading makes of the output; InternalError if any."""
    reloaded = load_model(job.output, device=job.device)
    logits = (probe_logits(model, rows, device=job.device), probe_logits(reloaded, rows, device=job.device))
    difference = largest_difference(*logits)
    if not difference <= MAX_RELOAD_DIFFERENCE:
        raise InternalError(f"the pruned model reloads with logits that differ by {difference}")
    return difference


def _parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _warnings(arguments: Prune, cut: Cut, rows: Rows) -> tuple[str, ...]:
    found = []
    if abs(cut.ratio - arguments.ratio) > 1e-9:
        found.append(f"ratio {arguments.ratio} became {cut.ratio:.4f}: widths are multiples of {arguments.round_to}")
    if rows.held_out is None:
        found.append("quality before and after was not measured: the stage had no data")
    elif arguments.importance == "taylor" and rows.train and rows.train.truncated:
        found.append(f"{rows.train.truncated} training texts were cut at {rows.train.max_length} tokens")
    return tuple(found)
