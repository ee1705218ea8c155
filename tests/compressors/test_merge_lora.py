"""Merging: exact arithmetic, nothing else touched, nothing dropped, everything that does not fit refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compressors import merge_lora
from compressors.lora_adapters import LowRank, Replacement, Shift
from compressors.merge_lora import merge_tensor
from compressors.stages import Adapter, Job, SilentMonitor
from modelpress.errors import InvalidModel, InvalidRecipe
from modelpress.recipes import MergeLora
from modelpress.reports import StageRecord

QUERY = "bert.encoder.layer.0.attention.self.query"
PREFIX = "base_model.model."


def merge(
    base: Path, output: Path, *adapters: Adapter, names: tuple[str, ...] = ()
) -> tuple[StageRecord, dict[str, Tensor]]:
    job = Job(model=base, output=output, seed=0, adapters=adapters)
    record = merge_lora.run(MergeLora(adapters=names), job, SilentMonitor())
    return record, load_file(output / "model.safetensors")


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / ("adapter_model.safetensors" if "adapter" in folder.name else "model.safetensors"))


def change(adapter: Path, edit: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    edited = {key: tensor.clone() for key, tensor in edit(tensors_of(adapter)).items()}
    save_file(edited, adapter / "adapter_model.safetensors")
    return adapter


def configure(adapter: Path, **fields: object) -> Path:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return adapter


def b_times_a(adapter: Path, module: str) -> Tensor:
    tensors = tensors_of(adapter)
    return tensors[f"{PREFIX}{module}.lora_B.weight"] @ tensors[f"{PREFIX}{module}.lora_A.weight"]


def test_a_low_rank_edit_adds_scaling_times_b_a() -> None:
    w, a, b = torch.zeros(2, 3), torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0], [-1.0]])

    assert merge_tensor(w, [(LowRank(a, b, scaling=0.5), 1.0)]).tolist() == [[0.5, 1.0, 1.5], [-0.5, -1.0, -1.5]]


def test_edits_add_up_with_their_weights() -> None:
    base = torch.tensor([1.0, 2.0])
    edits = [(Replacement(torch.tensor([3.0, 2.0])), 0.5), (Shift(torch.tensor([1.0, 1.0]), scaling=2.0), 0.25)]

    assert merge_tensor(base, edits).tolist() == [1 + 0.5 * 2 + 0.25 * 2, 2 + 0.25 * 2]


def test_a_bfloat16_tensor_is_rounded_once() -> None:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(16, 16, generator=generator).bfloat16()
    a, b = torch.randn(4, 16, generator=generator), torch.randn(16, 4, generator=generator)

    assert torch.equal(merge_tensor(w, [(LowRank(a, b, 1.5), 1.0)]), (w.float() + (b @ a) * 1.5).bfloat16())


def test_the_output_is_base_plus_delta_and_keeps_every_other_byte(bert: Path, make_adapter, tmp_path: Path) -> None:
    adapter = make_adapter(r=4, lora_alpha=6)
    record, merged = merge(bert, tmp_path / "merged", Adapter("one", adapter))

    base = tensors_of(bert)
    assert torch.equal(merged[f"{QUERY}.weight"], base[f"{QUERY}.weight"] + b_times_a(adapter, QUERY) * 1.5)
    assert torch.equal(merged["classifier.weight"], tensors_of(adapter)[f"{PREFIX}classifier.weight"])
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert set(record.touched) == changed == set(record.details["relative_change"])
    assert changed == {
        f"bert.encoder.layer.{i}.attention.self.{part}.weight" for i in (0, 1) for part in ("query", "value")
    } | {"classifier.weight", "classifier.bias"}
    assert record.details["tensors_byte_identical"] == len(base) - 6


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({"use_rslora": True, "r": 4, "lora_alpha": 6}, 6 / math.sqrt(4)),
        ({"alpha_pattern": {"query": 20}, "r": 4}, 20 / 4),
        ({"rank_pattern": {"layer.0.attention.self.query": 2}, "lora_alpha": 6}, 6 / 2),
        ({"target_modules": r".*\.layer\.0\..*query", "r": 3, "lora_alpha": 3}, 1.0),
        ({"target_modules": "all-linear", "r": 2, "lora_alpha": 4}, 2.0),
        ({"layers_to_transform": [0], "layers_pattern": "layer", "r": 2, "lora_alpha": 4}, 2.0),
        ({"exclude_modules": ["value"], "r": 2, "lora_alpha": 4}, 2.0),
    ],
)
def test_every_scaling_setting_counts(bert: Path, make_adapter, tmp_path: Path, fields, scaling: float) -> None:
    adapter = make_adapter(**fields)
    record, merged = merge(bert, tmp_path / "merged", Adapter("one", adapter))

    delta = merged[f"{QUERY}.weight"] - tensors_of(bert)[f"{QUERY}.weight"]
    assert torch.allclose(delta, b_times_a(adapter, QUERY) * scaling, atol=1e-6)
    assert record.details["adapters"][0]["max_abs_logit_difference"] < 1e-5


@pytest.mark.parametrize(
    "fields",
    [{"bias": "all"}, {"bias": "lora_only"}, {"lora_bias": True}, {"bias": "all", "modules_to_save": ["pooler"]}],
)
def test_trained_biases_are_merged_as_peft_runs_them(bert: Path, make_adapter, tmp_path: Path, fields) -> None:
    adapter = make_adapter(**fields)
    record, merged = merge(bert, tmp_path / "merged", Adapter("one", adapter))

    assert record.details["adapters"][0]["max_abs_logit_difference"] < 1e-5
    assert f"{QUERY}.bias" in record.touched
    if fields.get("lora_bias"):
        trained = tensors_of(adapter)[f"{PREFIX}{QUERY}.lora_B.bias"]
        assert torch.allclose(merged[f"{QUERY}.bias"], tensors_of(bert)[f"{QUERY}.bias"] + 1.5 * trained)


def test_several_adapters_add_up_with_their_weights(bert: Path, make_adapter, tmp_path: Path) -> None:
    one, two = make_adapter(seed=1), make_adapter(seed=2, r=2, lora_alpha=2)
    _, merged = merge(bert, tmp_path / "merged", Adapter("one", one, 0.5), Adapter("two", two, -2.0))

    expected = tensors_of(bert)[f"{QUERY}.weight"] + 0.5 * 1.5 * b_times_a(one, QUERY) - 2.0 * b_times_a(two, QUERY)
    assert torch.allclose(merged[f"{QUERY}.weight"], expected, atol=1e-6)


def test_only_the_adapters_that_the_recipe_names_are_merged(bert: Path, make_adapter, tmp_path: Path) -> None:
    one, two = Adapter("one", make_adapter(seed=1)), Adapter("two", make_adapter(seed=2))

    _, chosen = merge(bert, tmp_path / "chosen", one, two, names=("two",))
    _, alone = merge(bert, tmp_path / "alone", two)
    assert all(torch.equal(chosen[name], alone[name]) for name in alone)
    with pytest.raises(InvalidRecipe, match=r"'three'.*one, two"):
        merge(bert, tmp_path / "unknown", one, two, names=("three",))


@pytest.mark.parametrize(
    ("fields", "mentions"),
    [
        ({"peft_type": "LOHA"}, ["peft_type", "LOHA"]),
        ({"use_dora": True}, ["use_dora"]),
        ({"layer_replication": [[0, 1], [0, 1]]}, ["layer_replication"]),
        ({"trainable_token_indices": [1]}, ["trainable_token_indices"]),
        ({"target_parameters": ["query.weight"]}, ["target_parameters"]),
        ({"megatron_config": {"a": 1}}, ["megatron_config"]),
        ({"fan_in_fan_out": True}, ["fan_in_fan_out"]),
        ({"init_lora_weights": "pissa"}, ["init_lora_weights", "pissa"]),
        ({"a_setting_of_tomorrow": True}, ["a_setting_of_tomorrow"]),
        ({"r": 0}, ["r:"]),
        ({"r": 5}, ["lora_A", "[4, 16]", "[5, 16]"]),
        ({"bias": "some"}, ["bias"]),
        ({"rank_pattern": {"(": 4}}, ["rank_pattern", "regular expression"]),
        ({"target_modules": ["query", "value", "key"]}, ["self.key", "target_modules"]),
        ({"target_modules": ["value"]}, ["self.query", "target_modules"]),
        ({"target_modules": []}, ["target_modules"]),
        ({"modules_to_save": ["classifier", "pooler"]}, ["bert.pooler.dense"]),
        ({"modules_to_save": [], "task_type": None}, ["classifier", "modules_to_save"]),
        ({"task_type": "CAUSAL_LM"}, ["task_type", "CAUSAL_LM"]),
    ],
)
def test_a_setting_that_is_not_carried_out_is_refused(bert, make_adapter, tmp_path, fields, mentions) -> None:
    adapter = configure(make_adapter(), **fields)

    assert_refused(bert, adapter, tmp_path / "merged", mentions)


def without(*parts: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {key: t for key, t in tensors.items() if not any(part in key for part in parts)}


A, B = f"{PREFIX}{QUERY}.lora_A.weight", f"{PREFIX}{QUERY}.lora_B.weight"


@pytest.mark.parametrize(
    ("edit", "mentions"),
    [
        (without(A), [A, "missing"]),
        (without(B), [B, "missing"]),
        (without("layer.1."), ["layer.1.attention.self.query", "another base"]),
        (without("classifier.weight"), ["classifier.weight"]),
        (lambda t: t | {A.replace("layer.0", "layer.7"): t[A]}, ["layer.7"]),
        (lambda t: t | {f"{PREFIX}bert.embeddings.word_embeddings.lora_embedding_A": t[A]}, ["lora_embedding_A"]),
        (lambda t: t | {f"{PREFIX}{QUERY}.lora_magnitude_vector": torch.ones(16)}, ["lora_magnitude_vector"]),
        (lambda t: t | {f"{PREFIX}{QUERY}.lora_B.bias": torch.ones(16)}, ["lora_B.bias", "lora_bias"]),
        (lambda t: t | {f"{PREFIX}{QUERY}.bias": torch.ones(16)}, [f"{QUERY}.bias"]),
        (lambda t: t | {"query.lora_A.weight": t[A]}, ["query.lora_A.weight", PREFIX]),
        (lambda t: t | {A: torch.zeros(4, 8)}, [A, "[4, 8]", "[4, 16]"]),
        (lambda t: t | {B: torch.zeros(8, 4)}, [B, "[8, 4]", "[16, 4]"]),
        (lambda t: t | {A: t[A].reshape(4, 16, 1, 1)}, [A, "[4, 16, 1, 1]"]),
        (lambda t: t | {f"{PREFIX}classifier.weight": torch.zeros(3, 16)}, ["classifier.weight", "[3, 16]", "[2, 16]"]),
        (lambda t: t | {A: torch.full((4, 16), float("nan"))}, [A, "NaN"]),
        (lambda t: t | {A: torch.zeros(4, 16, dtype=torch.int8)}, [A, "int8"]),
        (lambda _: {}, ["no tensors"]),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(bert, make_adapter, tmp_path, edit, mentions) -> None:
    adapter = change(make_adapter(), edit)

    assert_refused(bert, adapter, tmp_path / "merged", mentions)


def test_an_adapter_that_overflows_is_refused_as_the_adapter_s_fault(bert: Path, make_adapter, tmp_path: Path) -> None:
    adapter = configure(make_adapter(), lora_alpha=1e39)

    assert_refused(bert, adapter, tmp_path / "merged", ["'one'", "NaN or infinity", "lora_alpha"])


def test_an_untrained_adapter_is_refused(bert: Path, make_adapter, tmp_path: Path) -> None:
    adapter = configure(make_adapter(), modules_to_save=None, task_type=None)
    change(adapter, lambda t: {k: v * (0 if "lora_B" in k else 1) for k, v in t.items() if "classifier" not in k})

    with pytest.raises(InvalidModel, match="lora_B are all zero"):
        merge(bert, tmp_path / "merged", Adapter("one", adapter))


def test_modules_to_save_may_name_what_neither_base_nor_adapter_has(bert: Path, make_adapter, tmp_path: Path) -> None:
    adapter = configure(make_adapter(), modules_to_save=["classifier", "score"])

    assert merge(bert, tmp_path / "merged", Adapter("one", adapter))[0].touched


def test_a_pickled_adapter_is_refused_with_the_cure(bert: Path, make_adapter, tmp_path: Path) -> None:
    adapter = make_adapter()
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")

    assert_refused(bert, adapter, tmp_path / "merged", ["safetensors"])


def test_an_edit_of_a_tied_tensor_is_refused() -> None:
    model = torch.nn.ModuleDict({"table": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 2)})
    model["head"].weight = model["table"].weight

    merge_lora.check_untied(model, ["head.bias"])
    with pytest.raises(InvalidModel, match=r"'head\.weight'.*tied to table\.weight.*tie_word_embeddings"):
        merge_lora.check_untied(model, ["head.weight"])


def assert_refused(bert: Path, adapter: Path, output: Path, mentions: list[str]) -> None:
    with pytest.raises(InvalidModel) as error:
        merge(bert, output, Adapter("one", adapter))
    assert all(word in error.value.message for word in mentions), error.value.message
    assert not output.exists()
