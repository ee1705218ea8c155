"""Figures per token: exact against numbers worked out by hand, equal at any batch size, refused where not finite."""

from __future__ import annotations

import math
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from evaluators.language import ComparedModels, compare_tokens, measure_language
from evaluators.runtimes import Resources
from evaluators.token_comparison import CHUNK_TOKENS, compare_logits, compare_windows
from evaluators.token_windows import cut_windows
from modelpress.datasets import read_texts
from modelpress.errors import InvalidDataset, InvalidModel, InvalidRequest
from modelpress.evaluations import LanguageEvaluation
from tests.compressors.decoders import make_decoder, make_texts
from tests.compressors.exported_decoders import exported_family
from tests.evaluators.bigrams import BigramModel, bigrams
from tests.evaluators.quantized_decoders import quantize


def test_two_tokens_worked_out_by_hand():
    """p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2); the target is token 0, then 2."""
    p, q = torch.tensor([[2.0, 1.0, 1.0]]).log(), torch.tensor([[1.0, 1.0, 2.0]]).log()
    found = compare_logits(torch.cat([p, p]), torch.cat([q, q + 5]), torch.tensor([0, 2]))
    assert found.baseline_nats.tolist() == pytest.approx([math.log(2), math.log(4)], abs=1e-7)
    assert found.candidate_nats.tolist() == pytest.approx([math.log(4), math.log(2)], abs=1e-7)
    kl = 0.5 * math.log(2) - 0.25 * math.log(2)
    assert found.kl.tolist() == pytest.approx([kl, kl], abs=1e-7)
    assert found.baseline_top.tolist() == [0, 0]
    assert found.candidate_top.tolist() == [2, 2]


def test_equal_logits_have_a_divergence_of_0_exactly_and_the_first_of_equals_wins():
    logits = torch.tensor([[1.0, 7.0, 7.0], [-30.0, 80.0, 3.0]])
    found = compare_logits(logits, logits.clone(), torch.tensor([2, 1]))
    assert found.kl.tolist() == [0.0, 0.0]
    assert found.baseline_top.tolist() == [1, 1]


def test_more_tokens_than_one_chunk_are_each_computed_once():
    n = 2 * CHUNK_TOKENS + 5
    generator = torch.Generator().manual_seed(3)
    p, q = (torch.randn(n, 7, generator=generator) for _ in range(2))
    targets = torch.randint(7, (n,), generator=generator)
    whole, parts = compare_logits(p, q, targets), [compare_logits(p[[i]], q[[i]], targets[[i]]) for i in range(n)]
    assert all(
        torch.equal(column, torch.cat(rows)) for column, rows in zip(whole, zip(*parts, strict=True), strict=True)
    )


@pytest.mark.parametrize(("window", "stride"), [(8, 8), (8, 3)])
def test_each_token_is_predicted_from_the_one_before_it(window, stride):
    baseline, candidate = bigrams(vocabulary=5, seed=1), bigrams(vocabulary=5, seed=2)
    ids = torch.randint(5, (21,), generator=torch.Generator().manual_seed(4)).tolist()
    windows = cut_windows(len(ids), window=window, stride=stride)
    found = [nats for part in compare_windows((baseline, candidate), ids=ids, windows=windows) for nats in part[0]]
    log_p = baseline.table_VV.double().log_softmax(dim=-1)
    expected = [-log_p[ids[t - 1], ids[t]] for w in windows for t in range(w.first, w.stop)]
    assert torch.equal(torch.stack(found), torch.stack(expected))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("role", ["baseline", "candidate"])
def test_an_answer_that_is_no_number_is_refused_with_model_and_place(role, bad):
    models = {name: bigrams(vocabulary=5, seed=1) for name in ("baseline", "candidate")}
    models[role].table_VV[3, 0] = bad
    windows = cut_windows(4, window=8, stride=8)
    with pytest.raises(InvalidModel, match=f"the {role} answers 2 of the 3 tokens from 1 on with NaN or inf") as fault:
        compare_windows(tuple(models.values()), ids=[3, 1, 3, 2], windows=windows)
    assert fault.value.reason == "NON_FINITE_LOGITS"


def test_vocabularies_of_two_sizes_are_refused():
    small = BigramModel(torch.zeros(5, 4), [])
    with pytest.raises(InvalidModel, match="vocabulary has 5 tokens, the candidate's 4"):
        compare_windows((bigrams(vocabulary=5, seed=1), small), ids=[1, 2], windows=cut_windows(2, window=8, stride=8))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    baseline = make_decoder(folder / "baseline")
    quantize(baseline, folder / "candidate", "pack-quantized")
    return ComparedModels(baseline, folder / "candidate")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return make_texts(tmp_path_factory.mktemp("texts") / "data", rows=3, seed=5, words=25)


