"""A decoder, quantized by the whole service: what ships reloads, keeps the base's other files, and has one verdict; a
worker that is killed goes on to the same bytes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
from modelpress.views import Conversion, ConversionState, StepFinished
from service.faults import MARK_VARIABLE, VARIABLE
from tests.compressors.decoders import make_texts, trained_decoder, word_texts
from tests.service.jobs.served import RealServer

QUANTIZE = "{method: quantize_weights, group_size: 32, calibration_samples: 16, sequence_length: 32%s}"
RECIPE = f"stages: [{QUANTIZE % ''}, {{method: export, format: compressed-tensors}}]"
OTHER_FORMATS = {
    "onnx": f"stages: [{QUANTIZE % ', algorithm: rtn'}, {{method: export, format: onnx}}]",
    "gptq": f"stages: [{QUANTIZE % ', scale_dtype: float16'}, {{method: export, format: gptq}}]",
    "nf4": f"stages: [{QUANTIZE % ', algorithm: rtn, scheme: nf4'}, {{method: export, format: bitsandbytes}}]",
    "float onnx": "stages: [{method: export}]",
}
POLICY = "gates: {perplexity: {max_ratio: 2.0}}"
POINTS = (
    *(f"sink.file.{when}:{number}" for when in ("before", "after") for number in (1, 2, 3)),
    *(f"worker.checkpoint.{when}:{number}" for when in ("before", "after") for number in (1, 2)),
)
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

    @staticmethod
    def with_artifacts(client: Client, folder: Path) -> Service:
        folder.mkdir()
        return Service(
            client,
            base=client.upload_folder(trained_decoder(), ArtifactKind.MODEL),
            train=client.upload_folder(make_texts(folder / "train", rows=24, seed=1), ArtifactKind.DATASET),
            evaluation=client.upload_folder(rows(folder / "evaluation", texts=24), ArtifactKind.DATASET),
            few=client.upload_folder(rows(folder / "few", texts=2), ArtifactKind.DATASET),
        )

    def request(self, policy: str = POLICY, *, evaluation: str = "", recipe: str = RECIPE) -> ConversionRequest:
        documents = Documents(recipe=recipe, policy=policy, evaluation=EVALUATION)
        data = evaluation or self.evaluation
        return ConversionRequest(documents, base=self.base, train=self.train, evaluation=data)

    def convert(self, request: ConversionRequest) -> Conversion:
        done = self.client.wait(self.client.create_conversion(request).name, timeout_s=240)
        assert done.state is ConversionState.SUCCEEDED, done.failure
        return done

    def report(self, name: str) -> Mapping[str, Any]:
        report: Mapping[str, Any] = json.loads(self.client.report_json(name))
        return report


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("service")) as service:
        yield service


@contextmanager
def running(folder: Path) -> Iterator[Service]:
    """A server of its own, with the artifacts, while the block runs."""
    server = RealServer(folder / "data")
    address = server.start(**THREADS)
    try:
        with Client(address) as client:
            yield Service.with_artifacts(client, folder / "artifacts")
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
    done = service.convert(service.request(policy))
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


def test_the_report_has_every_layer_and_every_figure_and_the_size_was_predicted(service):
    estimate = service.client.estimate(service.request())
    report = service.report(service.convert(service.request()).name)
    quantize = report["stages"][0]
    assert len(quantize["layers"]) == 14
    assert {layer["num_bits"] for layer in quantize["layers"]} == {4}
    language = report["language"]
    assert language["choices"]["candidate_accuracy"]["n"] == 8
    assert len(language["generations"]) >= 1
    assert (report["evaluation"], language["parity"]) == (None, None)
    assert sum(window["tokens"] for window in language["windows"]) == language["token_kl"]["n"]
    assert estimate.candidate_bytes == pytest.approx(language["footprint"]["candidate_bytes"], rel=0.01)


def test_a_loss_that_the_policy_forbids_is_rejected(service):
    done = service.convert(service.request("gates: {perplexity: {max_ratio: 0.5}}"))
    assert done.verdict is Verdict.REJECTED


def test_too_few_texts_are_inconclusive(service):
    policy = "gates: {perplexity: {max_ratio: 1.0001}}"
    done = service.convert(service.request(policy, evaluation=service.few))
    assert done.verdict is Verdict.INCONCLUSIVE, service.report(done.name)["decision"]


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_FORMATS)
def test_every_format_is_measured_in_its_runtime_and_its_size_is_predicted(service, name):
    request = service.request(recipe=OTHER_FORMATS[name])
    estimate, done = service.client.estimate(request), service.convert(request)
    language = service.report(done.name)["language"]
    assert done.verdict is Verdict.APPROVED
    assert ("onnxruntime" in language["candidate_runtime"]) is ("onnx" in name)
    assert (language["parity"] is None) is ("onnx" not in name)
    assert estimate.candidate_bytes == pytest.approx(language["footprint"]["candidate_bytes"], rel=0.01)


@pytest.fixture(scope="module")
def in_one_go(service: Service) -> str:
    """The digest of what ships where no process is killed."""
    return str(service.report(service.convert(service.request()).name)["model_digest"])


def check(point: str, folder: Path, in_one_go: str) -> None:
    mark, server = folder / "killed", RealServer(folder / "data")
    address = server.start(**{VARIABLE: point, MARK_VARIABLE: str(mark), **THREADS})
    try:
        with Client(address) as client:
            killed = Service.with_artifacts(client, folder / "artifacts")
            report = killed.report(killed.convert(killed.request()).name)
        assert report["model_digest"] == in_one_go
        assert mark.exists(), f"no process passed {point}"
    finally:
        server.kill()


@pytest.mark.parametrize("point", random.Random(4).sample(POINTS, 1))
def test_a_worker_killed_at_a_layer_goes_on_to_the_same_bytes(point, tmp_path, in_one_go):
    check(point, tmp_path, in_one_go)


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_a_worker_killed_at_any_layer_goes_on_to_the_same_bytes(point, tmp_path, in_one_go):
    check(point, tmp_path, in_one_go)
