"""What a worker can be asked: a literal table. Glue only; the arithmetic is in compressors/ and evaluators/.

    compress/<method>   one recipe stage, `export` too; writes a model folder, what streams straight into the store
    merge_check         a merged model as it is stored, against base plus adapters
    predict, probe      one exported model on one dataset; writes predictions (with labels, without)
    quality             two predictions of one labelled dataset
    parity              the compressed model's own logits against its export
    latency             baseline and candidate, timed in turn
    drift               two predictions of one probe dataset

What is asked about language models beside: `language_operations`.

The versions are those of the compressors and evaluators and part of every cache key; a test fails where a source
changed and its version did not.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from time import monotonic

from compressors.registry import COMPRESSORS, STREAMING, Compressor, StreamingCompressor
from compressors.stages import Data, Job, NamedSource, StreamJob
from evaluators import drift, footprint, latency, merge_check, parity
from evaluators.merge_check import CheckedAdapter, CheckSetting, MergedModels, StoredModel
from evaluators.predictions import load_predictions
from evaluators.registry import TASKS
from evaluators.runtimes import Resources, label_names, read_config
from modelpress.datasets import LabelledTexts, read_labelled_texts
from modelpress.evaluations import Evaluation, Latency
from modelpress.intervals import accuracy_drop
from modelpress.merge_recipes import MergeLora, MergeModels
from modelpress.recipes import read_stage
from modelpress.reports import StageRecord
from service.workers.language_operations import LANGUAGE_OPERATIONS, work_place
from service.workers.memory import peak_memory_bytes, reset_peak_memory
from service.workers.protocol import Operation, Task, TaskResult

HELD_OUT_SHARE = 0.1


def _compress(compressor: Compressor, task: Task) -> TaskResult:
    """Run one recipe stage on copies of its inputs."""
    job = Job(
        model=task.inputs["model"],
        output=task.output,
        seed=task.step.seed,
        device=task.device,
        threads=task.threads,
        teacher=task.inputs.get("teacher"),
        data=_data(task),
        evidence=task.evidence,
    )
    return _noted(partial(compressor.run, read_stage(task.step.arguments["stage"]), job, task.monitor))


def _stream(compressor: StreamingCompressor, task: Task) -> TaskResult:
    """Run one stage from the store into the store."""
    stage = read_stage(task.step.arguments["stage"])
    merged = _merged(stage, task) if isinstance(stage, MergeLora | MergeModels) else ()
    job = StreamJob(
        base=task.stored["model"],
        sink=task.sink,
        seed=task.step.seed,
        merged=tuple(NamedSource(name, task.stored[role], weight) for name, role, weight in merged),
        work=work_place(task),
    )
    return _noted(partial(compressor.run, stage, job, task.monitor))


def _merged(stage: MergeLora | MergeModels, task: Task) -> Iterator[tuple[str, str, float]]:
    """Name, role and weight of everything that is merged, in the stage's order: JSON objects keep none."""
    kind, names = ("adapter", stage.adapters) if isinstance(stage, MergeLora) else ("model", stage.models)
    for name in names:
        yield name, f"{kind}:{name}", task.step.arguments["weights"][name]


def _noted(run: Callable[[], StageRecord]) -> TaskResult:
    """Run a stage; note its wall time and peak memory."""
    reset_peak_memory()
    start = monotonic()
    record = run()
    measured = {"seconds": monotonic() - start, "peak_memory_bytes": peak_memory_bytes()}
    return TaskResult({**record.model_dump(mode="json"), **measured})


def _check_merge(task: Task) -> TaskResult:
    stage = MergeLora.model_validate(task.step.arguments["stage"])
    models = MergedModels(base=_stored_model(task, "base"), merged=_stored_model(task, "merged"))
    adapters = [CheckedAdapter(name, task.inputs[role], weight) for name, role, weight in _merged(stage, task)]
    setting = CheckSetting(task.step.seed, task.device, task.memory_limit_bytes, task.progress)
    return TaskResult(merge_check.check_merge(models, adapters, arguments=stage, setting=setting))


def _stored_model(task: Task, role: str) -> StoredModel:
    return StoredModel(task.stored[role], partial(task.inputs.__getitem__, role))


