"""The algorithms of `quantize_weights` that choose the codes of one decoder layer after the other."""

from __future__ import annotations

from collections.abc import Mapping

from compressors import awq_layers, gptq_layers, rtn, signround_layers
from compressors.layer_algorithms import LayerAlgorithm
from modelpress.quantization_recipes import Algorithm

LAYER_ALGORITHMS: Mapping[Algorithm, LayerAlgorithm] = {
    "rtn": rtn.quantize_layer,
    "gptq": gptq_layers.quantize_layer,
    "awq": awq_layers.quantize_layer,
    "signround": signround_layers.quantize_layer,
}
