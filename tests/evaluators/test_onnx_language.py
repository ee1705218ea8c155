"""A decoder in ONNX Runtime: padding, batch and cache change nothing, and what is no decoder is refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file

from evaluators.language_models import open_language_model
from evaluators.onnx_language import OnnxLanguageModel, measure_language_parity
from evaluators.runtimes import Resources
from modelpress.errors import FailedPrecondition, InvalidModel
from tests.compressors.exported_decoders import exported_family

FAMILIES = ("llama", "qwen2")
"""Without windows, and with: the texts here are longer than the window."""
LENGTHS = (1, 5, 13)


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> OnnxLanguageModel:
    return OnnxLanguageModel.open(exported_family(request.param).folder, Resources())


def rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 128, (length,), generator=generator) for length in LENGTHS]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_gives_what_each_row_gives(model: OnnxLanguageModel, side: str) -> None:
    ids_BT, mask_BT = torch.zeros(len(LENGTHS), 16, dtype=torch.int64), torch.zeros(len(LENGTHS), 16, dtype=torch.int64)
    for row, (tokens, length) in enumerate(zip(rows(), LENGTHS, strict=True)):
        place = slice(16 - length, 16) if side == "left" else slice(0, length)
        ids_BT[row, place], mask_BT[row, place] = tokens, 1
    logits_BTV = model.logits(ids_BT, mask_BT)
    assert logits_BTV.dtype == torch.float32 and logits_BTV.shape == (len(LENGTHS), 16, 128)
    for row, tokens in enumerate(rows()):
        alone = model.logits(tokens[None], torch.ones(1, len(tokens), dtype=torch.int64))[0]
        torch.testing.assert_close(logits_BTV[row][mask_BT[row] == 1], alone, rtol=0, atol=2e-5)


@pytest.mark.parametrize("at", [1, 6, 12])
def test_a_cache_changes_no_logit(model: OnnxLanguageModel, at: int) -> None:
    ids_BT = rows()[2][None].repeat(2, 1)
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[1, :3] = 0
    expected = model.logits(ids_BT, mask_BT)[mask_BT == 1]
    found = model.logits_after(ids_BT, mask_BT, at=at)[mask_BT == 1]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def test_greedy_takes_the_most_likely_token_of_the_whole_text(model: OnnxLanguageModel) -> None:
    text, new = [9, 30, 4], list[int]()
    for _ in range(20):
        ids_1T = torch.tensor([text + new])
        new.append(int(model.logits(ids_1T, torch.ones_like(ids_1T))[0, -1].argmax()))
    assert model.greedy(text, max_new_tokens=20, stop=frozenset()) == new
    first = new.index(new[7])
    assert model.greedy(text, max_new_tokens=20, stop=frozenset({new[7]})) == new[: first + 1]
    assert model.greedy(text, max_new_tokens=0, stop=frozenset()) == []


def test_the_folder_is_opened_by_what_it_holds_and_stays_as_it_is(tmp_path: Path) -> None:
    folder = exported_family("llama").folder
    before = digests(folder)
    opened = open_language_model(folder, Resources())
    opened.greedy([5], max_new_tokens=2, stop=frozenset())
    assert opened.runtime.startswith("onnxruntime ") and opened.runtime.endswith("CPUExecutionProvider float32")
    assert digests(folder) == before


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def test_an_exact_export_has_no_difference_with_and_without_cache() -> None:
    exported = exported_family("llama")
    report = measure_language_parity(exported.folder, reference=exported.evidence, resources=Resources())
    mask_BT = load_file(exported.evidence / "parity.safetensors")["attention_mask"]
    assert report.max_logit_difference < 2e-5 and report.label_changes == 0
    assert report.n == 2 * int(mask_BT.sum()) == 2 * (16 + 8 + 8 + 16)


def test_logits_of_another_model_show(tmp_path: Path) -> None:
    exported = exported_family("llama")
    tensors = load_file(exported.evidence / "parity.safetensors")
    tensors["logits"][3, 5, 7] += 100
    save_file(tensors, tmp_path / "parity.safetensors")
    report = measure_language_parity(exported.folder, reference=tmp_path, resources=Resources())
    assert report.max_logit_difference == pytest.approx(100, abs=1e-3)
    assert report.label_changes == 2


def test_padding_is_not_compared(tmp_path: Path) -> None:
    exported = exported_family("llama")
    tensors = load_file(exported.evidence / "parity.safetensors")
    tensors["logits"][tensors["attention_mask"] == 0] = 1e6
    save_file(tensors, tmp_path / "parity.safetensors")
    report = measure_language_parity(exported.folder, reference=tmp_path, resources=Resources())
    assert report.max_logit_difference < 2e-5


def test_a_file_without_a_cache_is_refused(tmp_path: Path, table, write_model) -> None:
    with pytest.raises(InvalidModel, match="a decoder takes input_ids, attention_mask, position_ids"):
        OnnxLanguageModel.open(write_model(tmp_path / "classifier", table), Resources())


def test_a_token_that_the_vocabulary_lacks_is_an_error(model: OnnxLanguageModel) -> None:
    with pytest.raises(InvalidModel, match="1 x 1 tokens"):
        model.logits(torch.tensor([[128]]), torch.ones(1, 1, dtype=torch.int64))


def test_a_device_that_is_not_there_is_an_error() -> None:
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has CUDA")
    with pytest.raises(FailedPrecondition, match="CUDAExecutionProvider"):
        OnnxLanguageModel.open(exported_family("llama").folder, Resources(device="cuda"))
