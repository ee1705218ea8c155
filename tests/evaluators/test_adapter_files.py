"""An adapter that PEFT would not read whole is compared as the one that it stands for: wrapped names, and shards."""

from __future__ import annotations

import json
import shutil

import pytest
import transformers
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from tests.evaluators.merges import check, merge_by_peft, save_base, train

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A Llama, an adapter on two kinds of its layers, and both merged by PEFT."""
    root = tmp_path_factory.mktemp("adapter_files")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=32, max_position_embeddings=16, **sizes)
    base = save_base(transformers.LlamaForCausalLM(config), root / "base")
    adapter = train(base, root / "adapter", LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    return base, adapter, merge_by_peft(base, adapter, root / "merged")


def renamed(adapter, folder, rename):
    shutil.copytree(adapter, folder)
    save_file({rename(name): tensor for name, tensor in load_file(adapter / WEIGHTS).items()}, folder / WEIGHTS)
    return folder


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: f"module.{name}",
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module._orig_mod.{name}",
        lambda name: f"_orig_mod.module.{name}",
        lambda name: f"_fsdp_wrapped_module.{name}",
        lambda name: name.replace("layers.0.", "layers.0._fsdp_wrapped_module."),
        lambda name: name.replace("self_attn.", "_orig_mod.self_attn."),
    ],
    ids=["ddp", "compiled", "ddp compiled", "compiled ddp", "fsdp", "fsdp inside", "compiled inside"],
)
def test_names_that_training_wrappers_left_hide_no_tensor(folders, tmp_path, rename):
    base, adapter, merged = folders

    assert check(base, merged, renamed(adapter, tmp_path / "wrapped", rename)) == check(base, merged, adapter)


def test_a_module_of_a_wrappers_name_keeps_it(folders, tmp_path):
    """`module` within a name is the model's own: no blanket replacement."""
    base, adapter, merged = folders
    other = renamed(adapter, tmp_path / "own", lambda name: name.replace("layers.0.", "layers.0.module."))

    assert any(".layers.0.module." in name for name in check(base, merged, other)["not_compared"])


def test_shards_are_one_adapter(folders, tmp_path):
    base, adapter, merged = folders
    tensors = sorted(load_file(adapter / WEIGHTS).items())
    shutil.copytree(adapter, sharded := tmp_path / "sharded")
    (sharded / WEIGHTS).unlink()
    weight_map = {}
    for number, part in enumerate((dict(tensors[:3]), dict(tensors[3:])), 1):
        file = f"adapter_model-0000{number}-of-00002.safetensors"
        save_file(part, sharded / file)
        weight_map |= dict.fromkeys(part, file)
    (sharded / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": weight_map}))

    assert check(base, merged, sharded) == check(base, merged, adapter)


def test_what_is_copied_is_gone_afterwards(folders, tmp_path, monkeypatch):
    base, adapter, merged = folders
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    wrapped = renamed(adapter, tmp_path / "wrapped", lambda name: f"module.{name}")

    check(base, merged, wrapped)

    assert list(tmp_path.iterdir()) == [wrapped]
