"""Generations: greedy, from prompts or the beginnings of texts, ended by the model's own stop tokens."""

from __future__ import annotations

import json
import weakref

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from evaluators import generations
from evaluators.generations import encode_prompts, stop_tokens
from evaluators.language import ComparedModels, generate
from evaluators.language_models import open_language_model
from evaluators.runtimes import Resources
from modelpress.errors import InvalidDataset, InvalidModel
from modelpress.evaluations import LanguageEvaluation
from modelpress.language_rows import LanguageRows, Place, Text
from tests.compressors.decoders import make_decoder
from tests.evaluators.quantized_decoders import quantize

LONG = " ".join(f"w{i}" for i in range(50))


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generations")
    quantize(make_decoder(folder / "baseline"), folder / "candidate", "gptq")
    return ComparedModels(folder / "baseline", folder / "candidate")


@pytest.fixture
def run(compared, tmp_path):
    def run(*rows, models=compared, **fields):
        (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        evaluation = LanguageEvaluation(**{"max_new_tokens": 12, **fields})
        steps: list[tuple[int, int]] = []
        found = generate(
            models, data=tmp_path, evaluation=evaluation, resources=Resources(), progress=lambda *s: steps.append(s)
        )
        assert steps == [(done + 1, 2 * len(found)) for done in range(2 * len(found))]
        return found

    return run


def test_both_texts_are_those_of_greedy_generation_by_transformers(compared, run):
    (found,) = run({"text": "w0"}, {"prompt": "w5 w9 w30"})
    tokenizer = AutoTokenizer.from_pretrained(compared.baseline)
    model = AutoModelForCausalLM.from_pretrained(compared.baseline)
    ids = tokenizer("w5 w9 w30", return_tensors="pt", return_token_type_ids=False)
    new = model.generate(**ids, do_sample=False, max_new_tokens=12)[0, 3:]
    assert (found.index, found.prompt) == (1, "w5 w9 w30")
    assert found.baseline == tokenizer.decode(new, skip_special_tokens=True)
    assert 1 <= found.tokens <= 12


def test_equal_tokens_end_at_the_first_difference(compared, run):
    same = run({"text": "w0"}, {"prompt": "w5"}, models=ComparedModels(compared.baseline, compared.baseline))
    assert [(one.equal_tokens, one.baseline) for one in same] == [(same[0].tokens, same[0].candidate)]
    for one in run({"text": "w0"}, *({"prompt": f"w{i}"} for i in range(4))):
        baseline, candidate = one.baseline.split(), one.candidate.split()
        assert baseline[: one.equal_tokens] == candidate[: one.equal_tokens]
        assert baseline[one.equal_tokens :][:1] != candidate[one.equal_tokens :][:1] or one.equal_tokens == one.tokens


def test_prompts_come_before_texts_and_no_more_are_taken_than_asked_for(run):
    rows = ({"text": LONG}, {"prompt": "w1"}, {"prompt": "w2"}, {"prompt": "w3"})
    assert [one.index for one in run(*rows, generations=2)] == [1, 2]
    assert run(*rows, generations=0) == ()


def test_texts_beyond_those_that_are_continued_are_not_tokenized(compared):
    def tokenizer(text, verbose):
        assert text != "never read"
        return {"input_ids": tokens(text)["input_ids"]}

    tokens = AutoTokenizer.from_pretrained(compared.baseline)
    tokenizer.decode = tokens.decode
    texts = tuple(Text(Place(i, f"line {i}"), text) for i, text in enumerate(("w1", "w2", "never read")))
    begun = encode_prompts(LanguageRows(texts, (), ()), tokenizer, count=2)
    assert [prompt.text for prompt in begun] == ["w1", "w2"]


def test_one_model_is_open_at_a_time(compared, run, monkeypatch):
    opened: list[weakref.ref] = []

    def opening(folder, resources):
        assert all(reference() is None for reference in opened)
        model = open_language_model(folder, resources)
        opened.append(weakref.ref(model))
        return model

    monkeypatch.setattr(generations, "open_language_model", opening)
    run({"text": "w0"}, {"prompt": "w5"})
    assert len(opened) == 2


def test_without_prompts_the_first_32_tokens_of_the_first_texts_are_continued(run):
    found = run({"text": ""}, {"text": LONG}, {"text": "w7 w8"}, {"text": "w9"}, generations=2)
    assert [(one.index, one.prompt) for one in found] == [(1, " ".join(LONG.split()[:32])), (2, "w7 w8")]


@pytest.mark.parametrize(
    ("row", "fields", "message"),
    [
        ({"prompt": " "}, {}, "line 2: the prompt gives no token"),
        ({"prompt": LONG}, {"max_new_tokens": 207}, "line 2: 50 tokens and max_new_tokens 207 are more than the 256"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_named_with_its_line(run, row, fields, message):
    with pytest.raises(InvalidDataset, match=f"data.jsonl, {message}"):
        run({"text": "w0"}, row, **fields)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [2, 7]}, 5, {2, 7}),
        ({"eos_token_id": 3}, 5, {3}),
        ({}, 5, {5}),
        (None, 5, {5}),
        (None, None, set()),
    ],
)
def test_stop_tokens_are_the_generation_config_s_before_the_config_s(tmp_path, generation, config, expected):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": config}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert stop_tokens(tmp_path) == expected


@pytest.mark.parametrize("content", ["[]", "{"])
def test_a_generation_config_that_is_no_object_is_refused(tmp_path, content):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(InvalidModel, match=r"generation_config\.json"):
        stop_tokens(tmp_path)
