"""The whole service with a real recipe: killed at any fault point, it ends with the same model and the same figures."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from modelpress.client import Client
from modelpress.errors import Unavailable
from modelpress.manifests import ArtifactKind
from modelpress.requests import AdapterInput, ConversionRequest, Documents
from modelpress.retries import RetryPolicy
from modelpress.views import ConversionState, StepFinished
from service.faults import MARK_VARIABLE, POINTS, VARIABLE
from tests.service.jobs.served import RealServer

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks for it

IMPATIENT = RetryPolicy(call_patience_s=1.0, stream_patience_s=1.0, max_delay_s=0.2)
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
WORDS = tuple(f"w{index}" for index in range(40))
LABELS = ("benign", "injection")
RECIPE = """
stages:
  - {method: merge_lora}
  - {method: prune, ratio: 0.5, importance: magnitude}
  - {method: recover, steps: 20, checkpoint_every: 5, batch_size: 16, learning_rate: 0.005, max_length: 16}
  - {method: quantize, steps: 4, checkpoint_every: 2, batch_size: 8, calibration_examples: 32, max_length: 16}
  - {method: export}
"""
POLICY = "gates: {accuracy_drop: {max: 0.9}, size: {max_ratio: 1.0}}"
EVALUATION = "{max_length: 16, latency: {batch_sizes: [1], sequence_lengths: [8], warmup: 0, repeats: 5}}"
TIMING = ("seconds", "measured_by", "peak_memory_bytes", "latency", "latency_measured_by", "created", "conversion")
"""Fields of a report that no two runs share."""


@dataclass(frozen=True)
class Ending:
    """What must not depend on who was killed."""

    model_digest: str
    figures: str
    finished: tuple[str, ...]
    cached: tuple[str, ...]
    """The steps that an equal request would take from the cache."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `model`, `adapter`, `train` and `test`: a seeded two-layer BERT, its adapter, and seeded texts."""
    folder = tmp_path_factory.mktemp("inputs")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    names = {"id2label": dict(enumerate(LABELS)), "label2id": {label: index for index, label in enumerate(LABELS)}}
    config = BertConfig(
        vocab_size=len(SPECIAL) + len(WORDS), max_position_embeddings=24, initializer_range=0.35, **sizes, **names
    )
    model = BertForSequenceClassification(config)
    model.save_pretrained(folder / "model")
    settings = LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False)
    get_peft_model(model, settings).save_pretrained(folder / "adapter")
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate((*SPECIAL, *WORDS))}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "model")
    generator = random.Random(1)
    for name, rows in (("train", 160), ("test", 60)):
        texts = [" ".join(generator.choices(WORDS, k=generator.randint(2, 9))) for _ in range(rows)]
        lines = [json.dumps({"text": text, "label": generator.choice(LABELS)}) for text in texts]
        (folder / name).mkdir()
        (folder / name / "rows.jsonl").write_text("\n".join(lines))
    return folder


def survive(server: RealServer, inputs: Path, output: Path) -> Ending:
    """Upload, submit, wait and download, starting the server anew whenever it has died."""
    while True:
        address = f"127.0.0.1:{server.port}" if server.alive else server.start(MODELPRESS_WORKERS_THREADS="1")
        try:
            with Client(address, retry_policy=IMPATIENT) as client:
                return convert(client, inputs, output)
        except Unavailable:
            assert not server.alive or server.process.wait(5.0) == -9, server.log.read_text()


def convert(client: Client, inputs: Path, output: Path) -> Ending:
    base = client.upload_folder(inputs / "model", ArtifactKind.MODEL)
    adapter = client.upload_folder(inputs / "adapter", ArtifactKind.ADAPTER)
    train, test = (client.upload_folder(inputs / name, ArtifactKind.DATASET) for name in ("train", "test"))
    documents = Documents(recipe=RECIPE, policy=POLICY, evaluation=EVALUATION)
    adapters = (AdapterInput("tone", adapter),)
    request = ConversionRequest(documents, base=base, adapters=adapters, evaluation=test, train=train)
    made = client.create_conversion(request, request_id="the-one")
    done = client.wait(made.name, timeout_s=240)
    assert done.state is ConversionState.SUCCEEDED, done.failure
    bodies = [event.body for event in client.watch(made.name)]
    client.download(done.output, output)
    report = json.loads((output / "report.json").read_text())
    finished = tuple(body.step for body in bodies if isinstance(body, StepFinished))
    figures = json.dumps(timeless(report), sort_keys=True)
    return Ending(report["model_digest"], figures, finished, client.estimate(request).cached_steps)


def timeless(value: Any) -> Any:
    """The report without what no two runs share."""
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if key not in TIMING}
    return [timeless(item) for item in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def undisturbed(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Ending:
    folder = tmp_path_factory.mktemp("undisturbed")
    server = RealServer(folder / "data")
    try:
        return survive(server, inputs, folder / "output")
    finally:
        server.kill()


@pytest.mark.slow
def test_the_undisturbed_run_finishes_every_step_once_and_leaves_them_all_in_the_cache(undisturbed):
    assert undisturbed.cached == undisturbed.finished
    assert len(set(undisturbed.finished)) == len(undisturbed.finished) == 13


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("point", POINTS)
def test_killed_at_a_point_it_gives_the_same_model_and_figures(point, inputs, undisturbed, tmp_path):
    mark, server = tmp_path / "killed", RealServer(tmp_path / "data")
    server.start(**{VARIABLE: point, MARK_VARIABLE: str(mark), "MODELPRESS_WORKERS_THREADS": "1"})
    try:
        assert survive(server, inputs, tmp_path / "output") == undisturbed
        assert mark.exists(), f"no process passed {point}"
    finally:
        server.kill()
