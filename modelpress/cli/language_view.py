"""What a report says of a language model, baseline and candidate side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from modelpress.cli.progress_view import size
from modelpress.cli.tables import figure, table_with

Row = tuple[str, str, str, str]
ROLES = ("baseline", "candidate")


def language_table(report: Mapping[str, Any]) -> Table | None:
    """The figures of report.json's `language`; None for another model."""
    language = report.get("language")
    if not language:
        return None
    table = table_with("figure", "baseline", "candidate", "difference")
    for row in _rows(language):
        table.add_row(*row)
    return table


def _rows(language: Mapping[str, Any]) -> Iterator[Row]:
    baseline, candidate = (_number(language[f"{role}_perplexity"]) for role in ROLES)
    yield "perplexity", baseline, candidate, _metric(language["perplexity_ratio"])
    yield "KL divergence per token", "", "", _metric(language["token_kl"])
    yield "same most likely token", "", "", _metric(language["top1_agreement"])
    if choices := language.get("choices"):
        baseline, candidate = (_metric(choices[f"{role}_accuracy"]) for role in ROLES)
        yield "questions answered right", baseline, candidate, _metric(choices["accuracy_drop"])
    before, after = (language["footprint"][f"{role}_bytes"] for role in ROLES)
    yield "weights", size(before), size(after), figure(after / before, "ratio")


def _metric(metric: Mapping[str, Any]) -> str:
    return figure(metric["value"], metric["unit"])


def _number(metric: Mapping[str, Any]) -> str:
    return "not measured" if metric["value"] is None else f"{metric['value']:.4g}"
