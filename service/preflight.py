"""Preflight: everything about a request that can be known before it runs, checked before it is queued.

    estimate = preflight(request, facts, capabilities)

`facts` are those of the artifacts that the tenant has (`service.intake`), by digest. Pure: nothing is read or written,
so it answers in milliseconds, for `validate_only` and for a real CreateConversion alike.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from modelpress.digests import Digest
from modelpress.errors import InvalidDataset, InvalidRecipe, InvalidRequest, NotFound, OverLimit
from modelpress.evaluations import Evaluation, LanguageEvaluation
from modelpress.gates import check_measurable
from modelpress.manifests import ArtifactKind
from modelpress.merge_recipes import MergeLora
from modelpress.recipes import Quantize, Recipe, TrainingArguments
from modelpress.views import Estimate
from service.adapter_fit import check_adapters
from service.estimates import candidate_size, memory_need, scratch_need, storage_need
from service.fit import Facts, check_labels, check_texts, overlap_warnings
from service.language_fit import check_positions, check_targets, check_task, check_windows, language_warnings
from service.model_fit import check_models, check_obstacle, check_quantization
from service.plan import make_plan
from service.requests import ConversionRequest


class Capabilities(Protocol):
    """What of a server's capabilities preflight asks for, e.g. a GetCapabilitiesResponse."""

    @property
    def default_memory_limit_bytes(self) -> int: ...


@dataclass(frozen=True)
class Inputs:
    """The facts of a request's artifacts by role. Each is there and of its kind."""

    base: Facts
    adapters: Mapping[str, Facts]
    models: Mapping[str, Facts]
    datasets: Mapping[str, Facts]
    """By field, `inputs.train` to `inputs.probes`, where the request has them."""


def preflight(request: ConversionRequest, facts: Mapping[Digest, Facts], capabilities: Capabilities) -> Estimate:
    """What the conversion will need. Raises on what cannot be: the first misfit, as one sentence with its cure."""
    inputs = gather(request, facts)
    check_obstacle(request.recipe, inputs.base)
    warnings = [*merge_warnings(request, inputs)]
    if not request.recipe.is_merge_only:
        check_task(inputs.base, request.evaluation)
    check_measurable(request.policy, request.evaluation, request.recipe)
    if not request.recipe.is_merge_only:
        warnings += evaluated_warnings(request, inputs)
    warnings += [*inputs.base["warnings"], *memory_warnings(request, inputs.base, capabilities)]
    sizes = [facts[digest]["size_bytes"] for digest in request.artifacts]
    return Estimate(
        storage_bytes=storage_need(request, sizes, inputs.base),
        memory_bytes=memory_need(request, inputs.base).peak_bytes,
        candidate_bytes=candidate_size(request, inputs.base),
        parameters=inputs.base["parameters"],
        steps=make_plan(request).step_names,
        cached_steps=(),
        warnings=tuple(warnings),
    )


def gather(request: ConversionRequest, facts: Mapping[Digest, Facts]) -> Inputs:
    """Look up every artifact of the request: NotFound or InvalidRequest names the field."""
    return Inputs(
        base=_lookup(request.base, facts, "inputs.base", ArtifactKind.MODEL),
        adapters={
            adapter.name: _lookup(adapter.artifact, facts, f"inputs.adapters[{index}].artifact", ArtifactKind.ADAPTER)
            for index, adapter in enumerate(request.adapters)
        },
        models={
            model.name: _lookup(model.artifact, facts, f"inputs.models[{index}].artifact", ArtifactKind.MODEL)
            for index, model in enumerate(request.models)
        },
        datasets={
            f"inputs.{role}": _lookup(digest, facts, f"inputs.{role}", ArtifactKind.DATASET)
            for role, digest in request.datasets.items()
        },
    )


def merge_warnings(request: ConversionRequest, inputs: Inputs) -> Iterator[str]:
    """Check that what is merged fits the base, and what is odd but possible comes back as sentences."""
    merge = request.recipe.merge
    check_quantization(request.recipe, inputs.base, inputs.models)
    if isinstance(merge, MergeLora):
        check_adapters(inputs.adapters, inputs.base, merge)
    yield from check_models(inputs.models, inputs.base)


def evaluated_warnings(request: ConversionRequest, inputs: Inputs) -> Iterator[str]:
    """Check base, recipe and datasets against the evaluation; what is odd but possible comes back as sentences."""
    recipe, evaluation = request.recipe, request.evaluation
    if isinstance(evaluation, LanguageEvaluation):
        check_windows(recipe, evaluation, inputs.base)
        check_targets(recipe, inputs.base)
        check_positions(recipe, inputs.base)
        yield from language_warnings(recipe, evaluation, inputs.datasets)
    else:
        check_lengths(recipe, evaluation, inputs.base)
        check_ignored_modules(request, inputs.base)
        yield from dataset_warnings(request, evaluation, inputs)


