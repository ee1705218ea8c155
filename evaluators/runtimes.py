"""Runtimes: a stored model, opened exactly as it ships.

    with_one_thread = open_onnx(folder, Resources())
    logits_NK = with_one_thread.logits({"input_ids": ids_NT, "attention_mask": mask_NT, "token_type_ids": types_NT})

Shapes: N rows, T tokens, K labels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as _errors

from evaluators.onnx_files import MODEL_FILE, read_onnx
from modelpress.errors import FailedPrecondition, InvalidModel, InvalidRequest

Feeds = Mapping[str, NDArray[np.int64]]

PROVIDERS: Mapping[str, tuple[Any, ...]] = {
    "cpu": ("CPUExecutionProvider",),
    # TF32 would round what the baseline is compared in. The CPU provider runs the shape arithmetic.
    "cuda": (("CUDAExecutionProvider", {"use_tf32": "0"}), "CPUExecutionProvider"),
}
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
INTEGERS: Mapping[str, type[np.signedinteger[Any]]] = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}
RUNTIME_ERRORS = tuple(e for e in vars(_errors).values() if isinstance(e, type) and issubclass(e, Exception))


@dataclass(frozen=True)
class Resources:
    """What a measurement may use: `cpu` or `cuda`, and how many threads inside one operator."""

    device: str = "cpu"
    threads: int = 1

    def __post_init__(self) -> None:
        if self.device not in PROVIDERS:
            raise InvalidRequest(f"device {self.device!r} is unknown; known: {', '.join(PROVIDERS)}", field="device")
        if self.threads < 1:
            raise InvalidRequest(f"threads is {self.threads}: it must be at least 1", field="threads")


@dataclass(frozen=True, eq=False)
class OnnxModel:
    """A text classifier open in ONNX Runtime. `runtime` names library, version and the provider that really runs."""

    session: Any
    inputs: Mapping[str, type[np.signedinteger[Any]]]
    output: str
    labels: tuple[str, ...]
    config: Mapping[str, Any]
    runtime: str

    def logits(self, feeds: Feeds) -> NDArray[np.float32]:
        """Logits [N, K] in float32. `feeds` holds all of `INPUTS`, each [N, T]; the model takes those that it asks for.

        Raises InvalidModel where the model cannot run on this shape, or gives another number of logits.
        """
        wanted = {name: feeds[name].astype(integer, copy=False) for name, integer in self.inputs.items()}
        rows, tokens = feeds["input_ids"].shape
        try:
            (logits_NK,) = self.session.run([self.output], wanted)
        except RUNTIME_ERRORS as error:
            raise InvalidModel(
                f"the exported model fails on {rows} x {tokens} tokens: export it with free batch and sequence "
                "dimensions, and keep `max_length` within what it takes"
            ) from error
        if logits_NK.shape != (rows, len(self.labels)):
            raise InvalidModel(
                f"the exported model gives logits of shape {logits_NK.shape} for {rows} rows and {len(self.labels)} "
                "labels: its `id2label` and its classifier disagree",
                field="id2label",
            )
        return np.asarray(logits_NK, dtype=np.float32)


def open_onnx(model: Path, resources: Resources) -> OnnxModel:
    """Open `model.onnx` with exactly the provider and threads asked for; any fallback is an error.

    Raises InvalidModel for a file that is no text classifier, FailedPrecondition where the device is not usable.
    """
    read_onnx(model)
    config = read_config(model)
    session = open_session(model / MODEL_FILE, resources)
    return OnnxModel(
        session=session,
        inputs=_inputs(session),
        output=_output(session),
        labels=label_names(config),
        config=config,
        runtime=f"onnxruntime {onnxruntime.__version__} {session.get_providers()[0]}",
    )


def read_config(model: Path) -> dict[str, Any]:
    """The model folder's config.json."""
    try:
        config = json.loads((model / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidModel("the model has no readable config.json", field="config.json") from error
    if not isinstance(config, dict):
        raise InvalidModel("config.json holds no JSON object", field="config.json")
    return config


def label_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of logit 0, 1, ... from `id2label`; each id once, each name once."""
    id2label = config.get("id2label")
    try:
        names = tuple(id2label[str(i)] for i in range(len(id2label))) if isinstance(id2label, dict) else ()
    except KeyError as error:
        raise InvalidModel(f"config.json: `id2label` names no label {error}", field="id2label") from None
    if len(names) < 2 or len(set(names)) != len(names) or not all(isinstance(name, str) for name in names):
        raise InvalidModel(
            "config.json: `id2label` must give two or more labels, each with a name of its own", field="id2label"
        )
    return names


def open_session(file: Path, resources: Resources) -> Any:
    """An ONNX Runtime session on exactly the provider and threads asked for; FailedPrecondition where it falls back."""
    providers = PROVIDERS[resources.device]
    first = providers[0] if isinstance(providers[0], str) else providers[0][0]
    if first not in onnxruntime.get_available_providers():
        raise FailedPrecondition(
            f"device {resources.device!r} is not usable: this ONNX Runtime has no {first}", field="device"
        )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = resources.threads
    options.inter_op_num_threads = 1
    options.use_deterministic_compute = True
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(str(file), options, providers=list(providers))
    except RUNTIME_ERRORS as error:
        raise InvalidModel(f"ONNX Runtime {onnxruntime.__version__} refuses {file.name}: export it again") from error
    if session.get_providers()[0] != first:
        raise FailedPrecondition(
            f"ONNX Runtime fell back from {first} to {session.get_providers()[0]}: install the CUDA and cuDNN versions "
            "that it was built for, or ask for the device 'cpu'",
            field="device",
        )
    return session


def _inputs(session: Any) -> dict[str, type[np.signedinteger[Any]]]:
    found = {value.name: value.type for value in session.get_inputs()}
    strange = [name for name in found if name not in INPUTS or found[name] not in INTEGERS]
    if strange or "input_ids" not in found:
        raise InvalidModel(
            f"the exported model takes {', '.join(found)}: a text classifier takes integer {', '.join(INPUTS)}"
        )
    return {name: INTEGERS[kind] for name, kind in found.items()}


def _output(session: Any) -> str:
    names = [value.name for value in session.get_outputs()]
    if "logits" not in names and len(names) != 1:
        raise InvalidModel(f"the exported model gives {', '.join(names)}: one output must be named `logits`")
    return "logits" if "logits" in names else str(names[0])
