"""From a queued conversion to its outcome on the screen: shared by `submit`, `watch`, `retry` and `download`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType

from modelpress.cli.exits import Exit, Interrupted, of_conversion
from modelpress.cli.output import Output, printable
from modelpress.cli.progress_view import progress_view, show_event, show_transfer
from modelpress.cli.tables import conversion_text, report_text
from modelpress.errors import FailedPrecondition
from modelpress.reports import Verdict
from modelpress.views import Conversion, ConversionState, ReportSummary

if TYPE_CHECKING:
    from modelpress.client import Client


@dataclass(frozen=True)
class Finished:
    """A conversion that has ended, with its report where it has one, and where its output was put."""

    conversion: Conversion
    report: ReportSummary | None
    folder: Path | None


def follow(client: Client, name: str, output: Output) -> Conversion:
    """Show progress until the conversion has ended. Ctrl-C only detaches."""
    try:
        with progress_view(output.notes) as view:
            for event in client.watch(name):
                show_event(view, event)
        return client.get(name)
    except KeyboardInterrupt:
        raise Interrupted(
            f"detached, and {name} goes on: `modelpress watch {name}` comes back to it, "
            f"`modelpress cancel {name}` stops it",
            metadata={"conversion": name},
        ) from None


def finish(client: Client, conversion: Conversion, output: Output, folder: Path | None) -> Exit:
    """Show the outcome; with `folder`, fetch the output into it, whatever the verdict, and say loudly what it is."""
    report = client.report(conversion.name) if conversion.state is ConversionState.SUCCEEDED else None
    fetched = folder if folder and report else None
    if fetched:
        fetch(client, conversion, output, fetched)
    output.result(Finished(conversion, report, fetched), _finished_text(conversion, report, fetched))
    return of_conversion(conversion)


def fetch(client: Client, conversion: Conversion, output: Output, folder: Path) -> None:
    """Download the output; Ctrl-C leaves a part that the same command completes."""
    try:
        with progress_view(output.notes) as view:
            client.download(conversion.output, folder, show=show_transfer(view, f"downloading to {folder}"))
    except KeyboardInterrupt:
        raise Interrupted(
            f"stopped, and {str(folder)!r} is not complete: the same command completes it",
            metadata={"conversion": conversion.name},
        ) from None


def candidate_folder(conversion: Conversion) -> Path:
    """The folder where the user names none: it carries every verdict but APPROVED in its name."""
    if conversion.verdict is None:
        state = conversion.state.value
        raise FailedPrecondition(f"{conversion.name} is {state}: only one that has SUCCEEDED has an output")
    identifier = conversion.name.rpartition("/")[2]
    return Path(identifier if conversion.verdict is Verdict.APPROVED else f"{identifier}-{conversion.verdict.value}")


def _finished_text(conversion: Conversion, report: ReportSummary | None, folder: Path | None) -> RenderableType:
    if report is None:
        return conversion_text(conversion)
    lines: list[RenderableType] = [report_text(report)]
    if conversion.reused_from:
        lines.append(printable(f"Every step was a cache hit: the figures are those of {conversion.reused_from}."))
    if folder and report.verdict is Verdict.APPROVED:
        lines.append(printable(f"{conversion.name} is in {folder}"))
    elif folder:
        lines.append(printable(f"The {report.verdict.value} candidate of {conversion.name} is in {folder}"))
    return Group(*lines)
