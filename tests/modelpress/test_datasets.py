"""A dataset is read whole and by name, or refused with the file, line and column at fault."""

from __future__ import annotations

import json

import pytest

from modelpress.datasets import MAX_LINE_CHARACTERS, LabelledTexts, read_labelled_texts, read_texts
from modelpress.errors import InvalidDataset

ROWS = [{"text": "one", "label": "yes"}, {"text": "two", "label": "no"}]


def _write(folder, content: bytes | str, name: str = "data.jsonl"):
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def _lines(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _read(folder, known=("no", "yes"), label_names=()):
    return read_labelled_texts(
        folder, text_column="text", label_column="label", known_labels=known, label_names=label_names
    )


def test_rows_keep_the_order_of_files_and_lines(tmp_path):
    _write(tmp_path, _lines(ROWS), "b.jsonl")
    _write(tmp_path, _lines([{"text": "zero", "label": "no"}]), "a/x.jsonl")
    assert _read(tmp_path) == LabelledTexts(("zero", "one", "two"), ("no", "yes", "no"))


def test_a_jsonl_file_is_one_in_any_case_and_a_folder_of_that_name_is_none(tmp_path):
    _write(tmp_path, _lines(ROWS[:1]), "part.jsonl/A.JSONL")
    _write(tmp_path, _lines(ROWS[1:]), "z.Jsonl")
    assert _read(tmp_path).texts == ("one", "two")


def test_a_byte_order_mark_crlf_and_blank_lines_change_nothing(tmp_path):
    text = "\ufeff" + "".join(json.dumps(row) + "\r\n\r\n" for row in ROWS)
    assert _read(_write(tmp_path, text)) == LabelledTexts(("one", "two"), ("yes", "no"))


def test_line_separators_inside_a_text_do_not_end_the_line(tmp_path):
    row = json.dumps({"text": "a\u2028b\x85c", "label": "no"}, ensure_ascii=False)
    assert _read(_write(tmp_path, row)).texts == ("a\u2028b\x85c",)


def test_integer_labels_are_named_by_the_dataset_not_by_the_model(tmp_path):
    _write(tmp_path, _lines([{"text": "x", "label": 0}, {"text": "y", "label": 1}]))
    assert _read(tmp_path, known=("no", "yes"), label_names=("yes", "no")).labels == ("yes", "no")


def test_a_label_that_differs_in_case_alone_is_the_models_and_said_so(tmp_path):
    _write(tmp_path, _lines([{"text": "x", "label": "Yes"}, {"text": "y", "label": "no"}]))
    data = _read(tmp_path, known=("NO", "yes"))
    assert data.labels == ("yes", "NO")
    assert data.warnings == ("label 'Yes' was taken for the model's 'yes'", "label 'no' was taken for the model's 'NO'")


def test_case_decides_where_the_model_has_both(tmp_path):
    _write(tmp_path, _lines([{"text": "x", "label": "a"}]))
    assert _read(tmp_path, known=("A", "a")).labels == ("a",)
    _write(tmp_path, _lines([{"text": "x", "label": "É"}]))
    with pytest.raises(InvalidDataset, match="unknown"):
        _read(tmp_path, known=("A", "a"))


def test_texts_are_read_without_looking_at_labels(tmp_path):
    _write(tmp_path, _lines([{"text": "x", "label": None}, {"text": ""}]))
    assert read_texts(tmp_path, text_column="text") == LabelledTexts(("x", ""), ())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "w"}', ["line 2", "'label'", "text"]),
        ('{"text": null, "label": "no"}', ["line 2", "'text'", "null"]),
        ('{"text": 3, "label": "no"}', ["line 2", "'text'", "int"]),
        ('{"text": "w", "label": "unsure"}', ["line 2", "'unsure'", "no, yes"]),
        ('{"text": "w", "label": 3}', ["line 2", "3", "label_names"]),
        ('{"text": "w", "label": true}', ["line 2", "bool"]),
        ('{"text": "w", "label": NaN}', ["line 2", "float"]),
        ('{"text": "w", "label": ', ["line 2", "JSON"]),
        ('{"text": "w", "text": "v", "label": "no"}', ["line 2", "once"]),
        ('["w", "no"]', ["line 2", "list"]),
        ("[" * 100_000, ["line 2", "JSON"]),
        ('{"text": "\\ud800", "label": "no"}', ["line 2", "surrogate"]),
        ('{"text": "' + "x" * MAX_LINE_CHARACTERS + '"}', ["line 2", "characters"]),
    ],
)
def test_a_fault_names_its_line_and_column(tmp_path, line, words):
    _write(tmp_path, json.dumps(ROWS[0]) + "\n" + line + "\n")
    with pytest.raises(InvalidDataset) as caught:
        _read(tmp_path)
    assert all(word in caught.value.message for word in ["data.jsonl", *words]), caught.value.message


@pytest.mark.parametrize("label", [-1, 2])
def test_an_integer_label_without_a_name_is_refused(tmp_path, label):
    _write(tmp_path, _lines([{"text": "x", "label": label}]))
    with pytest.raises(InvalidDataset, match=f"label {label} has no name"):
        _read(tmp_path, label_names=("no", "yes"))


def test_an_empty_dataset_is_refused(tmp_path):
    with pytest.raises(InvalidDataset, match=r"no \.jsonl file"):
        _read(tmp_path)
    with pytest.raises(InvalidDataset, match="empty"):
        _read(_write(tmp_path, "\n\n"))


def test_bytes_that_are_not_utf8_are_refused(tmp_path):
    with pytest.raises(InvalidDataset, match="UTF-8"):
        _read(_write(tmp_path, b'{"text": "\xff"}\n'))


def test_every_text_has_a_label_or_none_has():
    with pytest.raises(InvalidDataset, match="2 texts have 1 labels"):
        LabelledTexts(("a", "b"), ("x",))
