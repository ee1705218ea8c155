"""Export to ONNX: the float model as FP32, a quantized one with integer codes.

rebuild -> convert -> parity reference -> torch.onnx -> rewrite -> save -> inspect in ONNX Runtime
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes import common as passes
from torch import nn
from torch.fx import GraphModule

from compressors.embedding_tables import RowCodes
from compressors.folders import CONFIG, companion_files, load_model
from compressors.graph_capture import PREFIX, capture, dynamic_shapes, example_inputs, input_names, known_warnings
from compressors.int8_quantizer import convert, sites
from compressors.onnx_graph import gather_before_dequantizing, integer_gemms
from compressors.onnx_inspection import OptimisedGraph, check_shapes, inspect
from compressors.parity_reference import exact_sums, write_parity
from compressors.quantize import rebuild
from compressors.quantized_folder import is_quantized, shipped_companions
from compressors.row_flattening import flatten_rows
from compressors.stages import Job, Monitor
from modelpress.errors import InternalError
from modelpress.recipes import Export
from modelpress.reports import StageRecord

VERSION = 3
MODEL_FILE = "model.onnx"
DATA_FILE = "model.onnx.data"
MAX_FILE_BYTES = 2_000_000_000
"""A protobuf message ends at 2 GiB: larger weights go to a file beside the model."""


@dataclass(frozen=True)
class Source:
    """What is exported: the graph, the INT8 tables by their name in it, and the layers that must run as integers."""

    config: Any
    graph: GraphModule
    reference: GraphModule
    """Computes what the exported file does, sum for sum."""
    tables: Mapping[str, RowCodes]
    linears: tuple[str, ...]


def run(arguments: Export, job: Job, monitor: Monitor) -> StageRecord:
    """Write `model.onnx`, config.json and every companion file; the parity reference goes to `job.evidence`."""
    source = open_source(job.model)
    parity_rows = (
        write_parity(source.reference, source.config, job, folder=job.evidence) if job.evidence is not None else 0
    )
    model = to_onnx(source, opset=arguments.opset)
    rewrites = rewrite(model, source.tables)
    file = save(model, job.output)
    copy_companions(job.model, job.output)
    shapes = check_shapes(
        file,
        names=input_names(source.config),
        vocabulary=source.config.vocab_size,
        longest=source.config.max_position_embeddings,
    )
    found = inspect(file)
    return StageRecord(
        method="export",
        arguments=arguments.model_dump(mode="json"),
        version=VERSION,
        touched=_weight_files(job.output),
        kept_float=found.kept_float,
        details={
            "size_bytes": sum((job.output / name).stat().st_size for name in _weight_files(job.output)),
            "rewrites": rewrites,
            "integer_operators": found.integer,
            "conversions": found.conversions,
            "shapes_run": [list(shape) for shape in shapes],
            "parity_rows": parity_rows,
        },
        warnings=_warnings(source, found),
    )


def open_source(folder: Path) -> Source:
    """The graph of a float model folder, or the converted graph of a quantized one."""
    if not is_quantized(folder):
        model = load_model(folder)
        graph = capture(model)
        return Source(model.config, graph, reference=graph, tables={}, linears=())
    model, prepared, tables = rebuild(folder)
    linears = tuple(site.module for site in sites(prepared))
    converted = convert(prepared)
    named = {f"{PREFIX}{module}.weight": table for module, table in tables.items()}
    return Source(model.config, converted, reference=exact_sums(converted), tables=named, linears=linears)


def to_onnx(source: Source, *, opset: int) -> ir.Model:
    """The graph as ONNX, as torch's exporter writes it, with named inputs and free batch and sequence."""
    nn.Module.train(source.graph, False)  # the exported module's own train() would rewrite dropouts
    with known_warnings():
        program = torch.onnx.export(
            source.graph,
            tuple(example_inputs(source.config).values()),
            dynamo=True,
            dynamic_shapes=dynamic_shapes(source.config),
            input_names=list(input_names(source.config)),
            output_names=["logits"],
            opset_version=opset,
            verbose=False,
        )
    if program is None:
        raise InternalError("torch.onnx gave no program")
    return program.model


def rewrite(model: ir.Model, tables: Mapping[str, RowCodes]) -> dict[str, int]:
    """Apply every rewrite of `onnx_graph` and leave out what does not compute; how often each was applied."""
    applied = {
        "flatten_rows": flatten_rows(model.graph),
        "integer_gemms": integer_gemms(model.graph),
        "gather_before_dequantizing": gather_before_dequantizing(model.graph, tables),
    }
    passes.RemoveUnusedNodesPass()(model)
    passes.ClearMetadataAndDocStringPass()(model)
    return applied


def save(model: ir.Model, folder: Path, *, max_file_bytes: int = MAX_FILE_BYTES) -> Path:
    """Write `model.onnx`; weights go to `model.onnx.data` beside it only where one file cannot hold them."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / MODEL_FILE
    weights = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)
    ir.save(model, file, external_data=DATA_FILE if weights > max_file_bytes else None)
    return file


def copy_companions(source: Path, output: Path) -> None:
    """config.json and every companion file, byte for byte."""
    names = shipped_companions(source) if is_quantized(source) else companion_files(source)
    for name in (CONFIG, *names):
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, output / name)


def _weight_files(folder: Path) -> tuple[str, ...]:
    return tuple(name for name in (MODEL_FILE, DATA_FILE) if (folder / name).is_file())


def _warnings(source: Source, found: OptimisedGraph) -> tuple[str, ...]:
    products, wanted = sum(found.integer.values()), len(source.linears)
    if products >= wanted:
        return ()
    return (f"{wanted - products} of {wanted} quantized layers run in float after ONNX Runtime's optimisation",)
