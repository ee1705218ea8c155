"""A document that people wrote is read into a frozen type, or refused in one sentence that names the field."""

from __future__ import annotations

import pytest
from pydantic import Field, ValidationError

from modelpress.documents import MAX_DEPTH, MAX_DOCUMENT_BYTES, MAX_NODES, Document, read_document, read_value
from modelpress.errors import InvalidPolicy, InvalidRequest


class Inner(Document):
    ratio: float = Field(default=0.5, gt=0, lt=1)
    count: int = 3
    flag: bool = False


class Outer(Document):
    name: str
    inner: Inner = Inner()
    several: tuple[Inner, ...] = Field(default=(), max_length=2)


def refuse(text: str) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        read_document(Outer, text, InvalidRequest)
    return caught.value


def test_yaml_and_json_give_the_same_frozen_value() -> None:
    from_yaml = read_document(Outer, "name: x\ninner:\n  ratio: 1e-1\n", InvalidRequest)
    assert from_yaml == read_document(Outer, '{"name": "x", "inner": {"ratio": 0.1}}', InvalidRequest)
    with pytest.raises(ValidationError, match="frozen"):
        from_yaml.name = "y"  # type: ignore[misc]


RATIO = "inner.ratoi: unknown field; did you mean 'ratio'? allowed here: ratio, count, flag"
COUNT = "several[1].count: must be a valid integer, unable to parse string as an integer, found 'x'"
PYTHON = (
    "not valid YAML (line 1, column 7): could not determine a constructor for the tag "
    "'tag:yaml.org,2002:python/name:os.system'"
)
LONG = "not valid YAML (line 1, column 7): a number has 65 characters: at most 64 are allowed"


@pytest.mark.parametrize(
    ("text", "field", "sentence"),
    [
        ("inner: {}", "name", "name: this field is required"),
        ("nam: x", "nam", "nam: unknown field; did you mean 'name'? allowed here: name, inner, several"),
        ("name: x\ninner: {ratoi: 1}", "inner.ratoi", RATIO),
        ("name: x\ninner: {ratio: 1}", "inner.ratio", "inner.ratio: must be less than 1, found '1'"),
        ("name: x\ninner: {ratio: .nan}", "inner.ratio", "inner.ratio: must be a finite number, found 'nan'"),
        ("name: x\ninner: {count: yes}", "inner.count", "inner.count: must be a number, found true"),
        ("name: x\ninner: 3", "inner", "inner: expected a mapping, found int"),
        ("name: x\nseveral: 3", "several", "several: expected a list, found int"),
        ("name: x\nseveral: [{}, {count: x}]", "several[1].count", COUNT),
        ("name: x\nseveral: [{}, {}, {}]", "several", "several: needs at most 2 entries, found 3"),
        ("- x", "", "expected a mapping with the fields name, inner, several, found list"),
        ("", "", "expected a mapping with the fields name, inner, several, found nothing"),
        ("name: x\nname: y", "", "not valid YAML (line 2, column 1): key 'name' is given twice"),
        ("name: 'x", "", "not valid YAML (line 1, column 9): found unexpected end of stream"),
        ("name: !!python/name:os.system", "", PYTHON),
        (f"name: {'9' * 65}", "", LONG),
    ],
)
def test_each_fault_is_one_sentence_with_the_fields_path(text: str, field: str, sentence: str) -> None:
    error = refuse(text)
    assert (error.field, error.message) == (field, sentence)


@pytest.mark.parametrize(
    "text",
    [
        "name: " + "x" * MAX_DOCUMENT_BYTES,
        "name: x\nseveral: [" + "{}, " * MAX_NODES + "]",
        "name: " + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
        "[" * 100_000,
        "a: &a [x, x, x]\nb: &b [*a, *a, *a]\nname: *b",
        "name: &a [*a]",
        "name: \x00",
        "name: \ud800",
        "name: 2026-99-99",
        "? [a]\n: 1",
        "name: 0x" + "f" * 6000,
        "name: 1" + ":1" * 100_000,
        "name: 1" + ":1" * 100_000 + ".5",
    ],
)
def test_what_would_cost_too_much_or_is_no_text_is_refused(text: str) -> None:
    assert len(refuse(text).message) < 400


def test_a_key_that_is_no_plain_name_is_quoted() -> None:
    assert refuse('"a\\e[31m": 1').message.startswith(r"'a\x1b[31m': unknown field")


def test_the_error_is_of_the_type_asked_for() -> None:
    with pytest.raises(InvalidPolicy):
        read_value(Outer, {"name": 3}, InvalidPolicy)
