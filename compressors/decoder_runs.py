"""That an exported decoder runs, and what it must give.

Shapes: B rows, T tokens, V tokens of the vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from onnxruntime.capi import onnxruntime_pybind11_state as _errors
from safetensors.torch import save_file
from torch import Tensor

from compressors.coded_decoder import CodedDecoder
from compressors.decoder_graph import DecoderGraph, empty_past, output_names, past_names
from modelpress.errors import InternalError

PARITY_FILE = "parity.safetensors"
PARITY_SHAPE = (4, 16)
RUN_SHAPES = ((1, 1), (2, 5), (3, 1))
"""Rows and tokens that every file must run: with nothing before them, and again after themselves."""
RUNTIME_ERRORS = tuple(e for e in vars(_errors).values() if isinstance(e, type) and issubclass(e, Exception))


def write_parity(decoder: CodedDecoder, *, seed: int, folder: Path) -> int:
    """Write `parity.safetensors`: `input_ids`, `attention_mask` [B, T], the model's `logits` [B, T, V] in torch; B.

    Seeded random tokens; one row is padded on the left, one on the right. Logits at padding mean nothing.
    """
    rows, tokens = PARITY_SHAPE
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(decoder.model.config.vocab_size, PARITY_SHAPE, generator=generator)
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[1, : tokens // 2] = 0
    mask_BT[2, tokens // 2 :] = 0
    past = empty_past(decoder.model.config, rows=rows)
    with torch.inference_mode():
        logits_BTV, *_ = DecoderGraph(decoder.model, decoder.family)(ids_BT, mask_BT, positions(mask_BT), *past)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"input_ids": ids_BT, "attention_mask": mask_BT, "logits": logits_BTV}, folder / PARITY_FILE)
    return rows


def positions(mask_BT: Tensor) -> Tensor:
    """Each token's place among those of its row that are no padding, from 0; at padding before them 0."""
    return (mask_BT.cumsum(dim=1) - 1).clamp(min=0)


def check_runs(file: Path, config: Any) -> tuple[tuple[int, int], ...]:
    """Run the file on several shapes, without and with a cache; the shapes. InternalError where one fails."""
    session = _open(file)
    for shape in RUN_SHAPES:
        before = [state.numpy() for state in empty_past(config, rows=shape[0])]
        for past_tokens in (0, shape[1]):
            before = _run(session, config, shape=shape, before=before)
            if before[0].shape[2] != past_tokens + shape[1]:
                raise InternalError(f"the exported cache holds {before[0].shape[2]} tokens after {shape}")
    return RUN_SHAPES


def _run(session: Any, config: Any, *, shape: tuple[int, int], before: list[Any]) -> list[Any]:
    """The key/value states after one run on any tokens."""
    past = before[0].shape[2]
    feeds = {
        "input_ids": np.arange(shape[0] * shape[1], dtype=np.int64).reshape(shape) % config.vocab_size,
        "attention_mask": np.ones((shape[0], past + shape[1]), dtype=np.int64),
        "position_ids": np.tile(np.arange(past, past + shape[1], dtype=np.int64), (shape[0], 1)),
        **dict(zip(past_names(config.num_hidden_layers), before, strict=True)),
    }
    try:
        logits, *states = session.run(list(output_names(config.num_hidden_layers)), feeds)
    except RUNTIME_ERRORS as error:
        raise InternalError(f"the exported model fails on {shape} tokens after {past}") from error
    if logits.shape != (*shape, config.vocab_size) or not np.isfinite(logits).all():
        raise InternalError(f"the exported model gives no finite logits for {shape} tokens after {past}")
    return list(states)


def _open(file: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    try:
        return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except RUNTIME_ERRORS as error:
        raise InternalError(f"ONNX Runtime {onnxruntime.__version__} refuses the exported file") from error
