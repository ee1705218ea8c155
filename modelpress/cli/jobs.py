"""`watch`, `get`, `list`, `cancel`, `retry` and `download`: what is asked about a conversion once it exists."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from modelpress.cli.commands import ServerOptions, open_client
from modelpress.cli.exits import Exit
from modelpress.cli.following import candidate_folder, finish, follow
from modelpress.cli.output import Output, printable
from modelpress.cli.tables import conversion_text, conversions_table
from modelpress.cli.values import parse_choices, parse_labels
from modelpress.reports import Verdict
from modelpress.views import ConversionState

NAME_HELP = "conversions/<id>, or the id alone."


@dataclass(frozen=True, kw_only=True)
class NameOptions(ServerOptions):
    name: Annotated[str, typer.Argument(metavar="CONVERSION", help=NAME_HELP)]


@dataclass(frozen=True, kw_only=True)
class WatchOptions(NameOptions):
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="DIR", help="Download the output into this new or empty folder."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RetryOptions(NameOptions):
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait: print the conversion and return.")] = False


@dataclass(frozen=True, kw_only=True)
class ListOptions(ServerOptions):
    state: Annotated[
        list[str], typer.Option("--state", metavar="STATE", help="Only in this state; may be repeated.")
    ] = field(default_factory=list)
    verdict: Annotated[
        list[str], typer.Option("--verdict", metavar="VERDICT", help="Only with this verdict; may be repeated.")
    ] = field(default_factory=list)
    label: Annotated[
        list[str], typer.Option("--label", metavar="KEY=VALUE", help="Only with this label; may be repeated.")
    ] = field(default_factory=list)
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="At most so many.")] = 50


@dataclass(frozen=True, kw_only=True)
class DownloadOptions(NameOptions):
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="DIR",
            help="A new or empty folder; without it the id, with the verdict behind it where that is not APPROVED.",
        ),
    ] = None


def watch(options: WatchOptions, output: Output) -> Exit:
    """Come back to a conversion: what has happened, what happens, and the verdict."""
    with open_client(options) as client:
        conversion = follow(client, client.get(options.name).name, output)
        return finish(client, conversion, output, options.output)


def get(options: NameOptions, output: Output) -> Exit:
    """Show one conversion."""
    with open_client(options) as client:
        conversion = client.get(options.name)
    output.result({"conversion": conversion}, conversion_text(conversion))
    return Exit.OK


def list_conversions(options: ListOptions, output: Output) -> Exit:
    """List conversions, newest first."""
    states = parse_choices("--state", options.state, [s for s in ConversionState if s is not ConversionState.UNKNOWN])
    verdicts = parse_choices("--verdict", options.verdict, list(Verdict))
    with open_client(options) as client:
        found = client.list(states=states, verdicts=verdicts, labels=parse_labels(options.label))
        conversions = list(itertools.islice(found, options.limit))
    output.result({"conversions": conversions}, conversions_table(conversions))
    return Exit.OK


def cancel(options: NameOptions, output: Output) -> Exit:
    """Ask a conversion to stop. What it has finished is kept, and `retry` goes on from there."""
    with open_client(options) as client:
        conversion = client.cancel(options.name)
    output.result({"conversion": conversion}, printable(f"{conversion.name} is {conversion.state.value}"))
    return Exit.OK


def retry(options: RetryOptions, output: Output) -> Exit:
    """Queue a failed or cancelled conversion again, and wait: it goes on from its last finished step."""
    with open_client(options) as client:
        conversion = client.retry(options.name)
        if options.detach:
            output.result({"conversion": conversion}, printable(conversion.name))
            return Exit.OK
        return finish(client, follow(client, conversion.name, output), output, None)


def download(options: DownloadOptions, output: Output) -> Exit:
    """Fetch the signed output of a conversion; exits 0 only where its verdict is APPROVED.

    A download that was cut goes on where it stopped.
    """
    with open_client(options) as client:
        conversion = client.get(options.name)
        folder = candidate_folder(conversion)
        return finish(client, conversion, output, options.output or folder)