def compare(models, data, **fields):
    evaluation = LanguageEvaluation(**{"window": 16, **fields})
    steps: list[tuple[int, int]] = []
    resources = Resources()
    figures = compare_tokens(
        models, data=data, evaluation=evaluation, resources=resources, progress=lambda *step: steps.append(step)
    )
    assert steps[-1][0] == steps[-1][1] == len(figures.window_tokens)
    return figures


def test_figures_do_not_depend_on_the_batch_size(models, texts):
    figures = [compare(models, texts, batch_size=size) for size in (1, 2, 5)]
    assert len(figures[0]) == 75 - 5
    assert figures[0].window_tokens.tolist() == [15, 15, 15, 15, 10]
    for other in figures[1:]:
        assert np.array_equal(other.window_tokens, figures[0].window_tokens)
        for name in ("baseline_nats", "candidate_nats", "kl"):
            assert np.allclose(getattr(other, name), getattr(figures[0], name), atol=2e-6)


def test_figures_do_not_depend_on_the_padding_side_that_the_tokenizer_is_set_to(models, texts, tmp_path):
    folders = [shutil.copytree(folder, tmp_path / folder.name) for folder in (models.baseline, models.candidate)]
    for folder in folders:
        file = folder / "tokenizer_config.json"
        file.write_text(file.read_text().replace("{", '{"padding_side": "left",', 1))
    left, right = compare(ComparedModels(*folders), texts), compare(models, texts)
    assert np.array_equal(left.candidate_nats, right.candidate_nats)


def test_a_model_against_itself_has_no_divergence(models, texts):
    figures = compare(ComparedModels(models.baseline, models.baseline), texts)
    assert figures.kl.max() == 0
    assert figures.agree.all()


def test_an_export_to_onnx_is_compared_in_its_own_runtime(texts):
    exported = exported_family("llama")
    figures = compare(ComparedModels(exported.source, exported.folder), texts)
    assert "onnxruntime" in figures.facts.candidate_runtime
    assert figures.kl.max() < 1e-8
    assert np.allclose(figures.baseline_nats, figures.candidate_nats, atol=2e-5)


@pytest.mark.gpu
def test_a_gpu_gives_the_figures_of_the_cpu(models, texts):
    evaluation = LanguageEvaluation(window=16)
    cpu, gpu = (
        compare_tokens(models, data=texts, evaluation=evaluation, resources=Resources(device), progress=lambda *_: None)
        for device in ("cpu", "cuda")
    )
    assert np.allclose(cpu.kl, gpu.kl, atol=1e-5)
    assert np.allclose(cpu.candidate_nats, gpu.candidate_nats, atol=1e-4)


def test_overlapping_windows_predict_every_token_but_the_first(models, texts):
    figures = compare(models, texts, stride=5)
    assert len(figures) == 75 - 1
    assert (figures.facts.window, figures.facts.stride) == (16, 5)


def test_the_mean_loss_is_that_of_transformers_on_one_window(models, texts):
    """75 tokens in one window: the loss that the library computes itself."""
    tokenizer = AutoTokenizer.from_pretrained(models.baseline)
    text = " ".join(read_texts(texts, text_column="text").texts)
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    loss = AutoModelForCausalLM.from_pretrained(models.baseline)(input_ids=ids, labels=ids).loss.item()
    measured = measure_language(compare(models, texts, window=128), dataset="d", confidence=0.95)
    assert measured["baseline_perplexity"]["value"] == pytest.approx(math.exp(loss), rel=1e-5)


def test_a_candidate_that_splits_texts_otherwise_is_refused(models, texts, tmp_path):
    other = shutil.copytree(models.candidate, tmp_path / "other")
    file = other / "tokenizer.json"
    word = read_texts(texts, text_column="text").texts[0].split()[0]
    file.write_text(file.read_text().replace(f'"{word}"', '"unheard of"', 1))
    with pytest.raises(InvalidModel, match="split the texts into different tokens") as fault:
        compare(ComparedModels(models.baseline, other), texts)
    assert fault.value.reason == "BAD_TOKENIZER"


def test_a_window_longer_than_the_model_takes_is_refused(models, texts):
    with pytest.raises(InvalidRequest, match="window is 512, but the model takes at most 256"):
        compare(models, texts, window=512)


def test_texts_of_one_token_are_refused(models, tmp_path):
    with pytest.raises(InvalidDataset, match="give 1 tokens"):
        compare(models, make_texts(tmp_path / "d", rows=1, seed=1, words=1))
