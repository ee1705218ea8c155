"""Do datasets fit the model and the evaluation? Judged from their facts alone, each misfit one sentence.

A partial fit is none: a dataset with one unknown label is refused whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from modelpress.datasets import LabelNames
from modelpress.errors import InvalidDataset
from modelpress.evaluations import Evaluation
from service.intake.columns import MAX_VALUES, overlap

Facts = Mapping[str, Any]


def check_texts(dataset: Facts, evaluation: Evaluation, *, field: str) -> None:
    """Every row has the text column, and text in it."""
    column = _column(dataset, evaluation.text_column, field, option="text_column")
    at, kind = column["not_text"]
    if at:
        refuse_dataset(f"{at}: column {evaluation.text_column!r} holds {kind}, expected text", field)


def check_labels(dataset: Facts, evaluation: Evaluation, labels: Sequence[str], *, field: str) -> tuple[str, ...]:
    """Every row has a label that the model knows; returns warnings on respelt labels and on a lone one."""
    name = evaluation.label_column
    column = _column(dataset, name, field, option="label_column")
    at, kind = column["not_label"]
    if at:
        refuse_dataset(f"{at}: column {name!r} holds {kind}, expected a label name", field)
    names = LabelNames(tuple(labels), evaluation.label_names)
    counts: dict[str, int] = {}
    warnings = []
    for value, rows, place in column["values"]:
        given, meant = _label(names, value, place, name, field)
        counts[meant] = counts.get(meant, 0) + rows
        if given != meant:
            warnings.append(f"{field}: label {given!r} is taken for the model's {meant!r}")
    if not column["values_complete"]:
        if len(labels) <= MAX_VALUES:
            refuse_dataset(f"column {name!r} holds more different values than the model's {len(labels)} labels", field)
        warnings.append(f"{field}: column {name!r} has too many labels to check before they are read")
    if len(counts) == 1:
        warnings.append(f"{field}: every row has the label {next(iter(counts))!r}: one class says little about quality")
    return tuple(warnings)


def overlap_warnings(evaluation: Facts, train: Facts, text_column: str) -> tuple[str, ...]:
    """A sentence where evaluation texts stand in the training data too: quality is then flattered."""
    found = overlap(evaluation["columns"][text_column], train["columns"][text_column])
    if not found.share:
        return ()
    about = "" if found.exact else "about "
    return (
        f"{about}{found.share:.1%} of the different evaluation texts stand in the training data too: "
        "what training saw says little about quality",
    )


def _label(names: LabelNames, value: str | int, place: str, column: str, field: str) -> tuple[str, str]:
    try:
        given = names.name(value, place, column)
        return given, names.of_model(given, place, column)
    except InvalidDataset as fault:
        refuse_dataset(fault.message, field)


def _column(dataset: Facts, name: str, field: str, *, option: str) -> Facts:
    columns: Mapping[str, Facts] = dataset["columns"]
    if name not in columns:
        here = ", ".join(columns)[:200]
        cure = f"write `{option}: NAME` into the evaluation document (`--evaluation`)"
        refuse_dataset(f"no column {name!r}; columns here: {here}: {cure}", field)
    if columns[name]["missing_at"]:
        refuse_dataset(f"{columns[name]['missing_at']}: no column {name!r}, which other rows have", field)
    return columns[name]


def refuse_dataset(what: str, field: str) -> NoReturn:
    """Refuse the dataset of a field for what is wrong in it."""
    raise InvalidDataset(f"{field}: {what}", field=field)
