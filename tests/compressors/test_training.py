"""Training: an interrupted run ends with the bytes of an undisturbed one, and never worse than its start."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from compressors.batches import Batch, Examples, encode
from compressors.checkpoints import FACTS, TENSORS
from compressors.distillation import Outputs, logits_forward, model_forward
from compressors.folders import load_model, load_tokenizer
from compressors.optimization import learning_rate
from compressors.recover import enable_activation_checkpointing, freeze
from compressors.stages import Data, Progress
from compressors.training import Distillation, Student, TrainingResult, distil
from modelpress.errors import FailedPrecondition, InvalidRecipe
from modelpress.recipes import TrainingArguments

ARGUMENTS = TrainingArguments(steps=12, batch_size=8, checkpoint_every=3, learning_rate=2e-3, hidden_state_weight=1.0)


class StoppedError(Exception):
    pass


class Desk:
    """A monitor that keeps checkpoints and can stop a run after a step."""

    def __init__(self, folder: Path, *, stop_after: int = 0) -> None:
        self.folder, self.stop_after = folder, stop_after
        self.seen: list[Progress] = []

    def progress(self, progress: Progress) -> None:
        self.seen.append(progress)
        if progress.step == self.stop_after:
            raise StoppedError

    def save_checkpoint(self, step: int, write: Callable[[Path], None]) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        write(self.folder)

    def checkpoint(self) -> Path | None:
        return self.folder if self.folder.exists() else None


@pytest.fixture(scope="module")
def examples(bert: Path, data: Data) -> tuple[Examples, Examples]:
    tokenizer, config = load_tokenizer(bert), load_model(bert).config
    return tuple(encode(texts, tokenizer, config=config, max_length=16) for texts in (data.train, data.held_out))


@pytest.fixture
def task(bert: Path, examples) -> Callable[..., Distillation]:
    """A new, equal task at every call: the teacher with noise on its FFNs as the student."""

    def make(arguments: TrainingArguments = ARGUMENTS, *, seed: int = 5, noise: float = 0.2) -> Distillation:
        student, generator = load_model(bert), torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in student.named_parameters():
                if "dense.weight" in name:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * noise)
        freeze(student, modules=("bert.embeddings",))
        return Distillation(
            student=Student(student, model_forward(student)),
            teacher=model_forward(load_model(bert)),
            train=examples[0],
            held_out=examples[1],
            arguments=arguments,
            seed=seed,
        )

    return make


def train(task: Distillation, desk: Desk) -> tuple[TrainingResult, dict[str, Tensor]]:
    result = distil(task, desk)
    return result, {name: tensor.clone() for name, tensor in task.student.module.state_dict().items()}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("stops", [(3,), (5,), (11,), (12,), (1, 4, 8)])
def test_a_resumed_run_ends_like_an_undisturbed_one(task, tmp_path: Path, stops: tuple[int, ...]) -> None:
    arguments = ARGUMENTS.model_copy(update={"gradient_accumulation": 2})
    undisturbed, expected = train(task(arguments), Desk(tmp_path / "undisturbed"))

    for stop in stops:
        with pytest.raises(StoppedError):
            distil(task(arguments), Desk(tmp_path / "checkpoint", stop_after=stop))
    resumed, state = train(task(arguments), Desk(tmp_path / "checkpoint"))

    assert_same(state, expected)
    assert resumed == undisturbed


def test_equal_tasks_end_with_equal_bytes_and_another_seed_does_not(task, tmp_path: Path) -> None:
    (_, first), (_, again) = (train(task(), Desk(tmp_path / name)) for name in "ab")
    _, other = train(task(seed=6), Desk(tmp_path / "c"))

    assert_same(first, again)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_training_brings_the_student_closer(task, tmp_path: Path) -> None:
    result, _ = train(task(), Desk(tmp_path / "checkpoint"))

    assert result.after["kl"] < 0.7 * result.before["kl"]
    assert result.best_step > 0
    assert [point.step for point in result.curve] == list(range(1, 13))
    assert [point.step for point in result.curve if point.held_out] == [3, 6, 9, 12]


def test_training_never_ends_worse_than_its_start(task, tmp_path: Path) -> None:
    harmful = ARGUMENTS.model_copy(update={"learning_rate": 1.0})
    before = task(noise=0.0).student.module.state_dict()
    result, state = train(task(harmful, noise=0.0), Desk(tmp_path / "checkpoint"))

    assert (result.best_step, result.after) == (0, result.before)
    assert_same(state, before)


def test_only_what_is_trained_changes(task, tmp_path: Path) -> None:
    start = task()
    before = {name: tensor.clone() for name, tensor in start.student.module.state_dict().items()}
    _, after = train(start, Desk(tmp_path / "checkpoint"))

    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("embeddings" not in name for name in changed)


def test_no_steps_measure_and_change_nothing(task, tmp_path: Path) -> None:
    none = task(ARGUMENTS.model_copy(update={"steps": 0}))
    before = {name: tensor.clone() for name, tensor in none.student.module.state_dict().items()}
    result, after = train(none, Desk(tmp_path / "checkpoint"))

    assert result.before == result.after and result.curve == ()
    assert_same(after, before)


def test_a_diverging_loss_fails_naming_step_and_rate(task, tmp_path: Path) -> None:
    start = task()
    forward, calls = start.student.forward, []

    def poisoned(batch: Batch) -> Outputs:
        calls.append(1)
        outputs = forward(batch)
        return Outputs(
            outputs.logits * float("nan") if torch.is_grad_enabled() else outputs.logits, outputs.hidden_states
        )

    student = Student(start.student.module, poisoned)
    broken = Distillation(student, start.teacher, start.train, start.held_out, ARGUMENTS, seed=0)
    with pytest.raises(InvalidRecipe, match=r"loss became nan at step 1 of 12.*learning_rate \(now 0\.002\)"):
        distil(broken, Desk(tmp_path / "checkpoint"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"learning_rate": 1e-3}, "arguments"), ({"batch_size": 4}, "arguments")],
)
def test_a_checkpoint_of_another_run_is_refused(task, tmp_path: Path, changes: dict[str, object], named: str) -> None:
    with pytest.raises(StoppedError):
        distil(task(), Desk(tmp_path / "checkpoint", stop_after=3))

    with pytest.raises(FailedPrecondition, match=named):
        distil(task(ARGUMENTS.model_copy(update=changes)), Desk(tmp_path / "checkpoint"))
    with pytest.raises(FailedPrecondition, match="seed"):
        distil(task(seed=99), Desk(tmp_path / "checkpoint"))


def test_another_thread_count_is_refused(task, tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        distil(task(), Desk(tmp_path / "checkpoint", stop_after=3))
    facts = json.loads((tmp_path / "checkpoint" / FACTS).read_text())
    facts["identity"]["threads"] += 1
    (tmp_path / "checkpoint" / FACTS).write_text(json.dumps(facts))

    with pytest.raises(FailedPrecondition, match="threads"):
        distil(task(), Desk(tmp_path / "checkpoint"))


def test_a_checkpoint_is_safetensors_and_json(task, tmp_path: Path) -> None:
    train(task(), Desk(tmp_path / "checkpoint"))

    assert sorted(file.name for file in (tmp_path / "checkpoint").iterdir()) == [FACTS, TENSORS]


def test_the_callers_random_state_is_left_alone(task, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    train(task(), Desk(tmp_path / "checkpoint"))

    assert torch.equal(torch.get_rng_state(), before)


def test_accumulating_batches_is_one_step_on_their_mean(task, tmp_path: Path) -> None:
    """Two batches per step: half as many rows per batch, the same number of steps and of progress reports."""
    desk = Desk(tmp_path / "checkpoint")
    train(task(ARGUMENTS.model_copy(update={"gradient_accumulation": 2, "batch_size": 4})), desk)

    assert [progress.step for progress in desk.seen] == list(range(1, 13))
    assert all(math.isfinite(progress.loss) for progress in desk.seen)


def test_activation_checkpointing_trains_the_same(task, tmp_path: Path) -> None:
    _, expected = train(task(), Desk(tmp_path / "plain"))
    checkpointed, calls = task(), []
    model = checkpointed.student.module
    enable_activation_checkpointing(model)
    model.get_submodule("bert.encoder.layer.0.intermediate.dense").register_forward_hook(
        lambda *_: calls.append(torch.is_grad_enabled())
    )
    _, state = train(checkpointed, Desk(tmp_path / "checkpointed"))

    assert_same(state, expected)
    assert sum(calls) == 2 * ARGUMENTS.steps  # every batch: forward, and again in the backward pass


def test_a_plain_module_that_returns_logits_can_be_a_student(examples, bert: Path, tmp_path: Path) -> None:
    class Bag(nn.Module):
        """Logits from a mean of embeddings: no hidden states."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.head = nn.Embedding(44, 8), nn.Linear(8, 2)

        def forward(self, ids: Tensor, mask: Tensor, types: Tensor | None = None) -> tuple[Tensor]:
            mask = mask.unsqueeze(-1).float()
            return (self.head((self.table(ids) * mask).sum(1) / mask.sum(1)),)

    bag = Bag()
    task = Distillation(
        Student(bag, logits_forward(bag)), model_forward(load_model(bert)), *examples, ARGUMENTS, seed=0
    )
    result = distil(task, Desk(tmp_path / "checkpoint"))

    assert result.after["kl"] < result.before["kl"]
    assert any("hidden_state_weight was not used" in warning for warning in result.warnings)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kl_weight": 0, "hidden_state_weight": 0}, "kl_weight"),
        ({"mixed_precision": "bfloat16"}, "bfloat16 needs CUDA"),
    ],
)
def test_impossible_arguments_are_refused(task, changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRecipe, match=field):
        task(ARGUMENTS.model_copy(update=changes))


def test_the_rate_rises_to_its_peak_and_falls_on_a_cosine() -> None:
    rates = [learning_rate(step, steps=12, peak=1.0, warmup_fraction=0.25) for step in range(12)]

    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[3:] == [pytest.approx(0.5 * (1 + math.cos(math.pi * k / 9))) for k in range(9)]
