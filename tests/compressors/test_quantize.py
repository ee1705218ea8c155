import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from compressors import quantize
from compressors.distillation import held_out_figures, logits_forward, model_forward, predict
from compressors.folders import load_model
from compressors.quantized_folder import RANGES, SETTINGS, read_quantization
from compressors.stages import Data, Job, SilentMonitor
from modelpress.digests import digest_file
from modelpress.errors import InvalidModel, InvalidRecipe
from modelpress.recipes import Quantize

QAT = Quantize(steps=6, batch_size=16, checkpoint_every=2, learning_rate=3e-3, calibration_examples=40)
PTQ = Quantize(scheme="int8_ptq", calibration_examples=40)
LAYERS = 2 * 6 + 2  # two layers of query, key, value, output and the two of the FFN; pooler and classifier


@pytest.fixture
def job(bert: Path, data: Data, tmp_path: Path) -> Job:
    return Job(model=bert, output=tmp_path / "output", seed=3, data=data, teacher=bert)


class StoppedError(Exception):
    pass


class Keeper(SilentMonitor):
    """Keeps the newest checkpoint in a folder, and stops the stage right after the one of `stop_at`."""

    def __init__(self, folder: Path, *, stop_at: int | None) -> None:
        self.folder, self.stop_at = folder, stop_at

    def save_checkpoint(self, step: int, write: Callable[[Path], None]) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        write(self.folder)
        if step == self.stop_at:
            raise StoppedError

    def checkpoint(self) -> Path | None:
        return self.folder if self.folder.exists() else None


def test_training_never_ends_worse_than_the_calibrated_start(job: Job) -> None:
    record = quantize.run(QAT, job, SilentMonitor())
    assert record.after["kl"] <= record.details["calibrated"]["kl"]
    assert record.before["kl"] == 0.0
    assert [point.step for point in record.curve if point.held_out] == [2, 4, 6]


def test_the_written_folder_rebuilds_the_graph_that_was_measured(job: Job, data: Data) -> None:
    record = quantize.run(QAT, job, SilentMonitor())
    model, graph, _ = quantize.rebuild(job.output)
    _, held_out = quantize._examples(data, job, model.config, max_length=QAT.max_length)
    teacher_NC = predict(model_forward(load_model(job.model)), held_out)
    again = held_out_figures(teacher_NC, predict(logits_forward(graph), held_out), held_out)
    assert again == record.after


def test_a_run_resumed_from_its_checkpoint_ends_with_the_same_bytes(job: Job, tmp_path: Path) -> None:
    whole = quantize.run(QAT, job, SilentMonitor())
    resumed = replace(job, output=tmp_path / "resumed")
    with pytest.raises(StoppedError):
        quantize.run(QAT, resumed, Keeper(tmp_path / "checkpoint", stop_at=4))
    assert quantize.run(QAT, resumed, Keeper(tmp_path / "checkpoint", stop_at=None)) == whole
    for name in ("model.safetensors", RANGES, SETTINGS):
        assert digest_file(job.output / name) == digest_file(resumed.output / name)


def test_post_training_needs_no_teacher_and_names_every_module(job: Job) -> None:
    record = quantize.run(PTQ, replace(job, teacher=None), SilentMonitor())
    assert (record.details["linears"], record.details["embeddings"]) == (LAYERS, 3)
    assert len(record.touched) == LAYERS + 3 and "bert.embeddings.word_embeddings" in record.touched
    assert record.after == record.details["calibrated"] and record.curve == ()


def test_the_settings_use_the_fields_of_compressed_tensors(job: Job) -> None:
    quantize.run(PTQ, job, SilentMonitor())
    weights = json.loads((job.output / SETTINGS).read_text())["weights"]
    assert weights == {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "channel",
        "group_size": None,
        "dynamic": False,
        "codes": [-63, 63],
    }


def test_ignored_modules_and_float_tables_are_left_out(job: Job) -> None:
    arguments = PTQ.model_copy(update={"ignore": ("classifier", "re:.*pooler"), "embeddings": "float32"})
    quantize.run(arguments, job, SilentMonitor())
    settings, _ = read_quantization(job.output)
    assert len(settings.linears) == LAYERS - 2 and settings.embeddings == ()
    words = "bert.embeddings.word_embeddings.weight"
    before, after = (load_file(folder / "model.safetensors") for folder in (job.model, job.output))
    assert torch.equal(before[words], after[words])


@pytest.mark.parametrize(
    ("arguments", "missing", "message"),
    [
        (QAT, "data", "needs training data"),
        (QAT, "teacher", "needs a teacher"),
        (QAT.model_copy(update={"mixed_precision": "bfloat16"}), "", "in float32"),
        (QAT.model_copy(update={"activation_checkpointing": True}), "", "cannot recompute"),
        (PTQ.model_copy(update={"ignore": ("lm_head",)}), "", "'lm_head' matches no linear layer"),
        (PTQ.model_copy(update={"ignore": ("re:.*",)}), "", "leaves no linear layer"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    job: Job, arguments: Quantize, missing: str, message: str
) -> None:
    with pytest.raises(InvalidRecipe, match=message):
        quantize.run(arguments, replace(job, **{missing: None}) if missing else job, SilentMonitor())
    assert not job.output.exists()


def test_settings_of_another_scheme_are_refused(job: Job) -> None:
    quantize.run(PTQ, job, SilentMonitor())
    settings = json.loads((job.output / SETTINGS).read_text())
    settings["weights"]["num_bits"] = 4
    (job.output / SETTINGS).write_text(json.dumps(settings))
    with pytest.raises(InvalidModel, match="another scheme than INT8"):
        read_quantization(job.output)
