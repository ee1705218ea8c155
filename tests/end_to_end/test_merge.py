"""A recipe that only merges, by the whole service: killed at any shard, it ends with the bytes of a merge in one go."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from compressors import merge_lora
from compressors.stages import NamedSource, SilentMonitor, StreamJob
from modelpress.client import Client
from modelpress.manifests import ArtifactKind
from modelpress.merge_recipes import MergeLora
from modelpress.requests import AdapterInput, ConversionRequest, Documents
from modelpress.views import ConversionState, StepFinished
from service.faults import MARK_VARIABLE, VARIABLE
from service.storage.store import ContentStore
from service.storage.stored_folders import StoredFolder, StoreSink
from tests.service.jobs.served import RealServer

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks for it

SHARDS = 4
WEIGHT = 0.75
RECIPE = "stages: [{method: merge_lora}, {method: export, format: safetensors}]"
POLICY = "gates: {merge_difference: {max: 0.01}, merge_logits: {max: 0.02}, merge_change: {max: 10.0}}"
POINTS = tuple(f"sink.file.{when}:{shard}" for shard in range(1, SHARDS + 1) for when in ("before", "after"))
THREADS = {"MODELPRESS_WORKERS_THREADS": "1"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `base`, a seeded Llama in bfloat16 of four shards, and `adapter`, that changes a tensor of each."""
    folder = tmp_path_factory.mktemp("inputs")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=32, **sizes))
    model.to(torch.bfloat16).save_pretrained(folder / "base", max_shard_size="16KB")
    shards = list((folder / "base").glob("model-*.safetensors"))
    assert len(shards) == SHARDS, [shard.stat().st_size for shard in shards]
    settings = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(model, settings).save_pretrained(folder / "adapter")
    return folder


@pytest.fixture(scope="module")
def in_one_go(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the merged folder, made without the service."""
    folder, threads = tmp_path_factory.mktemp("in_one_go"), torch.get_num_threads()
    store = ContentStore(str(folder / "store"), scratch=folder)
    base, adapter = (StoredFolder(store.put_folder(inputs / name), store) for name in ("base", "adapter"))
    sink = StoreSink(store)
    job = StreamJob(base, sink, seed=0, merged=(NamedSource("tone", adapter, WEIGHT),))
    torch.set_num_threads(1)
    merge_lora.run(MergeLora(adapters=("tone",)), job, SilentMonitor())
    torch.set_num_threads(threads)
    return str(sink.finish().digest)


def convert(client: Client, inputs: Path, output: Path) -> tuple[str, tuple[str, ...]]:
    """The merged folder's digest and the finished steps."""
    base = client.upload_folder(inputs / "base", ArtifactKind.MODEL)
    adapter = client.upload_folder(inputs / "adapter", ArtifactKind.ADAPTER)
    documents = Documents(recipe=RECIPE, policy=POLICY)
    request = ConversionRequest(documents, base=base, adapters=(AdapterInput("tone", adapter, WEIGHT),))
    done = client.wait(client.create_conversion(request, request_id="the-one").name, timeout_s=120)
    assert done.state is ConversionState.SUCCEEDED, done.failure
    finished = [event.body.step for event in client.watch(done.name) if isinstance(event.body, StepFinished)]
    client.download(done.output, output)
    report = json.loads((output / "report.json").read_text())
    assert report["decision"]["verdict"] == "APPROVED", report["decision"]
    return report["model_digest"], tuple(finished)


def check(point: str, folder: Path, inputs: Path, in_one_go: str) -> None:
    mark, server = folder / "killed", RealServer(folder / "data")
    address = server.start(**{VARIABLE: point, MARK_VARIABLE: str(mark), **THREADS})
    try:
        with Client(address) as client:
            ended = convert(client, inputs, folder / "output")
        assert ended == (in_one_go, ("compress/1-merge_lora", "evaluate/merge"))
        assert mark.exists(), f"no process passed {point}"
    finally:
        server.kill()


@pytest.mark.parametrize("point", random.Random(SHARDS).sample(POINTS, 1))
def test_a_merge_killed_at_a_shard_resumes_to_the_same_bytes(point, tmp_path, inputs, in_one_go):
    check(point, tmp_path, inputs, in_one_go)


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_a_merge_killed_at_any_shard_resumes_to_the_same_bytes(point, tmp_path, inputs, in_one_go):
    check(point, tmp_path, inputs, in_one_go)
