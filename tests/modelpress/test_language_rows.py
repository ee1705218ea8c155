"""Rows of a language model's dataset: what each is, and every fault with file, line and column."""

from __future__ import annotations

import json

import pytest

from modelpress.errors import InvalidDataset
from modelpress.evaluations import LanguageEvaluation
from modelpress.language_rows import Place, read_language_rows

QUESTION = {"prompt": "2 + 2 =", "choices": [" 4", " 5"], "answer": 0}


@pytest.fixture
def read(tmp_path):
    def read(*rows, **columns):
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")
        return read_language_rows(tmp_path, LanguageEvaluation(**columns))

    return read


def test_each_row_is_what_its_columns_say_and_knows_its_place(read):
    rows = read({"text": "one", "id": 7}, QUESTION, "", {"prompt": "go on"}, {"text": ""})
    assert [text.text for text in rows.texts] == ["one", ""]
    assert rows.questions[0].choices == (" 4", " 5")
    assert rows.questions[0].place == Place(1, "data.jsonl, line 2")
    assert rows.prompts[0].place == Place(2, "data.jsonl, line 4")


def test_columns_have_the_names_of_the_evaluation(read):
    question = {"q": "2 + 2 =", "endings": ["4", "5"], "gold": 1}
    rows = read(
        {"body": "x"}, question, text_column="body", prompt_column="q", choices_column="endings", answer_column="gold"
    )
    assert (rows.texts[0].text, rows.questions[0].answer) == ("x", 1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"body": "x"}, "line 2: no column 'text' or 'prompt'; columns here: body"),
        ({"text": "x", "prompt": "y"}, "line 2: columns 'text' and 'prompt' in one row"),
        ({"text": 3}, "line 2: column 'text' holds int, expected text"),
        ({"prompt": None}, "line 2: column 'prompt' holds null, expected text"),
        ({"prompt": ""}, "line 2: column 'prompt' is empty"),
        ({"choices": ["a", "b"], "answer": 0}, "line 2: no column 'prompt'"),
        ({**QUESTION, "choices": "ab"}, "line 2: column 'choices' holds str, expected a list"),
        ({**QUESTION, "choices": ["a"]}, "line 2: column 'choices' holds a list of 1"),
        ({**QUESTION, "choices": ["a", 1]}, "line 2: column 'choices' holds int, expected text"),
        ({**QUESTION, "choices": ["a", ""]}, r"line 2: choice 1 \(from 0\) in column 'choices' is empty"),
        ({**QUESTION, "choices": ["a", "a"]}, "line 2: column 'choices' holds a choice twice"),
        ({**QUESTION, "answer": 2}, "line 2: column 'answer' holds 2: the 2 choices are counted from 0"),
        ({**QUESTION, "answer": -1}, "line 2: column 'answer' holds -1"),
        ({**QUESTION, "answer": True}, "line 2: column 'answer' holds bool"),
        ({**QUESTION, "answer": "4"}, "line 2: column 'answer' holds str"),
        ({"prompt": "a", "choices": ["a", "b"]}, "line 2: no column 'answer', which a row with 'choices' needs"),
        ({"prompt": "a", "answer": 0}, "line 2: no column 'choices', which a row with 'answer' needs"),
        ("[1]", "line 2: expected a JSON object, found list"),
        ('{"text": "\\ud800"}', "line 2: column 'text' holds half a surrogate pair"),
    ],
)
def test_a_fault_names_file_line_and_column(read, row, message):
    with pytest.raises(InvalidDataset, match=f"data.jsonl, {message}"):
        read({"text": "fine"}, row)


@pytest.mark.parametrize("rows", [(QUESTION,), ({"prompt": "x"},), ({"text": ""}, QUESTION)])
def test_a_dataset_without_any_text_is_refused(read, rows):
    with pytest.raises(InvalidDataset, match="no text in column 'text'"):
        read(*rows)


def test_an_empty_dataset_is_refused(read):
    with pytest.raises(InvalidDataset, match="has no rows"):
        read()
