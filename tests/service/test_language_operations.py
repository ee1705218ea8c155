"""What operations on language models are given: a work place with the calibration, and warnings of overlap."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compressors.stages import SilentMonitor
from modelpress.digests import digest_bytes
from modelpress.errors import DataLoss
from service.steps import Step
from service.storage.store import ContentStore
from service.storage.stored_folders import StoredFolder, StoreSink
from service.workers.language_operations import LANGUAGE_OPERATIONS, seen_text_warnings, work_place
from service.workers.operations import OPERATIONS
from service.workers.protocol import Task
from tests.compressors.decoders import make_texts

TRAIN = digest_bytes(b"train")
FILES = {"config.json": b"{}", "tokenizer.json": b"t" * 3, "sub/chat.jinja": b"c", "model.safetensors": b"weights"}


@pytest.fixture
def task(tmp_path: Path) -> Task:
    """A step with a stored model and training texts."""
    for name, data in FILES.items():
        (tmp_path / "model" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / name).write_bytes(data)
    for name in ("work", "output", "evidence"):
        (tmp_path / name).mkdir()
    store = ContentStore(str(tmp_path / "store"), scratch=tmp_path)
    model = StoredFolder(store.put_folder(tmp_path / "model"), store)
    arguments = {"columns": {"text_column": "text"}}
    return Task(
        step=Step("compress/1-quantize_weights", "compress/quantize_weights", arguments, {"train": TRAIN}, seed=3),
        folder=tmp_path / "work",
        inputs={"train": make_texts(tmp_path / "train", rows=2, seed=0)},
        stored={"model": model},
        output=tmp_path / "output",
        sink=StoreSink(store),
        evidence=tmp_path / "evidence",
        device="cpu",
        threads=1,
        memory_limit_bytes=1 << 30,
        monitor=SilentMonitor(),
    )


def test_a_stage_computes_in_empty_space_with_the_tokenizer_and_without_the_weights(task, tmp_path):
    work = work_place(task)
    assert (list(work.scratch.iterdir()), work.device, work.threads) == ([], "cpu", 1)
    calibration = work.calibration
    assert (calibration.dataset, calibration.text_column) == (tmp_path / "train", "text")
    assert calibration.digest == str(TRAIN)
    companions = {name: data for name, data in FILES.items() if not name.endswith(".safetensors")}
    files = [path for path in calibration.tokenizer.rglob("*") if path.is_file()]
    assert {path.relative_to(calibration.tokenizer).as_posix(): path.read_bytes() for path in files} == companions


def test_a_stage_without_training_texts_has_no_calibration(task):
    untrained = Task(**{**vars(task), "inputs": {}})
    assert work_place(untrained).calibration is None


def test_a_tokenizer_that_is_damaged_in_the_store_is_refused(task, tmp_path):
    digest = task.stored["model"].files["tokenizer.json"].digest
    [blob] = [path for path in (tmp_path / "store").rglob(digest.hex) if path.is_file()]
    blob.chmod(0o600)
    blob.write_bytes(b"xxx")
    with pytest.raises(DataLoss):
        work_place(task)


def test_every_operation_on_language_models_is_one_of_the_workers():
    assert {name: OPERATIONS[name] for name in LANGUAGE_OPERATIONS} == dict(LANGUAGE_OPERATIONS)


def test_evaluation_texts_that_calibration_saw_are_warned_about(tmp_path):
    for name, rows in {
        "train": [{"body": "a"}, {"body": "b"}, {"body": "c", "text": "d"}],
        "evaluation": [{"body": "a"}, {"body": "a"}, {"body": "x"}, {"prompt": "b"}, {"text": "d", "body": "y"}],
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    [warning] = seen_text_warnings(tmp_path / "train", tmp_path / "evaluation", column="body")
    assert warning.startswith("1 of the 3 different evaluation texts stand in the training dataset too")
    assert (
        list(seen_text_warnings(tmp_path / "train", make_texts(tmp_path / "other", rows=2, seed=0), column="text"))
        == []
    )
