"""What cannot be compared is named with its reason; memory is set by the largest tensor; errors name the tensor."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from evaluators.architectures import model_class
from evaluators.merge_check import CheckedAdapter, CheckSetting, MergedModels, StoredModel, check_merge
from evaluators.stored_weights import NotComparable, StoredWeights
from modelpress.errors import InvalidModel
from modelpress.merge_recipes import MergeLora
from modelpress.merge_reports import MergeReport
from tests.evaluators.merges import CountedFolder, check, check_layers, load, merge_by_peft, rewrite, save_base, train

QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def base(tmp_path):
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))
    return save_base(model, tmp_path / "base")


@pytest.fixture
def adapter(base, tmp_path):
    return train(base, tmp_path / "adapter", LoraConfig(r=4, target_modules=["q_proj"]))


def with_file(adapter, folder, change):
    """The adapter's folder with the tensors that `change` makes of its own."""
    shutil.copytree(adapter, folder)
    save_file(change(load_file(adapter / "adapter_model.safetensors")), folder / "adapter_model.safetensors")
    return folder


def test_the_same_merge_gives_the_same_record_which_the_report_takes(base, adapter, tmp_path):
    merged, steps = merge_by_peft(base, adapter, tmp_path / "merged"), []
    found = check(base, merged, adapter, progress=lambda *step: steps.append(step))
    assert found == check(base, merged, adapter)
    report = MergeReport(**json.loads(json.dumps(found)), changed=2, byte_identical=19, largest_change=0.1)
    assert report.reference.startswith("peft ")
    assert report.logits.relative_difference < 1e-5
    assert steps == [(1, 2), (2, 2)]


def test_only_ranges_of_what_is_compared_are_read(base, adapter, tmp_path):
    base_source, merged_source = (CountedFolder(folder) for folder in (base, base))

    def fetch():
        raise AssertionError("no copy is made of a model that does not fit")

    check_merge(
        MergedModels(StoredModel(base_source, fetch), StoredModel(merged_source, fetch)),
        [CheckedAdapter("a", adapter, 1.0)],
        arguments=MergeLora(),
        setting=CheckSetting(seed=0, device="cpu", memory_limit_bytes=100_000_000, progress=lambda *_: None),
    )
    file_bytes = (base / "model.safetensors").stat().st_size
    query_bytes = 4 * load_file(base / "model.safetensors")[QUERY].numel()
    for source in (base_source, merged_source):
        assert source.bytes_read.count(query_bytes) >= 2
        assert sum(source.bytes_read) < file_bytes / 2


def test_memory_that_is_short_is_named_with_both_figures(base, adapter):
    found = check(base, base, adapter, memory_limit_bytes=100_000_000)
    assert found["layers"] == 2
    assert found["logits"] is None
    assert "100000000" in found["logits_missing"]
    assert str(StoredWeights.open(CountedFolder(base)).parameters) in found["logits_missing"]
    found = check(base, base, adapter, memory_limit_bytes=1000)
    assert (found["layers"], found["layer_difference"], found["layer"]) == (0, None, "")
    assert all("1000" in reason for reason in found["not_compared"].values())
    assert found["over_memory_limit"] == len(found["not_compared"]) == 2


