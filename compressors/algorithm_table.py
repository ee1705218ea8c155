"""The algorithms of `quantize_weights` that choose the codes of one decoder layer after the other."""

from __future__ import annotations

from collections.abc import Mapping

from compressors import rtn
from compressors.layer_algorithms import LayerAlgorithm
from modelpress.quantization_recipes import Algorithm

LAYER_ALGORITHMS: Mapping[Algorithm, LayerAlgorithm] = {
    "rtn": rtn.quantize_layer,
}
