"""Recovery: a pruned student ends closer to its teacher, or the stage says that it gained nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from compressors import prune, recover
from compressors.distillation import model_forward, predict
from compressors.folders import load_model, load_tokenizer
from compressors.stages import Data, Job, SilentMonitor
from compressors.training import encode_data
from modelpress.errors import FailedPrecondition, InvalidRecipe
from modelpress.recipes import Prune, Recover

ARGUMENTS = Recover(steps=20, batch_size=16, checkpoint_every=5, learning_rate=2e-3, hidden_state_weight=1.0)


@pytest.fixture(scope="module")
def pruned(bert: Path, data: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("pruned") / "model"
    prune.run(Prune(ratio=0.5), Job(model=bert, output=output, seed=0, data=data), SilentMonitor())
    return output


def test_recovery_brings_the_saved_model_closer_to_its_teacher(bert, pruned, data, tmp_path: Path) -> None:
    job = Job(model=pruned, output=tmp_path / "recovered", seed=0, teacher=bert, data=data)
    record = recover.run(ARGUMENTS, job, SilentMonitor())

    assert record.after["kl"] < 0.8 * record.before["kl"]
    teacher, saved = load_model(bert), load_model(tmp_path / "recovered")
    _, held_out = encode_data(data, load_tokenizer(bert), config=teacher.config, max_length=128)
    logits = [predict(model_forward(model), held_out).log_softmax(-1) for model in (teacher, saved)]
    kl = float((logits[0].exp() * (logits[0] - logits[1])).sum(-1).mean())
    assert kl == pytest.approx(record.after["kl"], rel=1e-4)


def test_embeddings_keep_their_bytes_and_the_record_names_what_changed(bert, pruned, data, tmp_path: Path) -> None:
    job = Job(model=pruned, output=tmp_path / "recovered", seed=0, teacher=bert, data=data)
    record = recover.run(ARGUMENTS, job, SilentMonitor())

    before, after = (load_file(folder / "model.safetensors") for folder in (pruned, tmp_path / "recovered"))
    assert {name for name in before if not torch.equal(before[name], after[name])} == set(record.touched)
    assert not any("embeddings.word" in name for name in record.touched)
    assert record.details["trained_parameters"] < sum(t.numel() for t in after.values())


def test_recovery_that_gains_nothing_fails(bert: Path, data: Data, tmp_path: Path) -> None:
    job = Job(model=bert, output=tmp_path / "recovered", seed=0, teacher=bert, data=data)

    with pytest.raises(FailedPrecondition, match="gained nothing"):
        recover.run(ARGUMENTS, job, SilentMonitor())
    assert not (tmp_path / "recovered").exists()


@pytest.mark.parametrize(
    ("missing", "mention"), [("data", "training data"), ("teacher", "teacher"), ("steps", "0 steps")]
)
def test_what_recovery_needs_is_asked_for(bert, pruned, data, tmp_path, missing: str, mention: str) -> None:
    given = {"data": data, "teacher": bert, missing: None}
    job = Job(model=pruned, output=tmp_path / "out", seed=0, data=given["data"], teacher=given["teacher"])
    arguments = ARGUMENTS.model_copy(update={"steps": 0 if missing == "steps" else 5})

    with pytest.raises(InvalidRecipe, match=mention):
        recover.run(arguments, job, SilentMonitor())
