"""Choices: scores worked out from a bigram table, the same in any batch; what has no score is named with its line."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from evaluators.choices import EncodedChoice, answers, choice_report, encoded_choices, score
from evaluators.language import ComparedModels, answer_questions
from evaluators.runtimes import Resources
from modelpress.errors import InvalidDataset, InvalidModel
from modelpress.evaluations import LanguageEvaluation
from modelpress.language_rows import Place, Question
from tests.compressors.decoders import make_decoder
from tests.evaluators.bigrams import bigrams
from tests.evaluators.quantized_decoders import quantize

CHOICES = [EncodedChoice([0, 1, 2], 1), EncodedChoice([0, 3], 1), EncodedChoice([4, 4, 1, 2, 0], 3)]


def question(prompt="a b", choices=(" c", " d"), answer=0):
    return Question(Place(4, "data.jsonl, line 5"), prompt, tuple(choices), answer)


@pytest.fixture(scope="module")
def characters():
    """One token per character, `ab` is one token too: the seam of prompt and choice may lie inside it."""
    vocabulary = {token: i for i, token in enumerate(("a", "b", "c", "d", " ", "ab"))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_a_score_is_the_mean_log_probability_of_the_choice_s_own_tokens(batch_size):
    model = bigrams(vocabulary=5, seed=1)
    log_p = model.table_VV.double().log_softmax(dim=-1)
    steps: list[tuple[int, int]] = []
    scores = score(model, CHOICES, batch_size=batch_size, progress=lambda *step: steps.append(step))
    expected = [(log_p[0, 1] + log_p[1, 2]) / 2, log_p[0, 3], (log_p[1, 2] + log_p[2, 0]) / 2]
    assert scores == pytest.approx([float(value) for value in expected], abs=1e-12)
    assert steps[-1] == (3, 3)


def test_choices_of_like_length_share_a_batch():
    model = bigrams(vocabulary=5, seed=1)
    score(model, CHOICES, batch_size=2, progress=lambda *_: None)
    assert model.calls == [(2, 3), (1, 5)]


def test_a_choice_that_scores_no_number_is_refused():
    model = bigrams(vocabulary=5, seed=1)
    model.table_VV[1] = torch.nan
    with pytest.raises(InvalidModel, match="the model answers 1 of the 2 tokens of a choice with NaN"):
        score(model, CHOICES, batch_size=1, progress=lambda *_: None)


def test_the_first_of_equal_choices_is_the_answer():
    assert answers([-1.0, -0.5, -0.5, -2.0, -2.0], [question(choices="abc"), question()]) == [1, 0]


def test_a_choice_s_tokens_follow_what_the_prompt_alone_begins_with(characters):
    evaluation = LanguageEvaluation()
    plain, joined = encoded_choices(question("c a", (" d", "bd")), characters, evaluation)
    assert (plain.ids, plain.first) == ([2, 4, 0, 4, 3], 3)
    assert (joined.ids, joined.first) == ([2, 4, 5, 3], 2)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (question("c", ("x", "d")), r"line 5: choice 0 \(from 0\) adds no token to its prompt"),
        (question("a", ("d", "b")), r"line 5: choice 1 \(from 0\) has no token of the prompt before it"),
        (question("c", ("d", "d" * 8)), r"line 5: choice 1 \(from 0\) has 9 tokens with its prompt, the window 8"),
    ],
)
def test_a_choice_that_cannot_be_scored_is_named_with_its_line(characters, asked, message):
    with pytest.raises(InvalidDataset, match=f"data.jsonl, {message}"):
        encoded_choices(asked, characters, LanguageEvaluation(window=8))


def test_the_report_pairs_both_models_question_by_question():
    report = choice_report([True, True, False, False, True], [True, False, True, False, True], confidence=0.95)
    assert report.paired.model_dump() == {
        "both_right": 2,
        "only_baseline_right": 1,
        "only_candidate_right": 1,
        "both_wrong": 1,
    }
    assert (report.baseline_accuracy.value, report.candidate_accuracy.value) == (0.6, 0.6)
    assert report.baseline_accuracy.interval.method == "Wilson 1927"
    assert (report.accuracy_drop.value, report.accuracy_drop.n) == (0.0, 5)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("choices")
    quantize(make_decoder(folder / "baseline"), folder / "candidate", "pack-quantized")
    return ComparedModels(folder / "baseline", folder / "candidate")


def answer(compared, folder, rows, **fields):
    folder.mkdir(exist_ok=True)
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluation = LanguageEvaluation(window=16, **fields)
    return answer_questions(
        compared, data=folder, evaluation=evaluation, resources=Resources(), progress=lambda *_: None
    )


def test_answers_do_not_depend_on_batch_size_or_the_tokenizer_s_padding_side(compared, tmp_path):
    rows = [{"text": "w1 w2"}] + [
        {"prompt": f"w{i} w{3 * i}", "choices": [f" w{i + 1}", f" w{i + 2} w5", f" w{i + 3} w7 w9"], "answer": i % 3}
        for i in range(12)
    ]
    left = ComparedModels(*(shutil.copytree(f, tmp_path / f.name) for f in (compared.baseline, compared.candidate)))
    for folder in (left.baseline, left.candidate):
        file = folder / "tokenizer_config.json"
        file.write_text(file.read_text().replace("{", '{"padding_side": "left",', 1))
    reports = [answer(compared, tmp_path / "d", rows, batch_size=size) for size in (1, 4, 36)]
    reports.append(answer(left, tmp_path / "d", rows))
    assert reports[0].paired.n == 12
    assert all(report == reports[0] for report in reports)


def test_a_dataset_without_questions_has_no_choices(compared, tmp_path):
    assert answer(compared, tmp_path / "d", [{"text": "w1 w2"}, {"prompt": "w1"}]) is None
