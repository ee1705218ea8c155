"""Quantize the weights of a decoder language model, layer by layer, from store to store.

The calibration windows are embedded, and then, for each decoder layer in turn: the layer is loaded in float32, the
algorithm chooses its codes, the layer is stored, and its outputs with the stored weights become the next layer's
inputs, on disk. In memory are the embedding table while the windows are embedded, then one decoder layer and one batch
of windows, however many layers and windows there are; with `qat` the whole model, which is trained first.

After each layer a checkpoint. A stage that is run again after a kill keeps the stored layers and runs them over the
calibration windows again, so that it goes on with the same inputs, to the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from compressors.calibration import CalibrationWindows, check_vocabulary, read_windows
from compressors.compute_types import products_dtype
from compressors.decoder_layers import DecoderLayers
from compressors.finite_weights import verify_finite
from compressors.folders import CONFIG
from compressors.layer_files import LayerFiles, Written
from compressors.layer_quantization import error_windows, quantize_layer
from compressors.layer_streams import LayerStream, layer_stream
from compressors.qat_stage import CodeChoice, choose_codes
from compressors.quantization_plan import QuantizationPlan
from compressors.quantization_progress import FinishedLayer, QuantizationProgress
from compressors.stages import Monitor, Progress, StreamJob, WorkPlace
from compressors.weight_files import WeightFiles, read_json
from modelpress.errors import InternalError, InvalidRecipe
from modelpress.quantization_recipes import QuantizeWeights
from modelpress.reports import StageRecord

VERSION = 2


def run(arguments: QuantizeWeights, job: StreamJob, monitor: Monitor) -> StageRecord:
    """Write the quantized model folder, complete, in the layout of its grid.

    Raises InvalidRecipe for targets or groups that cannot be, InvalidModel for a base that is no known decoder or holds
    NaN, InvalidDataset for texts that fill no window, each before anything is written.
    """
    work = _work_place(arguments, job)
    files, config = WeightFiles.read(job.base), read_json(job.base, CONFIG)
    decoder = DecoderLayers.open(files, config, device=torch.device(work.device))
    plan = QuantizationPlan.of(arguments, decoder)
    windows = _windows(plan, work, seed=job.seed)
    verify_finite(files)
    output = LayerFiles(decoder)
    with _threads(work.threads), torch.no_grad():
        choice = choose_codes(plan, windows.ids_NT if windows else None, seed=job.seed, monitor=monitor)
        stream = layer_stream(plan, windows, scratch=work.scratch, written=job.sink.written)
        progress = _quantize_layers(plan, stream, job, choice=choice, output=output)
    quantization = plan.layout.config(plan.kept_float(progress.records))
    written = output.write_rest({**config, "quantization_config": quantization}, sink=job.sink)
    record = _record(plan, progress, written, windows=windows)
    return record.model_copy(update={"before": dict(choice.before), "after": dict(choice.after)})


def _work_place(arguments: QuantizeWeights, job: StreamJob) -> WorkPlace:
    if job.work is None:
        raise InternalError("quantize_weights was given no place to work")
    if arguments.needs_calibration and job.work.calibration is None:
        name = arguments.algorithm if arguments.smooth_quant is None else "smooth_quant"
        raise InvalidRecipe(f"{name} needs calibration texts: add a training dataset to the request", field="algorithm")
    return job.work


def _windows(plan: QuantizationPlan, work: WorkPlace, *, seed: int) -> CalibrationWindows | None:
    """Whatever the algorithm: what is calibrated is measured."""
    if work.calibration is None:
        return None
    length, positions = plan.arguments.sequence_length, plan.decoder.positions
    if length > positions:
        raise InvalidRecipe(
            f"sequence_length: {length} is more than the {positions} tokens of the model's max_position_embeddings",
            field="sequence_length",
        )
    windows = read_windows(work.calibration, plan.arguments, seed=seed)
    check_vocabulary(windows.ids_NT, plan.decoder.vocabulary)
    return windows


def _quantize_layers(
    plan: QuantizationPlan, stream: LayerStream, job: StreamJob, *, choice: CodeChoice, output: LayerFiles
) -> QuantizationProgress:
    monitor = choice.monitor
    progress = QuantizationProgress.resumed(monitor.checkpoint())
    for number, path in enumerate(output.paths):
        finished = progress.layers.get(number)
        if finished is None or not job.sink.keep(finished.entry):
            quantized = quantize_layer(plan, number, stream.given(number), algorithm=choice.algorithm, seed=job.seed)
            fallbacks = {record.name: record.fallback for record in quantized.records if record.fallback}
            plan.check_fallbacks({**progress.fallbacks, **fallbacks})
            output.write_layer(number, quantized.tensors, sink=job.sink)
            finished = FinishedLayer.of(job.sink.entries[path], quantized.records, quantized.details)
            progress.layers[number] = finished
            monitor.save_checkpoint(number + 1, progress.save)
        stream.advance(number, finished)
        monitor.progress(Progress(step=number + 1, steps=len(output.paths)))
    return progress


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _record(
    plan: QuantizationPlan, progress: QuantizationProgress, written: Written, *, windows: CalibrationWindows | None
) -> StageRecord:
    quantized = tuple(record.name for record in progress.records if record.algorithm != "none")
    too_few = windows.warnings if windows else ()
    return StageRecord(
        method="quantize_weights",
        arguments=plan.arguments.model_dump(mode="json"),
        version=VERSION,
        touched=tuple(f"{name}.weight" for name in quantized),
        layers=progress.records,
        details={
            "calibration": windows.facts if windows else None,
            "products": str(products_dtype(plan.decoder.device)).removeprefix("torch.") if windows else None,
            "error_tokens": windows.ids_NT[: error_windows(plan.arguments)].numel() if windows else 0,
            "bits_per_weight": plan.bits_per_weight(quantized),
            "predicted_bytes": plan.predicted_bytes,
            "written_bytes": written.weight_bytes,
            "fallback_share": len(progress.fallbacks) / len(plan.targets.quantized),
            "figures": {
                plan.decoder.family.layer(number): dict(layer.details)
                for number, layer in sorted(progress.layers.items())
                if layer.details
            },
        },
        warnings=(*too_few, *written.warnings),
    )
