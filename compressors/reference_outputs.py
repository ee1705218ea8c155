"""What the unquantized model's decoder layers put out for the calibration windows, one layer's on disk at a time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from compressors.activations import Activations
from compressors.decoder_layers import DecoderLayers
from compressors.layer_algorithms import run_layer


class ReferenceOutputs:
    """Its files in `scratch`: each layer's outputs replace those of the layer before."""

    def __init__(
        self,
        decoder: DecoderLayers,
        embedded: Activations,
        *,
        arguments: tuple[Mapping[str, Any], ...],
        scratch: Path,
    ) -> None:
        self._decoder = decoder
        self._activations = embedded
        self._arguments = arguments
        self._scratch = scratch
        self.layers_run = 0
        """The layer that runs next; after a NonFiniteError the one that raised it."""

    @staticmethod
    def embed(decoder: DecoderLayers, ids_NT: Tensor, *, scratch: Path) -> ReferenceOutputs:
        """Of the windows [N, T] of tokens. Raises NonFiniteError."""
        path, arguments = scratch / "reference-embedded", decoder.arguments(ids_NT.shape[1])
        embedded = Activations.embed(ids_NT, decoder.embedding(), path=path, device=decoder.device)
        return ReferenceOutputs(decoder, embedded, arguments=arguments, scratch=scratch)

    def of(self, number: int) -> Activations:
        """Those of decoder layer `number`; layers are asked for in their order, any may be left out.

        Raises NonFiniteError.
        """
        while self.layers_run <= number:
            layer, arguments = self._decoder.load(self.layers_run), self._arguments[self.layers_run]
            run = partial(_run, layer, arguments)
            self._activations = self._activations.through(run, path=self._scratch / f"reference-{self.layers_run}")
            self.layers_run += 1
        return self._activations


def _run(layer: nn.Module, arguments: Mapping[str, Any], hidden_BTH: Tensor) -> Tensor:
    return run_layer(layer, hidden_BTH, arguments)
