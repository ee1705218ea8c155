"""The values of a compressed-tensors checkpoint, unpacked by the compressed-tensors package itself.

Each layer is unpacked from the tensors as they are stored, so that its values are computed in the scales' dtype:
`from_pretrained` would cast the scales to the model's dtype first. What the scheme says of activations is done by
`quantize_activations` on the open model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from torch import Tensor, nn

from evaluators.stored_weights import StoredTensor, Weights
from modelpress.errors import InvalidModel

SCALES = ".weight_scale"
PARTS = (SCALES, ".weight_packed", ".weight_shape", ".weight_zero_point", ".weight_g_idx")
OWN_FIELDS = ("quant_method", "sparsity_config", "transform_config", "version")
"""Of config.json's quantization_config, beside the package's QuantizationConfig."""


@dataclass(frozen=True)
class CompressedWeights:
    """The stored weights, the quantized ones of them as values in their own shapes. `scheme` is the package's."""

    stored: Weights
    scheme: Any
    layout: str

    @classmethod
    def of(cls, stored: Weights) -> CompressedWeights:
        """InvalidModel for a quantization_config that the package refuses, or that has more than one group."""
        scheme, layout = read_scheme(stored.config["quantization_config"])
        return cls(stored, scheme, layout)

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """What the model would have if it had not been quantized."""
        plain = {name: tensor for name, tensor in self.stored.tensors.items() if not name.endswith(PARTS)}
        for name, scales in self.stored.tensors.items():
            if name.endswith(SCALES):
                module = name.removesuffix(SCALES)
                plain[f"{module}.weight"] = replace(scales, shape=self._shape(module))
        return plain

    def load(self, name: str) -> Tensor:
        """The tensor on the CPU, in its scales' dtype where it was quantized."""
        module = name.removesuffix(".weight")
        if name == module or module + SCALES not in self.stored.tensors:
            return self.stored.load(name)
        parts = {
            part: self.stored.load(f"{module}.{part}")
            for part in ("weight", *(part[1:] for part in PARTS))
            if f"{module}.{part}" in self.stored.tensors
        }
        try:
            weight: Tensor = BaseCompressor.get_value_from_registry(self.layout).decompress(parts, self.scheme)[
                "weight"
            ]
        except (KeyError, ValueError, RuntimeError, AssertionError, TypeError) as error:
            raise InvalidModel(
                f"the parts of {module!r} cannot be unpacked as {self.layout!r}: export the model again", field=module
            ) from error
        return weight

    def _shape(self, module: str) -> tuple[int, ...]:
        if f"{module}.weight_shape" in self.stored.tensors:
            return tuple(self.stored.load(f"{module}.weight_shape").tolist())
        if f"{module}.weight" not in self.stored.tensors:
            raise InvalidModel(f"{module + SCALES!r} has no weight beside it: export the model again", field=module)
        return self.stored.tensors[f"{module}.weight"].shape


def read_scheme(settings: Mapping[str, Any]) -> tuple[Any, str]:
    """The package's scheme of the only group of config.json's quantization_config, and the layout's name."""
    try:
        config = QuantizationConfig.model_validate({k: v for k, v in settings.items() if k not in OWN_FIELDS})
    except ValueError as error:
        raise InvalidModel(
            "config.json: compressed-tensors refuses its quantization_config", field="quantization_config"
        ) from error
    schemes = list(config.config_groups.values())
    if len(schemes) != 1 or schemes[0].weights is None:
        raise InvalidModel(
            f"config.json: quantization_config has {len(schemes)} config_groups: one group with weights is read",
            field="quantization_config.config_groups",
        )
    return schemes[0], str(schemes[0].format or config.format)


def quantize_activations(model: nn.Module, weights: CompressedWeights) -> None:
    """Let every quantized layer round its input as the scheme says, with a scale computed for each token.

    Nothing where the scheme leaves activations alone. InvalidModel for scales that are stored instead.
    """
    arguments = weights.scheme.input_activations
    if arguments is None:
        return
    if arguments.dynamic is not True:
        raise InvalidModel(
            "config.json: activations have stored scales: dynamic ones are computed here",
            field="quantization_config.config_groups",
        )

    def rounded(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        scales, zeros = compute_dynamic_scales_and_zp(inputs[0], arguments, module)
        return (fake_quantize(inputs[0], scales, zeros, arguments), *inputs[1:])

    for name in weights.stored.tensors:
        if name.endswith(SCALES):
            model.get_submodule(name.removesuffix(SCALES)).register_forward_pre_hook(rounded)
