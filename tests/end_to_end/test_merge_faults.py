"""Faults that merges elsewhere are known for, by the whole service: a merge is the model that was trained, or refused.

The reference is base and adapter run by PEFT, unmerged, or a formula where PEFT is wrong. The downloaded folder is
loaded as any user loads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from modelpress.client import Client
from modelpress.errors import InvalidModel, ModelpressError
from modelpress.manifests import ArtifactKind
from modelpress.reports import Verdict
from modelpress.requests import AdapterInput, ConversionRequest, Documents
from tests.compressors.lora_merges import (
    IDS,
    PREFIX,
    QUERY,
    WIDTH,
    Bases,
    delta,
    distance,
    factors,
    logits,
    save,
    train,
    write_adapter,
)
from tests.service.jobs.served import RealServer

POLICY = "gates: {merge_difference: {max: 0.005}, merge_logits: {max: 0.02}, merge_change: {max: 100.0}}"
Merge = Callable[..., Path]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    return Bases(tmp_path_factory.mktemp("bases"))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    server = RealServer(tmp_path_factory.mktemp("server") / "data")
    with Client(server.start(MODELPRESS_WORKERS_THREADS="1")) as client:
        yield client
    server.kill()


@pytest.fixture
def merge(client: Client, tmp_path: Path) -> Merge:
    def merge(base: Path, adapter: Path, **stage: Any) -> Path:
        """The merged model's folder, once it is APPROVED."""
        stages = [{"method": "merge_lora", **stage}, {"method": "export", "format": "safetensors"}]
        request = ConversionRequest(
            Documents(recipe=json.dumps({"stages": stages}), policy=POLICY),
            base=client.upload_folder(base, ArtifactKind.MODEL),
            adapters=(AdapterInput("one", client.upload_folder(adapter, ArtifactKind.ADAPTER)),),
        )
        done = client.wait(client.create_conversion(request).name, timeout_s=120)
        assert done.verdict is Verdict.APPROVED, done
        client.download(done.output, tmp_path / "output")
        return tmp_path / "output" / "model"

    return merge


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def loaded(folder: Path) -> Any:
    name = config_of(folder)["architectures"][0]
    return getattr(transformers, name).from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize(
    ("base", "settings"),
    [
        ("tied", {"target_modules": ["lm_head"]}),
        ("tied", {"target_modules": ["embed_tokens"]}),
        ("tied", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
        ("biased", {"target_modules": ["q_proj"], "lora_bias": True, "lora_alpha": 32}),
        ("biased", {"target_modules": ["q_proj"], "lora_bias": True, "use_rslora": True}),
        ("llama", {"target_modules": ["down_proj"], "r": 16, "lora_alpha": 16, "use_rslora": True}),
        ("gpt2", {"target_modules": ["c_attn", "c_proj"], "use_rslora": True}),
        ("llama", {"target_modules": ["q_proj", "v_proj"], "use_dora": True}),
        ("mixtral", {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)
def test_the_merged_model_answers_as_base_and_adapter(
    base: str, settings: dict[str, Any], bases: Bases, merge: Merge, tmp_path: Path
) -> None:
    trained = train(bases.model(base), **settings)
    merged = merge(bases.folder(base), save(trained, tmp_path / "adapter"))

    assert distance(logits(loaded(merged)), logits(trained)) < 1e-4
    if base == "tied":
        assert config_of(merged)["tie_word_embeddings"] is False


def test_a_bfloat16_model_is_rounded_once(bases: Bases, merge: Merge, tmp_path: Path) -> None:
    base, lora = bases.folder("llama", dtype=torch.bfloat16), factors(QUERY, WIDTH, WIDTH)
    adapter = write_adapter(tmp_path / "adapter", lora, target_modules=["q_proj"], layers_to_transform=[0])
    merged = load_file(merge(base, adapter) / "model.safetensors")

    before = load_file(base / "model.safetensors")
    name = f"{QUERY}.weight"
    assert torch.equal(merged[name], (before[name].float() + delta(lora, QUERY) * 2.0).bfloat16())
    assert all(torch.equal(merged[other], before[other]) for other in before if other != name)


def test_a_trained_classifier_on_a_language_model_is_a_classifier(bases: Bases, merge: Merge, tmp_path: Path) -> None:
    lora, head = factors(QUERY, WIDTH, WIDTH), torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(3))
    settings = {"target_modules": ["q_proj"], "layers_to_transform": [0], "modules_to_save": ["score"]}
    tensors = lora | {f"{PREFIX}score.weight": head}
    adapter = write_adapter(tmp_path / "adapter", tensors, task_type="SEQ_CLS", **settings)
    merged = merge(bases.folder("llama"), adapter, labels=["negative", "neutral", "positive"])

    config = config_of(merged)
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["id2label"] == {"0": "negative", "1": "neutral", "2": "positive"}
    model, body = loaded(merged), bases.model("llama").model
    with torch.no_grad():
        body.layers[0].self_attn.q_proj.weight += 2.0 * delta(lora, QUERY)
        wanted = body(input_ids=IDS).last_hidden_state @ head.T
        model.config.pad_token_id = None
        assert distance(model(input_ids=IDS).logits, wanted[:, -1]) < 1e-5


def _more_layers(tensors: dict[str, Any]) -> dict[str, Any]:
    return tensors | factors(QUERY.replace("layers.0", "layers.2"), WIDTH, WIDTH)


@pytest.mark.parametrize(
    ("change", "mentions"),
    [
        (_more_layers, ("layers.2", "q_proj")),
        (lambda tensors: {n: t for n, t in tensors.items() if "lora_B" not in n or "layers.1" in n}, ("lora_B",)),
        (lambda tensors: factors(QUERY, 64, 64), ("q_proj", "[64, 64]", "[32, 32]")),
        (lambda tensors: factors("transformer.h.0.attn.c_attn", 96, 32), ("c_attn",)),
        (lambda tensors: {n: t[:0] if "lora_A" in n else t for n, t in tensors.items()}, ("lora_A", "ZeRO")),
    ],
    ids=["a layer too many", "half a pair", "another width", "another architecture", "empty shards"],
)
def test_an_adapter_of_another_base_is_refused_and_nothing_runs(
    change: Callable[[dict[str, Any]], dict[str, Any]],
    mentions: tuple[str, ...],
    bases: Bases,
    client: Client,
    merge: Merge,
    tmp_path: Path,
) -> None:
    whole = factors(QUERY, WIDTH, WIDTH) | factors(QUERY.replace("layers.0", "layers.1"), WIDTH, WIDTH)
    tensors = change(whole)
    module = "c_attn" if any("c_attn" in name for name in tensors) else "q_proj"
    adapter = write_adapter(tmp_path / "adapter", tensors, target_modules=[module])
    before = [conversion.name for conversion in client.list()]
    with pytest.raises(InvalidModel) as error:
        merge(bases.folder("llama"), adapter)

    assert all(mention in error.value.message for mention in mentions), error.value.message
    assert [conversion.name for conversion in client.list()] == before


def test_lora_on_a_convolution_in_groups_is_refused_by_its_name(bases: Bases, merge: Merge, tmp_path: Path) -> None:
    module = "backbone.layers.0.mixer.conv1d"
    a, b = torch.ones(4, 32, 4), torch.ones(32, 4, 1)
    tensors = {f"{PREFIX}{module}.lora_A.weight": a, f"{PREFIX}{module}.lora_B.weight": b}
    adapter = write_adapter(tmp_path / "adapter", tensors, target_modules=["conv1d"])
    with pytest.raises(InvalidModel, match="conv1d"):
        merge(bases.folder("mamba"), adapter)


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "_orig_mod.module.", "_fsdp_wrapped_module."])
def test_a_training_wrappers_names_are_undone_in_an_adapter_and_told_of_in_a_base(
    wrapper: str, bases: Bases, client: Client, merge: Merge, tmp_path: Path
) -> None:
    lora = factors(QUERY, WIDTH, WIDTH)
    wrapped = {f"{wrapper}{name}": tensor for name, tensor in lora.items()}
    adapter = write_adapter(tmp_path / "adapter", wrapped, target_modules=["q_proj"], layers_to_transform=[0])
    merged = load_file(merge(bases.folder("llama"), adapter) / "model.safetensors")
    before = load_file(bases.folder("llama") / "model.safetensors")
    assert distance(merged[f"{QUERY}.weight"], before[f"{QUERY}.weight"] + 2.0 * delta(lora, QUERY)) < 1e-6

    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(config_of(bases.folder("llama"))))
    save_file({f"{wrapper}{name}": tensor for name, tensor in before.items()}, base / "model.safetensors")
    with pytest.raises(ModelpressError, match="save"):
        client.upload_folder(base, ArtifactKind.MODEL)
