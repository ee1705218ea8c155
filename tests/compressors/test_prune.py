"""Pruning: the least important neurons go whole, the rest keeps its bytes, plain loading reads the result."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from compressors import prune
from compressors.batches import collate
from compressors.folders import load_model, read_config
from compressors.measuring import random_examples
from compressors.prune import least_important, rounded_width
from compressors.stages import Data, Job, SilentMonitor
from modelpress.errors import InternalError, InvalidModel, InvalidRecipe
from modelpress.recipes import Prune
from modelpress.reports import StageRecord

LAYER = "bert.encoder.layer.{}."


def run(
    model: Path, output: Path, *, data: Data | None = None, teacher: Path | None = None, **arguments
) -> StageRecord:
    job = Job(model=model, output=output, seed=0, data=data, teacher=teacher)
    return prune.run(Prune(**{"importance": "magnitude", **arguments}), job, SilentMonitor())


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    rows = random_examples(model.config, seed=3)
    with torch.inference_mode():
        return model(**collate(rows, range(len(rows))).inputs).logits


def with_dead_neurons(bert: Path, folder: Path, dead: tuple[int, ...]) -> Path:
    """The model with neurons that nothing reads and that hold nothing."""
    shutil.copytree(bert, folder)
    tensors = load_file(folder / "model.safetensors")
    for layer in (0, 1):
        tensors[LAYER.format(layer) + "intermediate.dense.weight"][list(dead)] = 0
        tensors[LAYER.format(layer) + "intermediate.dense.bias"][list(dead)] = 0
        tensors[LAYER.format(layer) + "output.dense.weight"][:, list(dead)] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("importance", ["magnitude", "taylor"])
def test_dead_neurons_go_first_and_cost_nothing(bert, data, tmp_path: Path, importance: str) -> None:
    dead = (0, 3, 7, 8, 15, 16, 21, 31)
    model = with_dead_neurons(bert, tmp_path / "model", dead)
    record = run(model, tmp_path / "pruned", data=data, ratio=0.25, importance=importance)

    assert torch.allclose(logits(tmp_path / "pruned"), logits(model), atol=1e-5)
    assert record.details["neurons_per_layer"] == [24, 24]
    kept = [neuron for neuron in range(32) if neuron not in dead]
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "pruned"))
    for layer in map(LAYER.format, (0, 1)):
        assert torch.equal(
            after[f"{layer}intermediate.dense.weight"], before[f"{layer}intermediate.dense.weight"][kept]
        )
        assert torch.equal(after[f"{layer}intermediate.dense.bias"], before[f"{layer}intermediate.dense.bias"][kept])
        assert torch.equal(after[f"{layer}output.dense.weight"], before[f"{layer}output.dense.weight"][:, kept])


def test_everything_else_keeps_its_bytes(bert: Path, tmp_path: Path) -> None:
    record = run(bert, tmp_path / "pruned", ratio=0.5)

    before, after = (load_file(folder / "model.safetensors") for folder in (bert, tmp_path / "pruned"))
    assert before.keys() == after.keys()
    changed = {n for n in before if before[n].shape != after[n].shape or not torch.equal(before[n], after[n])}
    assert changed == set(record.touched)
    assert {name.split(".", 4)[-1] for name in changed} == {
        "intermediate.dense.weight",
        "intermediate.dense.bias",
        "output.dense.weight",
    }
    configs = [read_config(folder) for folder in (bert, tmp_path / "pruned")]
    assert configs[1] == configs[0] | {"intermediate_size": 16}


def test_the_record_counts_what_went(bert: Path, data: Data, tmp_path: Path) -> None:
    record = run(bert, tmp_path / "pruned", data=data, ratio=0.4)

    assert record.details["neurons_per_layer_before"] == 32
    assert record.details["neurons_per_layer"] == [16, 16]  # 19.2 rounded to a multiple of 8
    assert record.details["ratio_achieved"] == 0.5
    removed = 2 * 16 * (16 + 1 + 16)
    assert record.details["parameters_before"] - record.details["parameters_after"] == removed
    assert record.details["parameters_after"] == sum(
        t.numel() for t in load_file(tmp_path / "pruned/model.safetensors").values()
    )
    assert record.details["reload_max_abs_logit_difference"] == 0.0
    assert record.before["flips"] == 0 and record.after["kl"] > 0
    assert any("ratio 0.4 became 0.5" in warning for warning in record.warnings)


def test_quality_is_measured_against_the_teacher(bert: Path, data: Data, tmp_path: Path) -> None:
    run(bert, tmp_path / "once", ratio=0.25)
    record = run(tmp_path / "once", tmp_path / "twice", data=data, teacher=bert, ratio=0.34)

    assert record.before["kl"] > 0
    assert record.details["quality_against"] == "the teacher"


@pytest.mark.parametrize(
    ("width", "ratio", "round_to", "kept"), [(1536, 0.45, 8, 848), (32, 0.4, 8, 16), (32, 0.4, 1, 19), (10, 0.5, 3, 6)]
)
def test_widths_are_the_nearest_multiple(width: int, ratio: float, round_to: int, kept: int) -> None:
    assert rounded_width(width, Prune(ratio=ratio, round_to=round_to)) == kept


@pytest.mark.parametrize(
    ("ratio", "round_to", "mention"), [(0.01, 8, "nothing"), (0.99, 8, "everything"), (0.5, 64, "everything|nothing")]
)
def test_a_ratio_that_removes_nothing_or_everything_is_refused(bert, tmp_path, ratio, round_to, mention) -> None:
    with pytest.raises(InvalidRecipe, match=mention):
        run(bert, tmp_path / "pruned", ratio=ratio, round_to=round_to)
    assert not (tmp_path / "pruned").exists()


def test_equal_scores_go_in_order() -> None:
    assert least_important(torch.tensor([1.0, 0.0, 0.0, 0.0, 2.0]), 2) == [1, 2]


def test_taylor_without_data_is_refused(bert: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRecipe, match="taylor"):
        run(bert, tmp_path / "pruned", importance="taylor")


def test_scores_that_tell_nothing_are_refused(bert: Path, data: Data, tmp_path: Path) -> None:
    model = Path(shutil.copytree(bert, tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    tensors["classifier.weight"].zero_()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(InvalidModel, match=r"importance of 'bert\.encoder\.layer\.0"):
        run(model, tmp_path / "pruned", data=data, importance="taylor")


def test_neurons_that_reach_further_are_not_cut(bert: Path) -> None:
    model = load_model(bert)
    graph = prune.dependency_graph(model, collate(random_examples(model.config, seed=0), range(4)).inputs)
    query, key = (model.get_submodule(f"bert.encoder.layer.0.attention.self.{name}") for name in ("query", "key"))

    with pytest.raises(InternalError, match="reach beyond"):
        prune.remove_neurons(graph, (query, key), removed=[0])