def dataset_warnings(request: ConversionRequest, evaluation: Evaluation, inputs: Inputs) -> Iterator[str]:
    """Check columns, labels and row counts of every dataset; what is odd but possible comes back as sentences."""
    for field, dataset in inputs.datasets.items():
        yield from dataset["warnings"]
        check_texts(dataset, evaluation, field=field)
        if field != "inputs.probes":
            yield from check_labels(dataset, evaluation, inputs.base["labels"], field=field)
    train = inputs.datasets.get("inputs.train")
    if train is None:
        return
    yield from overlap_warnings(inputs.datasets["inputs.evaluation"], train, evaluation.text_column)
    if not request.recipe.needs_training_data:
        yield "inputs.train is set, and no stage of the recipe reads it"
    if request.validation is None and train["rows"] < 2:
        raise InvalidDataset(
            "inputs.train has one row: give more rows, or a validation dataset, since a tenth of them is held out",
            field="inputs.train",
        )
    for index, stage in enumerate(request.recipe.stages):
        wanted = getattr(stage, "calibration_examples", 0)
        if wanted > train["rows"]:
            rows = train["rows"]
            yield f"recipe.stages[{index}].calibration_examples is {wanted}, and the training dataset has {rows} rows"


def check_lengths(recipe: Recipe, evaluation: Evaluation, base: Facts) -> None:
    """No text, training batch or latency run is longer than the model's positions, no text that is evaluated longer
    than its tokenizer is made for.
    """
    most = int(base["max_positions"])
    limits = {"evaluation.max_length": min(most, base["tokenizer"]["model_max_length"] or most)}
    lengths = {
        "evaluation.max_length": evaluation.max_length,
        "evaluation.latency.sequence_lengths": max(evaluation.latency.sequence_lengths),
        **{
            f"recipe.stages[{index}].max_length": stage.max_length
            for index, stage in enumerate(recipe.stages)
            if isinstance(stage, TrainingArguments)
        },
    }
    for field, length in lengths.items():
        limit = limits.get(field, most)
        if length > limit:
            owner = "model" if limit == most else "model's tokenizer"
            raise InvalidRequest(
                f"{field} is {length}: the {owner} takes at most {limit} tokens: set it to {limit} or less",
                reason="TOO_LONG",
                field=field,
            )


def check_ignored_modules(request: ConversionRequest, base: Facts) -> None:
    """Every module that `quantize` names to be left float exists; patterns are judged when the stage runs."""
    modules = {tensor.rpartition(".")[0] for tensor in base["tensors"]}
    for index, stage in enumerate(request.recipe.stages):
        for name in stage.ignore if isinstance(stage, Quantize) else ():
            if not name.startswith("re:") and not any(m == name or m.startswith(f"{name}.") for m in modules):
                close = difflib.get_close_matches(name, modules, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                field = f"recipe.stages[{index}].ignore"
                raise InvalidRecipe(f"{field}: the model has no module {name[:120]!r}{hint}", field=field)


def memory_warnings(request: ConversionRequest, base: Facts, capabilities: Capabilities) -> Iterator[str]:
    """Refuse a memory limit that can never do; warn of one that may not do for the longest batches."""
    need = memory_need(request, base)
    asked = request.limits.memory_limit_bytes
    limit = asked or capabilities.default_memory_limit_bytes
    if limit < need.certain_bytes:
        sentence = f"the conversion needs at least {need.certain_bytes} bytes of memory, and "
        if asked:
            raise InvalidRequest(
                f"limits.memory_limit_bytes is {asked}: {sentence}about {need.peak_bytes} at its peak",
                reason="MEMORY_LIMIT_TOO_LOW",
                field="limits.memory_limit_bytes",
            )
        raise OverLimit(f"{sentence}this server gives a worker {limit}: use a server with more memory")
    if limit < need.peak_bytes:
        yield f"the memory limit is {limit} bytes, and the conversion may take about {need.peak_bytes}: {need.cure}"


def check_scratch(request: ConversionRequest, base: Facts, *, free_bytes: int) -> None:
    """Refuse a calibration whose activations do not fit on the disk that the server's workers have now."""
    need = scratch_need(request, base)
    if need > free_bytes:
        raise OverLimit(
            f"between the layers the calibration's activations take {need} bytes of this server's disk, and "
            f"{free_bytes} are free: lower calibration_samples or sequence_length of quantize_weights"
        )


def _lookup(digest: Digest, facts: Mapping[Digest, Facts], field: str, kind: ArtifactKind) -> Facts:
    name = f"artifacts/{digest}"
    if digest not in facts:
        raise NotFound(
            f"{field} is {name}, which does not exist: upload it first", reason="ARTIFACT_NOT_FOUND", field=field
        )
    if facts[digest].get("kind") != kind.value:
        raise InvalidRequest(
            f"{field} is {name}, which was not created as {kind.name}: name an artifact of kind {kind.name}",
            reason="WRONG_KIND",
            field=field,
        )
    return facts[digest]
