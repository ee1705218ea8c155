"""INT8 quantization: calibrate, then train on the fixed grid where the recipe says so.

tables on their grid -> capture -> prepare -> observe -> (distil) -> model folder with its quantizer state
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule

from compressors.batches import Examples, collate, shuffled_batches
from compressors.distillation import Forward, held_out_figures, logits_forward, model_forward, predict
from compressors.embedding_tables import RowCodes, snap_tables
from compressors.folders import load_model, load_tokenizer, read_config, untied_state, write_folder
from compressors.graph_capture import PREFIX, capture, input_names
from compressors.int8_quantizer import load_ranges, observe, prepare, ranges
from compressors.module_patterns import without_ignored
from compressors.quantized_folder import QuantizationSettings, int8_settings, read_quantization, write_quantization
from compressors.stages import Data, Job, Monitor
from compressors.training import Distillation, Student, TrainingResult, distil, encode_data
from modelpress.errors import InvalidRecipe
from modelpress.recipes import Quantize
from modelpress.reports import StageRecord

VERSION = 3
CALIBRATION_BATCH_SIZE = 32


def run(arguments: Quantize, job: Job, monitor: Monitor) -> StageRecord:
    """Write the quantized model; `int8_qat` keeps the best look, the calibrated start included.

    Raises InvalidRecipe without data, without a teacher for QAT, or for an `ignore` that matches nothing or all;
    InvalidModel where a range is not finite.
    """
    data = _data(arguments, job)
    model = load_model(job.model, device=job.device)
    settings = choose(model, arguments)
    train, held_out = _examples(data, job, model.config, max_length=arguments.max_length)
    teacher = model_forward(_teacher(arguments, job, model))
    reference_NC = predict(teacher, held_out, device=job.device)

    def figures(forward: Forward) -> dict[str, float]:
        return held_out_figures(reference_NC, predict(forward, held_out, device=job.device), held_out)

    before = figures(model_forward(model))
    graph = calibrated(model, settings, _calibration_inputs(train, arguments, job))
    student = logits_forward(graph)
    if arguments.scheme == "int8_ptq":
        result = _untrained(figures(student))
    else:
        # On CUDA too: autocast would round what the grid has rounded already.
        exact = arguments.model_copy(update={"mixed_precision": "float32"})
        task = Distillation(
            Student(graph, student), teacher, train, held_out, arguments=exact, seed=job.seed, device=job.device
        )
        result = distil(task, monitor)
    write(graph, settings, model=model, source=job.model, output=job.output)
    return StageRecord(
        method="quantize",
        arguments=arguments.model_dump(mode="json"),
        version=VERSION,
        touched=(*settings.linears, *settings.embeddings),
        before=before,
        after=result.after,
        curve=result.curve,
        details={"calibrated": result.before, "data": data.provenance, **_details(settings), **result.details},
        warnings=_warnings(arguments, result),
    )


def choose(model: nn.Module, arguments: Quantize) -> QuantizationSettings:
    """Every linear layer, and every embedding table where the recipe says so, but for what `ignore` matches."""
    tables = nn.Embedding if arguments.embeddings == "int8" else ()
    kinds = {name: type(module) for name, module in model.named_modules() if isinstance(module, (nn.Linear, tables))}
    chosen = without_ignored(kinds, arguments.ignore)
    linears = tuple(name for name in chosen if issubclass(kinds[name], nn.Linear))
    if not linears:
        raise InvalidRecipe("ignore leaves no linear layer to quantize: remove a pattern", field="ignore")
    return int8_settings(
        linears=linears, embeddings=tuple(name for name in chosen if issubclass(kinds[name], nn.Embedding))
    )


def calibrated(model: Any, settings: QuantizationSettings, batches: Iterator[tuple[Tensor, ...]]) -> GraphModule:
    """The prepared graph of `model`, whose tables are put on their grid, with ranges fixed from `batches`."""
    snap_tables(model, settings.embeddings)
    graph = _prepared(model, settings)
    observe(graph, batches)
    return graph


def rebuild(folder: Path) -> tuple[Any, GraphModule, dict[str, RowCodes]]:
    """Float model, prepared graph and table codes of a folder that `write` made: the very same graph again."""
    settings, tensors = read_quantization(folder)
    model = load_model(folder)
    tables = snap_tables(model, settings.embeddings)
    graph = _prepared(model, settings)
    load_ranges(graph, tensors)
    return model, graph, tables


def write(graph: GraphModule, settings: QuantizationSettings, *, model: Any, source: Path, output: Path) -> None:
    """The model folder of `source` with the graph's FP32 weights, and the quantizer's state beside them."""
    state = graph.state_dict()
    tensors = {name: state.get(PREFIX + name, tensor).detach().cpu() for name, tensor in untied_state(model).items()}
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_folder(contiguous, config=read_config(source), source=source, output=output)
    write_quantization(output, settings, ranges(graph))


def _prepared(model: Any, settings: QuantizationSettings) -> GraphModule:
    return prepare(capture(model), modules=settings.linears)


def _data(arguments: Quantize, job: Job) -> Data:
    """The job's data; refuses what only a float model can do."""
    if arguments.mixed_precision == "bfloat16":
        raise InvalidRecipe("quantize trains on its INT8 grid in float32: set it to auto", field="mixed_precision")
    if arguments.activation_checkpointing:
        raise InvalidRecipe("quantize cannot recompute activations: set it to false", field="activation_checkpointing")
    if job.data is None:
        raise InvalidRecipe("quantize needs training data: add a training dataset to the request", field="quantize")
    return job.data