@pytest.mark.parametrize("combination", ["ties", "dare_linear", "dare_ties"])
def test_what_peft_combines_otherwise_has_no_reference(base, adapter, combination):
    found = check(base, base, adapter, combination_type=combination, density=0.5)
    assert found["layers"] == 0
    assert combination in found["not_compared"]["*"]
    assert found["logits_missing"] == found["not_compared"]["*"]


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"architectures": ["torch"]}, "'torch'"),
        ({"architectures": ["AutoModelForCausalLM"]}, "'AutoModelForCausalLM'"),
        ({"architectures": ["BertModel"]}, "'BertModel'"),
        ({"model_type": "unheard"}, "'unheard'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
    ],
)
def test_an_architecture_without_a_reference_is_named(base, adapter, tmp_path, config, word):
    other = rewrite(base, tmp_path / "other", {}, **config)
    found = check(other, other, adapter)
    assert (found["layers"], found["layer_difference"]) == (0, None)
    assert word in found["not_compared"]["*"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", "LlamaForCausalLM"),
        ("architectures", 5),
        ("architectures", [["x"]]),
        ("model_type", ["llama"]),
        ("vocab_size", "64"),
        ("vocab_size", -1),
        ("vocab_size", 10**60),
        ("num_hidden_layers", "two"),
        ("num_hidden_layers", 2.5),
        ("num_hidden_layers", 1_000_000),
        ("num_labels", 10**9),
        ("num_attention_heads", 0),
        ("rope_parameters", "x"),
        ("tie_word_embeddings", "yes"),
        ("eos_token_id", "x"),
        ("id2label", ["a"]),
        ("num_labels", "x"),
        ("text_config", [1]),
        ("hidden_act", "os.system"),
        ("dtype", "evil"),
    ],
)
def test_a_config_of_which_no_model_is_made_is_named(base, adapter, tmp_path, field, value):
    """What transformers raises differs from field to field: none of it ends the conversion."""
    other = rewrite(base, tmp_path / "other", {}, **{field: value})
    found = check(other, other, adapter)
    assert (found["layers"], found["layer_difference"], found["logits"]) == (0, None, None)
    assert found["logits_missing"] == found["not_compared"]["*"] != ""


@pytest.mark.parametrize("name", ["LlamaConfig", "pipeline", "LlamaForCausalLM.from_pretrained", None])
def test_a_config_picks_only_classes_of_its_own_model_type(name):
    with pytest.raises(NotComparable):
        model_class({"model_type": "llama", "architectures": [name]})


def test_dora_and_saved_modules_have_no_weighted_sum(base, tmp_path):
    settings = {"use_dora": True, "modules_to_save": ["lm_head"]}
    adapter = train(base, tmp_path / "adapter", LoraConfig(r=4, target_modules=["v_proj"], **settings))
    found = check(base, base, adapter, weights=(0.5,))
    assert found["layers"] == 0
    assert "DoRA" in found["not_compared"]["model.layers.0.self_attn.v_proj"]
    assert "weighted sum" in found["not_compared"]["lm_head"]
    assert "weighted sum" in found["logits_missing"]


def test_a_tensor_that_peft_would_drop_is_named(base, adapter, tmp_path):
    stray = {"base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": torch.ones(4, 16)}
    found = check(base, base, with_file(adapter, tmp_path / "stray", lambda tensors: tensors | stray))
    assert "no place" in found["not_compared"]["model.layers.7.self_attn.q_proj.lora_A.weight"]


def test_half_of_a_pair_is_no_reference(base, adapter, tmp_path):
    def half(tensors):
        return {name: tensor for name, tensor in tensors.items() if "layers.0.self_attn.q_proj.lora_B" not in name}

    found = check(base, base, with_file(adapter, tmp_path / "half", half))
    assert "lora_B" in found["not_compared"]["model.layers.0.self_attn.q_proj"]


def test_an_initialisation_that_cannot_be_repeated_is_named(base, adapter, tmp_path):
    shutil.copytree(adapter, tmp_path / "corda")
    path = tmp_path / "corda" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"init_lora_weights": "corda"}))
    assert "corda" in check(base, base, tmp_path / "corda")["not_compared"]["*"]


def test_a_merged_tensor_of_another_shape_is_refused_with_both(base, adapter, tmp_path):
    wrong = rewrite(base, tmp_path / "wrong", {QUERY: torch.ones(16, 8)})
    with pytest.raises(InvalidModel, match=r"\[16, 8\].*\[16, 16\]"):
        check(base, wrong, adapter)


def test_a_merged_tensor_that_is_no_number_is_refused_by_name(base, adapter, tmp_path):
    wrong = rewrite(base, tmp_path / "wrong", {QUERY: torch.full((16, 16), torch.inf)})
    with pytest.raises(InvalidModel, match=r"model\.layers\.0\.self_attn\.q_proj"):
        check(base, wrong, adapter)


def test_shards_are_read_as_one_model(base, adapter, tmp_path):
    load(base).save_pretrained(tmp_path / "shards", max_shard_size="8KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 1
    merged = merge_by_peft(base, adapter, tmp_path / "merged")
    assert check_layers(tmp_path / "shards", merged, adapter)["layer_difference"] < 1e-6
