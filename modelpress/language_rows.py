"""Rows of a language model's dataset: texts, questions with choices, and prompts, every fault named with its line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelpress.datasets import dataset_rows, kind_of, text_of
from modelpress.errors import InvalidDataset
from modelpress.evaluations import LanguageEvaluation


@dataclass(frozen=True)
class Place:
    """Where a row stands: `index` counts the dataset's rows from 0, `name` is e.g. `data.jsonl, line 3`."""

    index: int
    name: str


@dataclass(frozen=True)
class Text:
    """A text whose tokens are predicted. It may be empty: it adds nothing."""

    place: Place
    text: str


@dataclass(frozen=True)
class Question:
    """A prompt with two or more choices, all different; `choices[answer]` is right."""

    place: Place
    prompt: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class Prompt:
    """A prompt that is continued."""

    place: Place
    prompt: str


@dataclass(frozen=True)
class LanguageRows:
    """The rows of each kind, in file order. There is at least one text that is not empty."""

    texts: tuple[Text, ...]
    questions: tuple[Question, ...]
    prompts: tuple[Prompt, ...]


def read_language_rows(folder: Path, evaluation: LanguageEvaluation) -> LanguageRows:
    """Read every row of the dataset; columns that the evaluation does not name are not looked at.

    Raises InvalidDataset naming file, line and column; and where no row has a text, which perplexity is measured on.
    """
    rows = [
        language_row(row, Place(index, where), evaluation) for index, (where, row) in enumerate(dataset_rows(folder))
    ]
    texts = tuple(row for row in rows if isinstance(row, Text))
    if not any(text.text for text in texts):
        raise InvalidDataset(
            f"the dataset has no text in column {evaluation.text_column!r}: perplexity and drift need texts",
            field=evaluation.text_column,
        )
    questions = tuple(row for row in rows if isinstance(row, Question))
    return LanguageRows(texts, questions, tuple(row for row in rows if isinstance(row, Prompt)))


def language_row(row: Mapping[str, Any], place: Place, evaluation: LanguageEvaluation) -> Text | Question | Prompt:
    """What one row is, by the columns that it has. Raises InvalidDataset naming place and column."""
    text, prompt = evaluation.text_column, evaluation.prompt_column
    asked = asked_columns(tuple(row), place.name, evaluation)
    if not asked:
        return Text(place, text_of(row, text, place.name))
    if asked == (prompt,):
        return Prompt(place, _prompt(row, prompt, place.name))
    choices = _choices(row, evaluation.choices_column, place.name)
    answer = _answer(row, evaluation.answer_column, place.name, count=len(choices))
    return Question(place, _prompt(row, prompt, place.name), choices, answer)


def asked_columns(columns: Sequence[str], where: str, evaluation: LanguageEvaluation) -> tuple[str, ...]:
    """Of a row with these columns: none where it is a text, the prompt's alone, or all three of a question.

    Raises InvalidDataset, naming `where` the row stands and a column, where it is none of these.
    """
    text, prompt = evaluation.text_column, evaluation.prompt_column
    question = (prompt, evaluation.choices_column, evaluation.answer_column)
    asked = tuple(name for name in question if name in columns)
    if text in columns and asked:
        raise InvalidDataset(
            f"{where}: columns {text!r} and {asked[0]!r} in one row: a row is a text, or has a prompt", field=asked[0]
        )
    if text not in columns and not asked:
        here = ", ".join(columns)[:200] or "none"
        raise InvalidDataset(f"{where}: no column {text!r} or {prompt!r}; columns here: {here}", field=text)
    missing = [name for name in question if name not in asked]
    if asked and asked != (prompt,) and missing:
        raise InvalidDataset(
            f"{where}: no column {missing[0]!r}, which a row with {asked[-1]!r} needs", field=missing[0]
        )
    return asked


def _prompt(row: Mapping[str, Any], column: str, where: str) -> str:
    prompt = text_of(row, column, where)
    if not prompt:
        raise InvalidDataset(f"{where}: column {column!r} is empty: a prompt has at least one character", field=column)
    return prompt


def _choices(row: Mapping[str, Any], column: str, where: str) -> tuple[str, ...]:
    value = row.get(column)
    if not isinstance(value, list) or len(value) < 2:
        found = f"a list of {len(value)}" if isinstance(value, list) else kind_of(value)
        raise InvalidDataset(
            f"{where}: column {column!r} holds {found}, expected a list of two or more texts", field=column
        )
    choices = tuple(text_of({column: choice}, column, where) for choice in value)
    empty = next((number for number, choice in enumerate(choices) if not choice), None)
    if empty is not None:
        raise InvalidDataset(f"{where}: choice {empty} (from 0) in column {column!r} is empty", field=column)
    if len(set(choices)) != len(choices):
        raise InvalidDataset(f"{where}: column {column!r} holds a choice twice: every choice is another", field=column)
    return choices


def _answer(row: Mapping[str, Any], column: str, where: str, *, count: int) -> int:
    value = row.get(column)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidDataset(
            f"{where}: column {column!r} holds {kind_of(value)}, expected the number of the right choice, from 0",
            field=column,
        )
    if not 0 <= value < count:
        raise InvalidDataset(
            f"{where}: column {column!r} holds {value}: the {count} choices are counted from 0", field=column
        )
    return value