def _teacher(arguments: Quantize, job: Job, model: Any) -> Any:
    """What quality is measured against: the job's teacher; without one, post-training only, the float model."""
    if job.teacher is not None:
        return load_model(job.teacher, device=job.device)
    if arguments.scheme == "int8_qat":
        raise InvalidRecipe("int8_qat needs a teacher: the model before pruning", field="scheme")
    return copy.deepcopy(model)


def _examples(data: Data, job: Job, config: Any, *, max_length: int) -> tuple[Examples, Examples]:
    """Training and held-out rows with exactly the inputs that the graph takes."""
    train, held_out = encode_data(data, load_tokenizer(job.model), config=config, max_length=max_length)
    names = input_names(config)
    return replace(train, input_names=names), replace(held_out, input_names=names)


def _calibration_inputs(train: Examples, arguments: Quantize, job: Job) -> Iterator[tuple[Tensor, ...]]:
    """The inputs of `calibration_examples` training rows (all, where there are fewer), chosen by the seed."""
    wanted = min(arguments.calibration_examples, len(train))
    for rows in shuffled_batches(train, batch_size=CALIBRATION_BATCH_SIZE, seed=job.seed):
        yield tuple(collate(train, rows[:wanted], device=job.device).inputs.values())
        wanted -= len(rows)
        if wanted <= 0:
            return


def _details(settings: QuantizationSettings) -> dict[str, Any]:
    shown = settings.model_dump(mode="json")
    return {kind: shown[kind] for kind in ("weights", "inputs", "tables")} | {
        "linears": len(settings.linears),
        "embeddings": len(settings.embeddings),
        "frozen": "ranges, embedding tables and the biases of quantized layers, before the first step",
    }


def _untrained(figures: dict[str, float]) -> TrainingResult:
    """The result of post-training quantization: what was calibrated is what is kept."""
    return TrainingResult(before=figures, after=figures, curve=(), best_step=0, details={}, warnings=())


def _warnings(arguments: Quantize, result: TrainingResult) -> tuple[str, ...]:
    if arguments.scheme == "int8_ptq" or result.best_step:
        return result.warnings
    return (
        *result.warnings,
        f"no look in {arguments.steps} steps was better than the calibrated start, which is kept",
    )
