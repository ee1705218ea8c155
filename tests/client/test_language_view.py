"""The figures of a language model as people read them."""

import io
from typing import Any

from rich.console import Console

from modelpress.cli.language_view import language_table


def metric(value: float | None, unit: str) -> dict[str, Any]:
    return {"name": "m", "value": value, "unit": unit, "n": 10}


LANGUAGE: dict[str, Any] = {
    "baseline_perplexity": metric(20.2234, "ratio"),
    "candidate_perplexity": metric(24.5, "ratio"),
    "perplexity_ratio": metric(1.2115, "ratio"),
    "token_kl": metric(0.307, "nats"),
    "top1_agreement": metric(0.713, "fraction"),
    "footprint": {"baseline_bytes": 4_000_000, "candidate_bytes": 1_000_000},
    "choices": None,
}


def shown(language: dict[str, Any]) -> list[list[str]]:
    text = io.StringIO()
    table = language_table({"language": language})
    assert table is not None
    Console(file=text, width=120, color_system=None).print(table)
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.getvalue().splitlines()]


def test_both_models_stand_side_by_side():
    lines = shown(LANGUAGE)
    assert ["perplexity", "20.22", "24.5", "1.212x"] in lines
    assert ["KL divergence per token", "0.307 nats"] in lines
    assert ["same most likely token", "71.30 %"] in lines
    assert ["weights", "4.0 MB", "1.0 MB", "0.25x"] in lines
    assert not any("questions" in cell for line in lines for cell in line)


def test_questions_are_shown_where_there_were_some():
    choices = {"baseline_accuracy": metric(0.9, "fraction"), "candidate_accuracy": metric(0.8, "fraction")}
    lines = shown(LANGUAGE | {"choices": choices | {"accuracy_drop": metric(0.1, "fraction")}})
    assert ["questions answered right", "90.00 %", "80.00 %", "10.00 %"] in lines


def test_a_figure_that_could_not_be_computed_says_so():
    assert ["perplexity", "20.22", "not measured", "not measured"] in shown(
        LANGUAGE | {"candidate_perplexity": metric(None, "ratio"), "perplexity_ratio": metric(None, "ratio")}
    )


def test_other_models_have_no_such_figures():
    assert language_table({"language": None}) is None
    assert language_table({}) is None
