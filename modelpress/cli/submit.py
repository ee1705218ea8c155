"""`submit` and `estimate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group

from modelpress.cli.commands import open_client
from modelpress.cli.exits import Exit, Interrupted
from modelpress.cli.following import finish, follow
from modelpress.cli.output import Output, note, printable
from modelpress.cli.progress_view import progress_view, size
from modelpress.cli.submission import InputOptions, Submission, read_submission
from modelpress.cli.tables import facts_text, table_with
from modelpress.errors import InvalidRequest
from modelpress.requests import ConversionRequest
from modelpress.views import Estimate

if TYPE_CHECKING:
    from modelpress.client import Client


@dataclass(frozen=True, kw_only=True)
class SubmitOptions(InputOptions):
    request_id: Annotated[
        str,
        typer.Option(
            "--request-id",
            metavar="ID",
            help="Makes the command safe to repeat: the same id with the same inputs is the same conversion.",
        ),
    ] = ""
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="DIR", help="Download the output into this new or empty folder."),
    ] = None
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait: print the conversion and return.")] = False


@dataclass(frozen=True, kw_only=True)
class EstimateOptions(InputOptions):
    """The same inputs as `submit`."""


def submit(options: SubmitOptions, output: Output) -> Exit:
    """Send a model and a recipe, wait for the verdict, and exit 0 only where it is APPROVED.

    Files that the server holds already are not sent again. Ctrl-C while waiting detaches: the conversion goes on.
    """
    if options.detach and options.output:
        raise InvalidRequest("--output needs the verdict, which --detach does not wait for: leave one of them out")
    submission = read_submission(options)
    if options.output:
        from modelpress.downloads import check_folder

        check_folder(options.output)
    with open_client(options) as client:
        request = _upload(submission, client, output)
        conversion = client.create_conversion(request, request_id=options.request_id or None)
        note(output.notes, f"{conversion.name} is {conversion.state.value.lower()}")
        if options.detach:
            output.result({"conversion": conversion}, printable(conversion.name))
            return Exit.OK
        return finish(client, follow(client, conversion.name, output), output, options.output)


def estimate(options: EstimateOptions, output: Output) -> Exit:
    """Check everything that `submit` would, and say what it would take; queues nothing.

    The inputs are sent first, because the server looks into them.
    """
    submission = read_submission(options)
    with open_client(options) as client:
        result = client.estimate(_upload(submission, client, output))
    output.result({"estimate": result}, _estimate_text(result))
    return Exit.OK


def _upload(submission: Submission, client: Client, output: Output) -> ConversionRequest:
    try:
        with progress_view(output.notes) as view:
            return submission.upload(client, view)
    except KeyboardInterrupt:
        raise Interrupted("stopped while sending: the same command goes on with what is missing") from None


def _estimate_text(estimate: Estimate) -> Group:
    facts = facts_text(
        {
            "parameters": f"{estimate.parameters:,}",
            "worker memory": size(estimate.memory_bytes),
            "storage": size(estimate.storage_bytes),
            "candidate": size(estimate.candidate_bytes) if estimate.candidate_bytes else None,
        }
    )
    steps = table_with("step", "result")
    for step in estimate.steps:
        steps.add_row(printable(step), "in the cache" if step in estimate.cached_steps else "to compute")
    return Group(facts, steps, *(printable(f"warning: {warning}") for warning in estimate.warnings))
