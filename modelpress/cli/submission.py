"""What `submit` and `estimate` send: every option and file is read and checked before anything leaves the machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from modelpress.cli.commands import ServerOptions
from modelpress.cli.progress_view import ProgressView, show_transfer
from modelpress.cli.values import MergedOption, parse_adapter, parse_duration, parse_labels, parse_model, parse_size
from modelpress.errors import InvalidRequest
from modelpress.evaluations import read_evaluation
from modelpress.inspection import folder_kind
from modelpress.manifests import ArtifactKind
from modelpress.policies import read_policy
from modelpress.recipes import read_recipe
from modelpress.request_rules import Given, check_inputs, check_labels, check_order
from modelpress.requests import ARTIFACT_NAME, AdapterInput, ConversionRequest, Documents, Limits, ModelInput

if TYPE_CHECKING:
    from modelpress.client import Client

_LIMITS = "Limits"
ParsedT = TypeVar("ParsedT")


@dataclass(frozen=True, kw_only=True)
class InputOptions(ServerOptions):
    base: Annotated[str, typer.Argument(metavar="BASE", help="Model folder, or artifacts/sha256:<hex> sent before.")]
    recipe: Annotated[Path, typer.Option("--recipe", metavar="FILE", help="What to do (YAML).")]
    policy: Annotated[Path, typer.Option("--policy", metavar="FILE", help="The gates that decide (YAML).")]
    adapter: Annotated[
        list[str],
        typer.Option("--adapter", metavar="NAME=DIR[:WEIGHT]", help="PEFT adapter to merge; may be repeated."),
    ] = field(default_factory=list)
    model: Annotated[
        list[str],
        typer.Option("--model", metavar="NAME=DIR[:WEIGHT]", help="Model to merge into the base; may be repeated."),
    ] = field(default_factory=list)
    eval: Annotated[
        str,
        typer.Option(
            "--eval",
            metavar="DIR",
            help="Dataset that the verdict is measured on: labelled for a classifier, texts for a language model; a "
            "recipe that only merges has none.",
        ),
    ] = ""
    evaluation: Annotated[
        Path | None,
        typer.Option("--evaluation", metavar="FILE", help="What to measure (YAML); without it the defaults."),
    ] = None
    train: Annotated[
        str, typer.Option("--train", metavar="DIR", help="Dataset to train and calibrate on, where the recipe does.")
    ] = ""
    validation: Annotated[
        str,
        typer.Option(
            "--validation",
            metavar="DIR",
            help="Held-out dataset of a classifier; without it a tenth of the train dataset.",
        ),
    ] = ""
    probes: Annotated[
        str, typer.Option("--probes", metavar="DIR", help="Texts for the drift check; without it the --eval dataset.")
    ] = ""
    label: Annotated[
        list[str], typer.Option("--label", metavar="KEY=VALUE", help="Label of the conversion; may be repeated.")
    ] = field(default_factory=list)
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of everything random, 0 to 2^31-1.")] = 0
    priority: Annotated[
        int, typer.Option("--priority", metavar="N", rich_help_panel=_LIMITS, help="Higher runs first; -100 to 100.")
    ] = 0
    memory_limit: Annotated[
        str,
        typer.Option("--memory-limit", metavar="SIZE", rich_help_panel=_LIMITS, help="Of the worker, e.g. 8GiB."),
    ] = ""
    run_timeout: Annotated[
        str,
        typer.Option("--run-timeout", metavar="TIME", rich_help_panel=_LIMITS, help="Longest time running, e.g. 2h."),
    ] = ""
    queue_timeout: Annotated[
        str,
        typer.Option(
            "--queue-timeout", metavar="TIME", rich_help_panel=_LIMITS, help="Longest time waiting, e.g. 30m."
        ),
    ] = ""


@dataclass(frozen=True)
class Submission:
    """All that one request needs, read and checked. Sources are folders or artifact names; empty: no such input."""

    documents: Documents
    base: str
    datasets: Mapping[str, str]
    adapters: tuple[MergedOption, ...]
    models: tuple[MergedOption, ...]
    limits: Limits
    labels: Mapping[str, str]
    seed: int
    priority: int

    def __post_init__(self) -> None:
        check_order(seed=self.seed, priority=self.priority)
        check_labels(self.labels)
        given = Given(
            adapters=tuple(adapter.name for adapter in self.adapters),
            models=tuple((model.name, model.weight) for model in self.models),
            datasets=frozenset(role for role, source in self.datasets.items() if source),
            has_evaluation_document=bool(self.documents.evaluation.strip()),
            task=self.documents.parsed_evaluation.task,
        )
        check_inputs(self.documents.parsed_recipe, given)

    def upload(self, client: Client, view: ProgressView) -> ConversionRequest:
        """Send every folder that is not an artifact yet, each once."""
        names: dict[str, str] = {}

        def artifact(source: str, kind: ArtifactKind) -> str:
            if source and not ARTIFACT_NAME.fullmatch(source) and source not in names:
                show = show_transfer(view, f"uploading {source}")
                names[source] = client.upload_folder(Path(source), kind, show=show)
            return names.get(source, source)

        return ConversionRequest(
            documents=self.documents,
            base=artifact(self.base, ArtifactKind.MODEL),
            adapters=tuple(
                AdapterInput(adapter.name, artifact(adapter.source, ArtifactKind.ADAPTER), adapter.weight)
                for adapter in self.adapters
            ),
            models=tuple(
                ModelInput(model.name, artifact(model.source, ArtifactKind.MODEL), model.weight)
                for model in self.models
            ),
            limits=self.limits,
            labels=self.labels,
            seed=self.seed,
            priority=self.priority,
            **{role: artifact(source, ArtifactKind.DATASET) for role, source in self.datasets.items()},
        )


def read_submission(options: InputOptions) -> Submission:
    """Read every file and option; the first fault is an InvalidRequest that names it."""
    documents = Documents(
        recipe=_read(options.recipe, read_recipe),
        policy=_read(options.policy, read_policy),
        evaluation=_read(options.evaluation, read_evaluation) if options.evaluation else "",
    )
    datasets = {"train": options.train, "validation": options.validation}
    datasets |= {"evaluation": options.eval, "probes": options.probes}
    submission = Submission(
        documents=documents,
        base=options.base,
        datasets=datasets,
        adapters=tuple(parse_adapter(text) for text in options.adapter),
        models=tuple(parse_model(text) for text in options.model),
        limits=_limits(options),
        labels=parse_labels(options.label),
        seed=options.seed,
        priority=options.priority,
    )
    _check_sources(submission)
    return submission


def _read(file: Path, parse: Callable[[str], object]) -> str:
    """The file's text, byte for byte, once it is known to parse."""
    try:
        text = file.read_bytes().decode()
    except OSError as error:
        raise InvalidRequest(f"cannot read {str(file)!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"{str(file)!r} is not UTF-8 text") from None
    try:
        parse(text)
    except InvalidRequest as fault:
        raise type(fault)(f"{file}: {fault.message}", reason=fault.reason, field=fault.field) from None
    return text


def _check_sources(submission: Submission) -> None:
    _check_source("BASE", submission.base, "model")
    for adapter in submission.adapters:
        _check_source(f"--adapter {adapter.name}", adapter.source, "adapter")
    for model in submission.models:
        _check_source(f"--model {model.name}", model.source, "model")
    for role, source in submission.datasets.items():
        if source:
            _check_source("--eval" if role == "evaluation" else f"--{role}", source, "dataset")


def _check_source(role: str, source: str, expected: str) -> None:
    """A folder given in the wrong place is found before gigabytes of it are sent."""
    if ARTIFACT_NAME.fullmatch(source):
        return
    try:
        found = folder_kind(Path(source))
    except InvalidRequest as fault:
        raise type(fault)(f"{role}: {fault.message}", reason=fault.reason, field=fault.field) from None
    if found != expected:
        raise InvalidRequest(f"{role}: {source!r} is a folder of kind {found}, where {expected} is needed")


def _limits(options: InputOptions) -> Limits:
    return Limits(
        queue_timeout_s=parse_duration("--queue-timeout", options.queue_timeout) if options.queue_timeout else None,
        run_timeout_s=parse_duration("--run-timeout", options.run_timeout) if options.run_timeout else None,
        memory_limit_bytes=parse_size("--memory-limit", options.memory_limit) if options.memory_limit else None,
    )
