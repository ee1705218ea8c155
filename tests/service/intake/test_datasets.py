"""A dataset's facts say of every column where it is missing or odd and which values it holds, for every row."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from modelpress.datasets import read_texts
from modelpress.errors import InvalidDataset
from modelpress.evaluations import Evaluation
from modelpress.manifests import ArtifactKind
from service.fit import check_labels, check_texts
from service.intake.columns import FEW_VALUES, MAX_COLUMNS, MAX_VALUES, SKETCH_SIZE, Sketch, overlap
from tests.service.intake.tiny import Inspect, encode, jsonl

DATASET = ArtifactKind.DATASET


def refuse(inspect: Inspect, content: bytes) -> str:
    with pytest.raises(InvalidDataset) as caught:
        inspect(DATASET, {"test.jsonl": content})
    return caught.value.message


def test_every_row_of_every_file_is_counted_whatever_its_line_ends(inspect: Inspect) -> None:
    rows = [{"text": f"t{i}", "label": "no" if i % 3 else "yes"} for i in range(9)]
    odd = b"\xef\xbb\xbf" + b"\r\n\r\n".join(encode(row) for row in rows)
    facts = inspect(DATASET, {"a.jsonl": odd, "sub/b.JSONL": jsonl(*rows), "README.md": b"hello"})
    assert facts["rows"] == 18
    assert facts["columns"]["label"]["values"] == [["yes", 6, "a.jsonl, line 1"], ["no", 12, "a.jsonl, line 3"]]
    assert facts["warnings"] == ["README.md is no .jsonl file: not read"]


def test_the_first_place_of_each_oddity_is_kept(inspect: Inspect) -> None:
    rows: list[dict[str, Any]] = [{"text": "a"}, {"text": "b", "label": 1}, {"text": None, "label": 2}, {"label": None}]
    columns = inspect(DATASET, {"test.jsonl": jsonl(*rows)})["columns"]
    assert columns["label"]["missing_at"] == "test.jsonl, line 1"
    assert columns["label"]["not_label"] == ["test.jsonl, line 4", "null"]
    assert columns["label"]["values"] == [[1, 1, "test.jsonl, line 2"], [2, 1, "test.jsonl, line 3"]]
    assert columns["text"]["not_text"] == ["test.jsonl, line 3", "null"]
    assert columns["text"]["missing_at"] == "test.jsonl, line 4"


@pytest.mark.parametrize(
    ("content", "mentions"),
    [
        (b"", "empty"),
        (b"\n \n", "empty"),
        (b'{"a": 1}\n[1]\n', "line 2"),
        (b'{"a": 1}\n{"a": \n', "line 2"),
        (b'{"a": 1, "a": 2}\n', "line 1"),
        (b"[" * 100_000, "line 1"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\ud800": "a"}', "surrogate"),
        (encode({f"c{i}": i for i in range(MAX_COLUMNS + 1)}), "columns"),
        (encode({"c" * 300: 1}), "name"),
        (b'{"a": "' + b"x" * 1_000_001 + b'"}', "characters"),
        (b"x" * 9_000_000, "characters"),
    ],
)
def test_a_file_that_holds_no_rows_of_text_is_refused(inspect: Inspect, content: bytes, mentions: str) -> None:
    assert mentions in refuse(inspect, content)


@pytest.mark.parametrize("path", ["data.csv", "data.json", "data.parquet"])
def test_a_folder_without_json_lines_is_refused(inspect: Inspect, path: str) -> None:
    with pytest.raises(InvalidDataset, match=r"no \.jsonl file"):
        inspect(DATASET, {path: b"x"})


@pytest.mark.parametrize("path", ["load.py", "rows.pkl"])
def test_code_and_pickles_are_refused(inspect: Inspect, path: str) -> None:
    with pytest.raises(InvalidDataset, match=path):
        inspect(DATASET, {"a.jsonl": jsonl({"text": "a"}), path: b""})


def test_a_column_of_another_name_is_answered_with_the_setting_that_names_it(inspect: Inspect) -> None:
    facts = inspect(DATASET, {"a.jsonl": jsonl({"sentence": "a", "target": "x"}, {"sentence": "b", "target": 1})})
    with pytest.raises(InvalidDataset) as text:
        check_texts(facts, Evaluation(), field="inputs.evaluation")
    with pytest.raises(InvalidDataset, match="write `label_column: NAME` into the evaluation document"):
        check_labels(facts, Evaluation(text_column="sentence"), ["x"], field="inputs.evaluation")
    with pytest.raises(InvalidDataset, match=r"line 2: label 1 is a number: .*`label_names: .*`--evaluation`"):
        check_labels(facts, Evaluation(label_column="target"), ["x"], field="inputs.evaluation")
    assert text.value.message == (
        "inputs.evaluation: no column 'text'; columns here: sentence, target: "
        "write `text_column: NAME` into the evaluation document (`--evaluation`)"
    )


def rows_for_the_worker(folder: Path) -> int | None:
    try:
        return len(read_texts(folder, text_column="text"))
    except InvalidDataset:
        return None


def rows_for_intake(inspect: Inspect, content: bytes) -> int | None:
    try:
        facts = inspect(DATASET, {"a.jsonl": content})
        check_texts(facts, Evaluation(), field="inputs.train")
        return int(facts["rows"])
    except InvalidDataset:
        return None


def test_intake_and_the_workers_reader_accept_the_same_bytes(inspect: Inspect, tmp_path: Path) -> None:
    generator = random.Random(0)
    good = jsonl(*({"text": f"é{i}"} for i in range(6)))
    accepted = 0
    for trial in range(200):
        content = bytearray(good)
        content[generator.randrange(len(content))] = generator.choice(b'0 \n"{\xff')
        folder = tmp_path / str(trial)
        folder.mkdir()
        (folder / "a.jsonl").write_bytes(content)
        rows = rows_for_the_worker(folder)
        assert rows_for_intake(inspect, bytes(content)) == rows
        accepted += rows is not None
    assert 20 < accepted < 180


def test_a_column_of_many_values_keeps_a_few(inspect: Inspect) -> None:
    rows = jsonl(*({"text": f"t{i}"} for i in range(MAX_VALUES + 1)))
    column = inspect(DATASET, {"a.jsonl": rows})["columns"]["text"]
    assert not column["values_complete"]
    assert len(column["values"]) == FEW_VALUES


def sketch(first: int, last: int) -> dict[str, Any]:
    found = Sketch()
    for i in range(first, last):
        found.add(str(i).encode())
    return found.facts()


def test_overlap_is_exact_up_to_the_sketch_and_close_beyond() -> None:
    small = overlap(sketch(0, 1000), sketch(750, 9000))
    assert (small.share, small.exact) == (0.25, True)
    assert overlap(sketch(0, 10), sketch(10, 20)).share == 0
    large = overlap(sketch(0, 40_000), sketch(30_000, 90_000))
    assert not large.exact
    assert large.share == pytest.approx(0.25, abs=0.03)
    few_in_many = overlap(sketch(0, 2000), sketch(1000, 3 * SKETCH_SIZE))
    assert few_in_many.share == pytest.approx(0.5, abs=0.08)


def test_a_sketch_depends_on_the_texts_alone_not_on_their_order_or_number() -> None:
    texts = [str(i % 70_000).encode() for i in range(140_000)]
    one, other = Sketch(), Sketch()
    for text in texts:
        one.add(text)
    for text in sorted(set(texts)):
        other.add(text)
    assert one.facts() == other.facts()
