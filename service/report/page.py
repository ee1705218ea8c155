"""`report.html`: the report for people. One file, no scripts, nothing loaded from anywhere.

    html = render_page(report, recipe_yaml=recipe, policy_yaml=policy)

Equal reports give equal bytes. Everything that came from a request is escaped, and the page's own content security
policy allows its style sheet and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from modelpress import __version__
from modelpress.merge_changes import read_changes
from modelpress.output import APPROVAL_EXPLAINED
from modelpress.policies import Policy, read_policy
from modelpress.reports import Report
from service.report import language_rows, layer_rows, merge_rows, rows
from service.report.facts import fact_text, facts, operator_counts
from service.report.layer_pictures import stage_picture
from service.report.pictures import (
    change_picture,
    confusion_picture,
    curve_picture,
    kl_picture,
    latency_picture,
    size_picture,
)
from service.report.svg import short

SHOWN_CONTINUATIONS = 4
"""More of them are folded away."""
TEMPLATES = Path(__file__).parent / "templates"


def render_page(report: Report, *, recipe_yaml: str, policy_yaml: str) -> str:
    """The whole page. `policy_yaml` must be valid; it says which shape the speed-up is shown at."""
    environment = _environment()
    style = (TEMPLATES / "style.css").read_text(encoding="utf-8")
    return environment.get_template("report.html.j2").render(
        report=report,
        style=Markup(style),  # noqa: S704 - our own file
        style_hash=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        gates=rows.gate_rows(report.decision.gates),
        **_parts(report, read_policy(policy_yaml)),
        recipe_yaml=recipe_yaml,
        policy_yaml=policy_yaml,
        version=__version__,
        approval_explained=APPROVAL_EXPLAINED,
    )


def _parts(report: Report, policy: Policy) -> dict[str, Any]:
    return _merge_part(report) | _evaluation_part(report, policy) | _language_part(report, policy)


def _merge_part(report: Report) -> dict[str, Any]:
    """What the templates show of a merge; its key figures give way to those of an evaluation."""
    if report.merge is None:
        return {"merged_inputs": ()}
    stage = merge_rows.merge_stage(report)
    changes = read_changes(stage.touched, stage.details)
    kinds = merge_rows.tensor_kinds(changes)
    return {
        "key_figures": merge_rows.key_figures(report.merge, report.decision.gates),
        "merged_inputs": tuple(merge_rows.merged_inputs(report)),
        "merge_settings": {"method": stage.method, **merge_rows.settings(stage)},
        "tensors_added": changes.tensors_added,
        "tensors_dropped": stage.details.get("tensors_dropped", ()),
        "changes": change_picture(kinds) if kinds else "",
    }


def _evaluation_part(report: Report, policy: Policy) -> dict[str, Any]:
    evaluation, drift = report.evaluation, report.drift
    if evaluation is None or drift is None:
        return {}
    return {
        "key_figures": rows.key_figures(evaluation, report.decision.gates, policy),
        "comparisons": tuple(rows.comparisons(evaluation)),
        "pictures": {
            "baseline_confusion": confusion_picture(evaluation.baseline, "baseline"),
            "candidate_confusion": confusion_picture(evaluation.candidate, "candidate"),
            "size": size_picture(evaluation.footprint, _size_bound(policy)),
            "latency": latency_picture(evaluation.latency),
            "kl": kl_picture(drift.kl_histogram),
        },
    }


def _language_part(report: Report, policy: Policy) -> dict[str, Any]:
    language, drift = report.language, report.drift
    if language is None or drift is None:
        return {}
    return {
        "key_figures": language_rows.key_figures(language, drift, report.decision.gates),
        "comparisons": tuple(language_rows.comparisons(language)),
        "continuations": language_rows.continuations(language.generations),
        "shown_continuations": SHOWN_CONTINUATIONS,
        "pictures": {
            "size": size_picture(language.footprint, _size_bound(policy)),
            "kl": kl_picture(drift.kl_histogram, "token"),
        },
    }


def _size_bound(policy: Policy) -> float | None:
    return policy.gates.size.max_ratio if policy.gates.size else None


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        short=short,
        percent=rows.percent,
        size_text=rows.size_text,
        duration=_duration,
        facts=facts,
        fact_text=fact_text,
        operator_counts=operator_counts,
        curve=lambda stage: curve_picture(stage.curve, stage.method),
        stage_figures=rows.stage_figures,
        touched_groups=rows.touched_groups,
        visible=language_rows.visible,
        layer_summary=layer_rows.layer_summary,
        error_summary=layer_rows.error_summary,
        layer_rows=layer_rows.layer_rows,
        layer_picture=stage_picture,
    )
    return environment


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 90 else f"{seconds / 60:.1f} min"
