"""Windows of calibration tokens: the texts' tokens in their order, cut; a seeded choice where there are more."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from compressors.calibration import CalibrationWindows, check_vocabulary, choose, read_windows
from compressors.stages import Calibration
from modelpress.errors import InvalidDataset, InvalidModel
from modelpress.quantization_recipes import QuantizeWeights
from tests.compressors.decoders import SPECIAL, WORDS, write_tokenizer

TOKENS = 16


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


def read(texts: list[str], root: Path, tokenizer: Path, *, samples: int = 64, seed: int = 0) -> CalibrationWindows:
    folder = root / "texts"
    folder.mkdir(parents=True)
    (folder / "a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    calibration = Calibration(folder, "sha256:abc", "body", tokenizer)
    arguments = QuantizeWeights(sequence_length=TOKENS, calibration_samples=samples)
    return read_windows(calibration, arguments, seed=seed)


def test_windows_are_the_texts_tokens_one_text_after_the_other(tmp_path: Path, tokenizer: Path):
    words = [WORDS[index % len(WORDS)] for index in range(37)]
    texts = [" ".join(part) for part in (words[:5], words[5:30], [], words[30:])]
    windows = read(texts, tmp_path, tokenizer, samples=2)
    expected = [len(SPECIAL) + index for index in range(32)]
    assert windows.ids_NT.tolist() == [expected[:16], expected[16:]]
    assert (windows.available, windows.warnings) == (2, ())
    assert windows.facts["tokens"] == 32


def test_too_few_windows_are_all_read_and_warned_about(tmp_path: Path, tokenizer: Path):
    windows = read([" ".join(WORDS[:40])], tmp_path, tokenizer, samples=8)
    assert len(windows.ids_NT) == 2
    (warning,) = windows.warnings
    assert "fill 2 windows of 16 tokens, 32 tokens in all" in warning and "asks for 8" in warning


def test_texts_that_fill_no_window_are_refused_with_the_cure(tmp_path: Path, tokenizer: Path):
    with pytest.raises(InvalidDataset, match="do not fill one window of 16 tokens: add training texts, or lower seq"):
        read(["w1 w2", "w3"], tmp_path, tokenizer)


def test_a_row_without_the_column_is_named(tmp_path: Path, tokenizer: Path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.jsonl").write_text('{"body": "w1"}\n{"text": "w2"}\n')
    calibration = Calibration(tmp_path / "texts", "sha256:abc", "body", tokenizer)
    with pytest.raises(InvalidDataset, match=r"a.jsonl, line 2: no column 'body'"):
        read_windows(calibration, QuantizeWeights(), seed=0)


def test_more_windows_than_asked_for_are_drawn_by_the_seed_and_keep_their_order(tmp_path: Path, tokenizer: Path):
    texts = [" ".join([word] * TOKENS) for word in WORDS]
    first = read(texts, tmp_path / "a", tokenizer, samples=5, seed=1)
    again = read(texts, tmp_path / "b", tokenizer, samples=5, seed=1)
    other = read(texts, tmp_path / "c", tokenizer, samples=5, seed=2)
    ids = first.ids_NT[:, 0].tolist()
    assert ids == sorted(set(ids)) and len(ids) == 5 and first.available == len(WORDS)
    assert torch.equal(first.ids_NT, again.ids_NT) and not torch.equal(first.ids_NT, other.ids_NT)


def test_each_window_is_drawn_equally_often():
    drawn = Counter(window[0] for seed in range(2000) for window in choose([[n] for n in range(10)], 3, seed=seed)[0])
    assert all(abs(count - 600) < 5 * (600 * 0.7) ** 0.5 for count in drawn.values()) and len(drawn) == 10


def test_only_as_many_windows_as_are_kept_are_in_memory():
    windows = ([number] for number in range(100_000))
    assert choose(windows, 1, seed=0)[1] == 100_000


def test_a_token_without_an_embedding_is_named():
    with pytest.raises(InvalidModel, match="the tokenizer gives token 128, and the model's embeddings have 128 rows"):
        check_vocabulary(torch.tensor([[3, 128]]), 128)
