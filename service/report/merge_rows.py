"""What the report page says of a merge: what went in, how, and how far the result is from base plus adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelpress.merge_changes import Changes
from modelpress.merge_recipes import NO_REFERENCE
from modelpress.merge_reports import MergeReport
from modelpress.recipes import MERGES
from modelpress.reports import GateResult, Report, StageRecord
from service.report.pictures import TensorKind
from service.report.rows import NO_GATE, TITLES, KeyFigure, name_pattern, outcomes
from service.report.svg import short

MERGED_KINDS = ("adapter", "model")
SETTINGS_APART = ("method", "adapters", "models")


@dataclass(frozen=True)
class Merged:
    """One adapter or model that went in, as the command line gives it. `facts`: what the stage noted of it."""

    kind: str
    name: str
    weight: str
    facts: Mapping[str, Any]


def merge_stage(report: Report) -> StageRecord:
    """The stage that merged: a report with a merge has exactly one."""
    return next(stage for stage in report.stages if stage.method in MERGES)


def merged_inputs(report: Report) -> Iterator[Merged]:
    """In the order of the request; a weight stands as it was given, unrounded."""
    details = merge_stage(report).details
    noted = {entry["name"]: entry for kind in MERGED_KINDS for entry in details.get(f"{kind}s", ())}
    for entry in report.inputs:
        kind, _, name = entry.role.partition(" ")
        if kind in MERGED_KINDS:
            facts = {key: value for key, value in noted.get(name, {}).items() if key not in ("name", "weight")}
            yield Merged(kind, name, str(entry.weight), facts)


def settings(stage: StageRecord) -> dict[str, Any]:
    """The arguments that say how it was merged, without what was left open or is used by TIES only."""
    how = stage.arguments.get("combination_type") or stage.arguments.get("merge_method", "")
    apart = SETTINGS_APART if "ties" in how else (*SETTINGS_APART, "majority_sign_method")
    given = {name: value for name, value in stage.arguments.items() if name not in apart}
    return {name: value for name, value in given.items() if value not in (None, [], False)}


def tensor_kinds(changes: Changes) -> list[TensorKind]:
    """Changed tensors by kind, the kind with the furthest moved tensor first."""
    kinds: dict[str, list[float]] = {}
    for name, change in changes.relative_change.items():
        kinds.setdefault(name_pattern(name), []).append(change)
    found = [TensorKind(pattern, tuple(values)) for pattern, values in kinds.items()]
    return sorted(found, key=lambda kind: (-max(kind.changes), kind.pattern))


def key_figures(merge: MergeReport, gates: Sequence[GateResult]) -> tuple[KeyFigure, ...]:
    """The three figures of a conversion that only merges."""
    judged = outcomes(gates)
    figures = {
        "merge_difference": (merge.layer_difference, _layer_details(merge)),
        "merge_logits": (merge.logits.relative_difference if merge.logits else None, _logit_details(merge)),
        "merge_change": (
            merge.largest_change,
            ("of the tensor's norm", f"{merge.changed:,} changed, {merge.byte_identical:,} byte-identical"),
        ),
    }
    return tuple(
        KeyFigure(TITLES[name], "not measured" if figure is None else short(figure), details, judged.get(name, NO_GATE))
        for name, (figure, details) in figures.items()
    )


def _layer_details(merge: MergeReport) -> tuple[str, ...]:
    if merge.layer_difference is None:
        return (f"{merge.layers:,} layers compared" if merge.reference else NO_REFERENCE,)
    return ("of the output's norm", f"largest of {merge.layers:,} layers, against {merge.reference}")


def _logit_details(merge: MergeReport) -> tuple[str, ...]:
    if merge.logits is None:
        return (merge.logits_missing,)
    return ("of the largest logit", f"{merge.logits.n:,} positions, against {merge.reference}")
