"""What `quantize_weights` will do to a decoder, settled before anything is computed or written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from compressors.decoder_families import LinearGroup
from compressors.decoder_layers import DecoderLayers
from compressors.decoder_targets import Targets, check_fallbacks, choose_targets, misfits
from compressors.integer_grid import IntegerGrid
from compressors.quantized_sizes import SCALE_DTYPES, predicted_weight_bytes, quantized_tensors, stored_bytes
from compressors.weight_files import DTYPE_NAMES, DTYPES
from compressors.weight_layouts import WeightLayout, weight_layout
from modelpress.errors import InvalidModel
from modelpress.quantization_recipes import QuantizeWeights
from modelpress.quantization_reports import QuantizedLayer


@dataclass(frozen=True, eq=False)
class QuantizationPlan:
    """`misfits` are the targets that no group divides: they stay float. Modules by their full names."""

    arguments: QuantizeWeights
    decoder: DecoderLayers
    targets: Targets
    misfits: Mapping[str, str]
    """Target -> why it stays float."""

    @staticmethod
    def of(arguments: QuantizeWeights, decoder: DecoderLayers) -> QuantizationPlan:
        """InvalidRecipe for targets that cannot be, or more misfits than the recipe allows; InvalidModel where the
        scales are to have the weights' dtype and the weights have several.
        """
        targets = choose_targets(arguments, decoder.family, layers=len(decoder))
        shapes = {name: tensor.shape for name, tensor in decoder.files.tensors.items()}
        plan = QuantizationPlan(arguments, decoder, targets, misfits(arguments, targets, shapes))
        plan._check_dtypes()
        return plan

    @cached_property
    def quantized(self) -> tuple[str, ...]:
        """The targets without the misfits, in the model's order; never empty."""
        return tuple(name for name in self.targets.quantized if name not in self.misfits)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of the first quantized weight; where the scales have the weight's dtype, of all."""
        return self.decoder.files.tensors[f"{self.quantized[0]}.weight"].dtype

    @cached_property
    def grid(self) -> IntegerGrid:
        arguments = self.arguments
        scale_dtype = DTYPES[SCALE_DTYPES.get(arguments.scale_dtype, DTYPE_NAMES[self.dtype])]
        return IntegerGrid(arguments.num_bits, arguments.symmetric, arguments.group_size, scale_dtype)

    @cached_property
    def layout(self) -> WeightLayout:
        return weight_layout(self.arguments, self.grid, dtype=self.dtype)

    @cached_property
    def predicted_bytes(self) -> int:
        """Of all weight files together."""
        stored = self.decoder.files.tensors
        shapes = {name: tensor.shape for name, tensor in stored.items()}
        dtypes = {name: DTYPE_NAMES[tensor.dtype] for name, tensor in stored.items()}
        return predicted_weight_bytes(shapes, dtypes, stage=self.arguments, family=self.decoder.family)

    def _check_dtypes(self) -> None:
        stored = self.decoder.files.tensors
        other = next((name for name in self.quantized if stored[f"{name}.weight"].dtype != self.dtype), None)
        if self.arguments.scale_dtype == "stored" and other is not None:
            found = str(stored[f"{other}.weight"].dtype).removeprefix("torch.")
            raise InvalidModel(
                f"tensor '{other}.weight' has dtype {found}, and {self.quantized[0]!r} has "
                f"{str(self.dtype).removeprefix('torch.')}: save the model in one dtype, or, with an integer scheme, "
                "set scale_dtype",
                field=f"{other}.weight",
            )

    def bits_per_weight(self, modules: Sequence[str]) -> float:
        """Stored bits of these quantized linear layers, scales included, for each of their weights."""
        stored = [self.decoder.files.tensors[f"{module}.weight"] for module in modules]
        size = sum(
            stored_bytes(quantized_tensors("", tensor.shape, dtype=DTYPE_NAMES[tensor.dtype], stage=self.arguments))
            for tensor in stored
        )
        return 8 * size / sum(tensor.elements for tensor in stored)

    def linears(self, number: int) -> tuple[str, ...]:
        """Names inside decoder layer `number` of the linear layers that are to be quantized."""
        prefix = f"{self.decoder.family.layer(number)}."
        return tuple(name.removeprefix(prefix) for name in self.quantized if name.startswith(prefix))

    def groups(self, number: int) -> tuple[LinearGroup, ...]:
        """The family's groups, cut to those linear layers."""
        wanted = self.linears(number)
        cut = (
            LinearGroup(tuple(linear for linear in group.linears if linear in wanted), group.source)
            for group in self.decoder.family.groups
        )
        return tuple(group for group in cut if group.linears)

    def kept_float(self, records: Iterable[QuantizedLayer]) -> tuple[str, ...]:
        """Every linear layer that stays float, the head last."""
        return (*(record.name for record in records if record.algorithm == "none"), self.decoder.family.head)

    def check_fallbacks(self, reasons: Mapping[str, str]) -> None:
        """InvalidRecipe where, beside `misfits`, more targets than the recipe allows are not quantized as it says."""
        check_fallbacks(self.arguments, self.targets, {**self.misfits, **reasons})