def _data(task: Task) -> Data | None:
    """Training rows and held-out rows: the validation dataset, or a tenth split off by the seed."""
    if "train" not in task.inputs:
        return None
    columns = task.step.arguments["columns"]
    read = partial(
        read_labelled_texts,
        text_column=columns["text_column"],
        label_column=columns["label_column"],
        known_labels=label_names(read_config(task.inputs["model"])),
        label_names=columns["label_names"],
    )
    train = read(task.inputs["train"])
    if "validation" in task.inputs:
        return Data(train, read(task.inputs["validation"]), "held out: the validation dataset")
    return _split(train, task.step.seed)


def _split(rows: LabelledTexts, seed: int) -> Data:
    order = random.Random(seed).sample(range(len(rows)), len(rows))
    held_out = max(1, int(len(rows) * HELD_OUT_SHARE))
    parts = [
        LabelledTexts(tuple(rows.texts[i] for i in part), tuple(rows.labels[i] for i in part))
        for part in (sorted(order[held_out:]), sorted(order[:held_out]))
    ]
    return Data(parts[0], parts[1], f"held out: {held_out} training rows, split off by seed {seed}")


def _predict(task: Task) -> TaskResult:
    evaluation = Evaluation.model_validate(task.step.arguments)
    evaluator = TASKS[evaluation.task]
    predict = evaluator.predict if task.step.operation == "predict" else evaluator.predict_probes
    predictions = predict(
        task.inputs["model"],
        data=task.inputs["data"],
        evaluation=evaluation,
        resources=Resources(task.device, task.threads),
        progress=task.progress,
    )
    predictions.save(task.output)
    return TaskResult({"rows": len(predictions), "runtime": predictions.runtime})


def _quality(task: Task) -> TaskResult:
    arguments = task.step.arguments
    evaluator = TASKS[arguments["task"]]
    baseline, candidate = (load_predictions(task.inputs[f"{role}_predictions"]) for role in ("baseline", "candidate"))
    measure = partial(evaluator.measure_quality, dataset=arguments["dataset"], confidence=arguments["confidence"])
    paired = evaluator.compare(baseline, candidate)
    parts = {
        "baseline": measure(baseline),
        "candidate": measure(candidate),
        "paired": paired,
        "accuracy_drop": accuracy_drop(paired, confidence=arguments["confidence"]),
        "footprint": footprint.measure_footprint(task.inputs["baseline"], candidate=task.inputs["candidate"]),
    }
    return TaskResult({name: part.model_dump(mode="json") for name, part in parts.items()})


def _parity(task: Task) -> TaskResult:
    resources = Resources(task.device, task.threads)
    report = parity.measure_parity(task.inputs["candidate"], reference=task.inputs["parity"], resources=resources)
    return TaskResult(report.model_dump(mode="json"))


def _latency(task: Task) -> TaskResult:
    """With the threads that the evaluation asks for, not the worker's."""
    rows = latency.measure_latency(
        task.inputs["baseline"],
        candidate=task.inputs["candidate"],
        latency=Latency.model_validate(task.step.arguments),
        device=task.device,
        seed=task.step.seed,
        progress=task.progress,
    )
    return TaskResult({"rows": [row.model_dump(mode="json") for row in rows]})


def _drift(task: Task) -> TaskResult:
    arguments = task.step.arguments
    baseline, candidate = (load_predictions(task.inputs[role]) for role in ("baseline", "candidate"))
    report = drift.measure_drift(baseline, candidate, probes=arguments["probes"], confidence=arguments["confidence"])
    return TaskResult(report.model_dump(mode="json"))


TASKS_VERSION = sum(evaluator.version for evaluator in TASKS.values())
"""Versions only rise, so that their sum changes with any of them."""

OPERATIONS: Mapping[str, Operation] = {
    **{f"compress/{method}": Operation(partial(_compress, c), c.version) for method, c in COMPRESSORS.items()},
    **{f"compress/{method}": Operation(partial(_stream, c), c.version) for method, c in STREAMING.items()},
    "merge_check": Operation(_check_merge, merge_check.VERSION),
    "predict": Operation(_predict, TASKS_VERSION),
    "probe": Operation(_predict, TASKS_VERSION),
    "quality": Operation(_quality, TASKS_VERSION + footprint.VERSION),
    "parity": Operation(_parity, parity.VERSION),
    "latency": Operation(_latency, latency.VERSION),
    "drift": Operation(_drift, drift.VERSION),
    **LANGUAGE_OPERATIONS,
}
