"""What each decoder layer reads: the calibration windows, run through every layer before it as it is stored.

stream.given(0); stream.advance(0, finished); stream.given(1); ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from compressors.activations import Activations, NonFiniteError
from compressors.calibration import CalibrationWindows
from compressors.decoder_families import DecoderFamily
from compressors.layer_algorithms import run_layer
from compressors.layer_quantization import LayerInput
from compressors.quantization_plan import QuantizationPlan
from compressors.quantization_progress import FinishedLayer
from compressors.reference_outputs import ReferenceOutputs
from compressors.weight_files import WeightFiles
from modelpress.errors import InvalidModel
from modelpress.quantization_recipes import NEEDS_WANTED
from modelpress.stored_folders import Source


class LayerStream(Protocol):
    def given(self, number: int) -> LayerInput:
        """What decoder layer `number` reads. Layers are asked for in their order."""

    def advance(self, number: int, finished: FinishedLayer) -> None:
        """Run the windows through decoder layer `number` as it is stored."""


class Uncalibrated:
    """No layer reads anything."""

    def given(self, number: int) -> LayerInput:
        return LayerInput(None, {})

    def advance(self, number: int, finished: FinishedLayer) -> None:
        pass


class Calibrated:
    """The hidden states in `scratch`: those of one layer, and while it runs those of the next.

    `written` gives the output folder as far as it is stored. InvalidModel where NaN or infinity comes out.
    """

    def __init__(
        self, plan: QuantizationPlan, windows: CalibrationWindows, *, scratch: Path, written: Callable[[], Source]
    ) -> None:
        self._plan = plan
        self._written = written
        self._scratch = scratch
        self._arguments = plan.decoder.arguments(windows.ids_NT.shape[1])
        try:
            self._activations = Activations.embed(
                windows.ids_NT, plan.decoder.embedding(), path=scratch / "inputs-0", device=plan.decoder.device
            )
        except NonFiniteError:
            raise _non_finite(plan.decoder.family.embeddings) from None

    def given(self, number: int) -> LayerInput:
        return LayerInput(self._activations, self._arguments[number])

    def advance(self, number: int, finished: FinishedLayer) -> None:
        if number + 1 == len(self._plan.decoder):
            return
        module = stored_layer(self._plan, number, finished, written=self._written())

        def run(hidden_BTH: Tensor) -> Tensor:
            return run_layer(module, hidden_BTH, self._arguments[number])

        try:
            self._activations = self._activations.through(run, path=self._scratch / f"inputs-{number + 1}")
        except NonFiniteError:
            raise _non_finite(self._plan.decoder.family.layer(number)) from None


class Aimed:
    """A calibrated stream that also gives what the unquantized model's layers put out."""

    def __init__(self, stream: Calibrated, reference: ReferenceOutputs, *, family: DecoderFamily) -> None:
        self._stream = stream
        self._reference = reference
        self._family = family

    def given(self, number: int) -> LayerInput:
        try:
            wanted = self._reference.of(number)
        except NonFiniteError:
            raise _non_finite(self._family.layer(self._reference.layers_run)) from None
        return replace(self._stream.given(number), wanted=wanted)

    def advance(self, number: int, finished: FinishedLayer) -> None:
        self._stream.advance(number, finished)


def layer_stream(
    plan: QuantizationPlan, windows: CalibrationWindows | None, *, scratch: Path, written: Callable[[], Source]
) -> LayerStream:
    if windows is None:
        return Uncalibrated()
    stream = Calibrated(plan, windows, scratch=scratch, written=written)
    if plan.arguments.algorithm not in NEEDS_WANTED:
        return stream
    reference = ReferenceOutputs.embed(plan.decoder, windows.ids_NT, scratch=scratch)
    return Aimed(stream, reference, family=plan.decoder.family)


def stored_layer(plan: QuantizationPlan, number: int, finished: FinishedLayer, *, written: Source) -> nn.Module:
    """Decoder layer `number` in float32 as its stored file makes it: codes dequantized, the rest as it is."""
    files = WeightFiles.of_file(written, finished.entry.path)
    prefix, quantized = plan.decoder.family.layer(number), frozenset(finished.quantized)

    def tensor(name: str) -> Tensor:
        module = f"{prefix}.{name}".removesuffix(".weight")
        if name.endswith(".weight") and module in quantized:
            return plan.layout.read(module, files.load).dequantized()
        return files.load(f"{prefix}.{name}")

    return plan.decoder.make(number, tensor)


def _non_finite(module: str) -> InvalidModel:
    return InvalidModel(
        f"{module} gives NaN or infinite activations on the calibration texts: its weights are too large, or damaged",
        reason="NON_FINITE",
        field=module,
    )
