"""Conversions, gates and figures as tables and lines for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from modelpress.cli.output import printable
from modelpress.reports import Outcome, Verdict
from modelpress.views import Conversion, Gate, ReportSummary

VERDICT_STYLES: Mapping[Verdict, str] = {
    Verdict.APPROVED: "bold green",
    Verdict.REJECTED: "bold white on red",
    Verdict.INCONCLUSIVE: "bold black on yellow",
}
VERDICT_MEANINGS: Mapping[Verdict, str] = {
    Verdict.APPROVED: "every gate of the policy passed",
    Verdict.REJECTED: "at least one gate failed: do not ship this candidate",
    Verdict.INCONCLUSIVE: "the data cannot tell whether every gate holds: do not ship this candidate",
}
OUTCOME_STYLES: Mapping[Outcome, str] = {
    Outcome.PASSED: "green",
    Outcome.FAILED: "red",
    Outcome.INCONCLUSIVE: "yellow",
}


def verdict_line(verdict: Verdict) -> Text:
    return Text.assemble((f" {verdict.value} ", VERDICT_STYLES[verdict]), f"  {VERDICT_MEANINGS[verdict]}")


def report_text(report: ReportSummary) -> RenderableType:
    """The verdict, the gates, and a sentence for each that did not pass."""
    sentences = [
        printable(f"{gate.name}: {gate.sentence}") for gate in report.gates if gate.outcome is not Outcome.PASSED
    ]
    return Group(verdict_line(report.verdict), gates_table(report.gates), *sentences)


def gates_table(gates: Iterable[Gate]) -> Table:
    table = table_with("gate", "outcome", "figure", "bound", "interval")
    for gate in gates:
        table.add_row(
            printable(gate.name),
            Text(gate.outcome.value, style=OUTCOME_STYLES[gate.outcome]),
            figure(gate.figure, gate.unit),
            f"{gate.comparison} {figure(gate.bound, gate.unit)}",
            _interval(gate),
        )
    return table


def _interval(gate: Gate) -> str:
    if gate.interval_low is None or gate.interval_high is None:
        return ""
    low, high = figure(gate.interval_low, gate.unit), figure(gate.interval_high, gate.unit)
    return f"{low} to {high}" + (f" ({gate.confidence:.0%})" if gate.confidence is not None else "")


def figure(value: float | None, unit: str) -> str:
    """A figure with its unit as people read it; fractions as percent."""
    if value is None:
        return "not measured"
    if unit == "fraction":
        percent = value * 100
        return f"{percent:.2f} %" if not percent or abs(percent) >= 0.01 else f"{percent:.2g} %"
    return f"{value:.4g}x" if unit == "ratio" else f"{value:.3g} {unit}"


def conversions_table(conversions: Iterable[Conversion]) -> Table:
    table = table_with("name", "state", "verdict", "created", "by", "labels")
    for conversion in conversions:
        table.add_row(
            conversion.name,
            conversion.state.value,
            conversion.verdict.value if conversion.verdict else "",
            moment(conversion.create_time),
            printable(conversion.requested_by),
            printable(" ".join(f"{key}={value}" for key, value in sorted(conversion.labels.items()))),
        )
    return table


def conversion_text(conversion: Conversion) -> RenderableType:
    facts: dict[str, Any] = {
        "name": conversion.name,
        "state": conversion.state.value,
        "verdict": conversion.verdict.value if conversion.verdict else None,
        "output": conversion.output,
        "reused from": conversion.reused_from,
        "step": conversion.progress.step if conversion.progress else None,
        "attempt": conversion.attempt,
        "requested by": conversion.requested_by,
        "created": moment(conversion.create_time),
        "started": moment(conversion.start_time),
        "ended": moment(conversion.end_time),
        "labels": " ".join(f"{key}={value}" for key, value in sorted(conversion.labels.items())),
    }
    failure = conversion.failure
    if failure:
        facts |= {"failure": f"{failure.kind.value} ({failure.reason}) at {failure.step or 'no step'}"}
        facts |= {"message": failure.message, "what next": failure.next_action}
    return facts_text(facts)


def facts_text(facts: Mapping[str, Any]) -> Text:
    """Name and value, one per line; what is empty is left out."""
    shown = {name: _plain(value) for name, value in facts.items() if value not in (None, "", [], {})}
    width = max(map(len, shown), default=0)
    return printable("\n".join(f"{name:<{width}}  {value}" for name, value in shown.items()))


def table_with(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def moment(time: datetime | None) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S} UTC" if time else ""


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
