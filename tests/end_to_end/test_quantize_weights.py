"""A decoder, quantized by the whole service: what ships reloads, keeps the base's other files, and has one verdict."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from modelpress.client import Client
from modelpress.manifests import ArtifactKind
from modelpress.output import MODEL
from modelpress.reports import Verdict
from modelpress.requests import ConversionRequest, Documents
from modelpress.verification import verify_folder
from modelpress.views import ConversionState, StepFinished
from tests.compressors.decoders import make_texts, trained_decoder, word_texts
from tests.service.jobs.served import RealServer

RECIPE = """
stages:
  - {method: quantize_weights, algorithm: gptq, scheme: w4a16, group_size: 32, calibration_samples: 16,
     sequence_length: 32}
  - {method: export, format: compressed-tensors}
"""
EVALUATION = "{task: text-generation, window: 32, generations: 2, max_new_tokens: 8}"
COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "README.md")
STEPS = (
    *("compress/1-quantize_weights", "export/candidate", "compare/evaluation", "evaluate/choices"),
    *("evaluate/generations", "evaluate/language", "drift"),
)
THREADS = {"MODELPRESS_WORKERS_THREADS": "1"}


@dataclass(frozen=True)
class Service:
    """A running server and the names of its artifacts."""

    client: Client
    base: str
    train: str
    evaluation: str
    few: str
    """Too few texts for a verdict."""

    def convert(self, policy: str, *, evaluation: str = "", recipe: str = RECIPE) -> Any:
        documents = Documents(recipe=recipe, policy=policy, evaluation=EVALUATION)
        request = ConversionRequest(
            documents, base=self.base, train=self.train, evaluation=evaluation or self.evaluation
        )
        done = self.client.wait(self.client.create_conversion(request).name, timeout_s=240)
        assert done.state is ConversionState.SUCCEEDED, done.failure
        return done

    def report(self, name: str) -> Mapping[str, Any]:
        report: Mapping[str, Any] = json.loads(self.client.report_json(name))
        return report


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    server = RealServer(folder / "data")
    address = server.start(**THREADS)
    try:
        with Client(address) as client:
            yield Service(
                client,
                base=client.upload_folder(trained_decoder(), ArtifactKind.MODEL),
                train=client.upload_folder(make_texts(folder / "train", rows=24, seed=1), ArtifactKind.DATASET),
                evaluation=client.upload_folder(rows(folder / "evaluation", texts=24), ArtifactKind.DATASET),
                few=client.upload_folder(rows(folder / "few", texts=2), ArtifactKind.DATASET),
            )
    finally:
        server.kill()


def rows(folder: Path, *, texts: int) -> Path:
    """A dataset of texts, with questions whose right answer is the text's own next word, and a prompt."""
    folder.mkdir()
    found = word_texts(texts, seed=2, words=40)
    lines: list[dict[str, Any]] = [{"text": text} for text in found]
    for text in found[:8]:
        *prompt, right = text.split(" ")[:9]
        lines.append({"prompt": " ".join(prompt), "choices": [f" {right}", " w0 w0"], "answer": 0})
    lines.append({"prompt": found[0][:20]})
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_what_is_approved_verifies_offline_and_reloads_with_the_base_s_other_files(service, tmp_path):
    policy = "gates: {perplexity: {max_ratio: 2.0}, size: {max_ratio: 0.95}}"
    done = service.convert(policy)
    assert done.verdict is Verdict.APPROVED, service.report(done.name)["decision"]
    finished = [event.body for event in service.client.watch(done.name) if isinstance(event.body, StepFinished)]
    assert tuple(step.step for step in finished) == STEPS
    service.client.download(done.output, tmp_path / "output")
    key = service.client.capabilities().public_key_pem
    assert verify_folder(tmp_path / "output", public_key_pem=key, allow_development_key=True).verdict is done.verdict
    shipped, base = tmp_path / "output" / MODEL, trained_decoder()
    assert {name: (shipped / name).read_bytes() for name in COMPANIONS} == {
        name: (base / name).read_bytes() for name in COMPANIONS
    }
    assert_reloads(shipped, base)


def assert_reloads(shipped: Path, base: Path) -> None:
    """Plain transformers loads the folder, and it says nearly what the base says."""
    ids = AutoTokenizer.from_pretrained(shipped)(word_texts(1, seed=3, words=20)[0], return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        ours, theirs = (AutoModelForCausalLM.from_pretrained(folder)(ids).logits for folder in (shipped, base))
    assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() > 0.7


def test_the_report_has_every_layer_and_every_figure(service):
    done = service.convert("gates: {perplexity: {max_ratio: 2.0}}")
    report = service.report(done.name)
    quantize = report["stages"][0]
    assert len(quantize["layers"]) == 14
    assert {layer["num_bits"] for layer in quantize["layers"]} == {4}
    language = report["language"]
    assert language["choices"]["candidate_accuracy"]["n"] == 8
    assert len(language["generations"]) >= 1
    assert (report["evaluation"], language["parity"]) == (None, None)
    assert sum(window["tokens"] for window in language["windows"]) == language["token_kl"]["n"]


def test_a_loss_that_the_policy_forbids_is_rejected(service):
    assert service.convert("gates: {perplexity: {max_ratio: 0.5}}").verdict is Verdict.REJECTED


def test_too_few_texts_are_inconclusive(service):
    policy = "gates: {perplexity: {max_ratio: 1.0001}}"
    done = service.convert(policy, evaluation=service.few)
    assert done.verdict is Verdict.INCONCLUSIVE, service.report(done.name)["decision"]


def test_the_size_is_predicted_within_a_percent(service):
    documents = Documents(recipe=RECIPE, policy="gates: {perplexity: {max_ratio: 2.0}}", evaluation=EVALUATION)
    request = ConversionRequest(documents, base=service.base, train=service.train, evaluation=service.evaluation)
    estimate = service.client.estimate(request)
    report = service.report(service.convert(documents.policy).name)
    written = report["language"]["footprint"]["candidate_bytes"]
    assert estimate.candidate_bytes == pytest.approx(written, rel=0.01)
