"""What a worker can be asked about language models. Glue only; the arithmetic is in compressors/ and evaluators/.

compare_tokens      baseline and candidate on every token of one dataset's texts; writes their figures
choices             both on the dataset's questions
generate            both continue the dataset's prompts greedily
language            figures of one comparison, with the sizes of both models
token_drift         figures of one comparison
language_parity     the compressed model's own logits against its export
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from compressors.stages import Calibration, WorkPlace
from evaluators import language
from evaluators.language import ComparedModels
from evaluators.onnx_language import measure_language_parity
from evaluators.runtimes import Resources
from modelpress.datasets import dataset_rows
from modelpress.digests import CHUNK_BYTES
from modelpress.evaluations import LanguageEvaluation
from modelpress.stored_folders import Source
from service.workers.protocol import Operation, Task, TaskResult


def work_place(task: Task) -> WorkPlace:
    """Where a streaming stage computes, with the dataset that it is calibrated on where it has one."""
    scratch = task.folder / "scratch"
    scratch.mkdir()
    return WorkPlace(scratch, task.device, task.threads, _calibration(task))


def _calibration(task: Task) -> Calibration | None:
    if "train" not in task.inputs:
        return None
    return Calibration(
        dataset=task.inputs["train"],
        digest=str(task.step.inputs["train"]),
        text_column=task.step.arguments["columns"]["text_column"],
        tokenizer=_companions(task.stored["model"], task.folder / "companions"),
    )


def _companions(model: Source, folder: Path) -> Path:
    """A copy of the model's folder without its weights, verified."""
    for path, entry in model.files.items():
        if path.endswith(".safetensors"):
            continue
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with model.stream(path) as stored, target.open("wb") as copy:
            for start in range(0, entry.size_bytes, CHUNK_BYTES):
                piece = memoryview(bytearray(min(CHUNK_BYTES, entry.size_bytes - start)))
                stored.read_into(piece)
                copy.write(piece)
            stored.finish()
    return folder


def _compare_tokens(task: Task) -> TaskResult:
    figures = language.compare_tokens(_models(task), **_measuring(task))
    figures.save(task.output)
    return TaskResult()


def _choices(task: Task) -> TaskResult:
    report = language.answer_questions(_models(task), **_measuring(task))
    return TaskResult({"choices": report.model_dump(mode="json") if report else None})


def _generate(task: Task) -> TaskResult:
    generations = language.generate(_models(task), **_measuring(task))
    return TaskResult({"generations": [generation.model_dump(mode="json") for generation in generations]})


def _language(task: Task) -> TaskResult:
    evaluation = LanguageEvaluation.model_validate(task.step.arguments)
    figures = language.load_token_figures(task.inputs["figures"])
    dataset = str(task.step.inputs["data"])
    measured = language.measure_language(figures, dataset=dataset, confidence=evaluation.confidence)
    footprint = language.measure_weight_footprint(task.inputs["baseline"], candidate=task.inputs["candidate"])
    warnings = [*measured["warnings"]]
    if "train" in task.inputs:
        column = evaluation.text_column
        warnings += seen_text_warnings(task.inputs["train"], task.inputs["data"], column=column)
    return TaskResult({**measured, "footprint": footprint.model_dump(mode="json"), "warnings": warnings})


def seen_text_warnings(train: Path, evaluation: Path, *, column: str) -> Iterator[str]:
    """A sentence where evaluation texts were calibrated on, too: the figures are then flattered."""
    seen, judged = (_texts(dataset, column) for dataset in (train, evaluation))
    if shared := len(judged & seen):
        yield (
            f"{shared} of the {len(judged)} different evaluation texts stand in the training dataset too: what "
            "calibration saw says little about quality"
        )


def _texts(dataset: Path, column: str) -> set[str]:
    """The different texts of a column, where rows have it."""
    return {row[column] for _, row in dataset_rows(dataset) if isinstance(row.get(column), str)}


def _token_drift(task: Task) -> TaskResult:
    arguments = task.step.arguments
    figures = language.load_token_figures(task.inputs["figures"])
    report = language.measure_token_drift(figures, probes=arguments["probes"], confidence=arguments["confidence"])
    return TaskResult(report.model_dump(mode="json"))


def _language_parity(task: Task) -> TaskResult:
    resources = Resources(task.device, task.threads)
    report = measure_language_parity(task.inputs["candidate"], reference=task.inputs["parity"], resources=resources)
    return TaskResult(report.model_dump(mode="json"))


def _models(task: Task) -> ComparedModels:
    return ComparedModels(task.inputs["baseline"], task.inputs["candidate"])


def _measuring(task: Task) -> dict[str, Any]:
    """What every measurement on rows is given beside the models."""
    return {
        "data": task.inputs["data"],
        "evaluation": LanguageEvaluation.model_validate(task.step.arguments),
        "resources": Resources(task.device, task.threads),
        "progress": task.progress,
    }


LANGUAGE_OPERATIONS: Mapping[str, Operation] = {
    "compare_tokens": Operation(_compare_tokens, language.VERSION),
    "choices": Operation(_choices, language.VERSION),
    "generate": Operation(_generate, language.VERSION),
    "language": Operation(_language, language.VERSION),
    "token_drift": Operation(_token_drift, language.VERSION),
    "language_parity": Operation(_language_parity, language.VERSION),
}
