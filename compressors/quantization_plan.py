"""What `quantize_weights` will do to a decoder, settled before anything is computed or written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from compressors.decoder_families import LinearGroup
from compressors.decoder_layers import DecoderLayers
from compressors.decoder_targets import Targets, choose_targets
from compressors.integer_grid import IntegerGrid
from compressors.quantized_sizes import predicted_weight_bytes, quantized_tensors, stored_bytes
from compressors.weight_files import DTYPE_NAMES
from compressors.weight_layouts import WeightLayout, weight_layout
from modelpress.errors import InvalidRecipe
from modelpress.quantization_recipes import QuantizeWeights
from modelpress.quantization_reports import QuantizedLayer

SCALE_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


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
        """InvalidRecipe for targets that cannot be, or more misfits than the recipe allows."""
        targets = choose_targets(arguments, decoder.family, layers=len(decoder))
        plan = QuantizationPlan(arguments, decoder, targets, _misfits(arguments, decoder, targets))
        plan.check_fallbacks(plan.misfits)
        if len(plan.misfits) == len(targets.quantized):
            raise InvalidRecipe(
                f"group_size: {arguments.group_size} divides the inputs of no target, e.g. {targets.quantized[0]}: "
                "choose another group_size",
                field="group_size",
            )
        return plan

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of the first quantized weight; the others' are alike in every model that transformers saves."""
        first = next(name for name in self.targets.quantized if name not in self.misfits)
        return self.decoder.files.tensors[f"{first}.weight"].dtype

    @cached_property
    def grid(self) -> IntegerGrid:
        arguments = self.arguments
        scale_dtype = SCALE_DTYPES.get(arguments.scale_dtype, self.dtype)
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
        prefix = self.decoder.family.layer(number)
        quantized = {name for name in self.targets.quantized if name not in self.misfits}
        return tuple(linear for linear in self.decoder.family.linears if f"{prefix}.{linear}" in quantized)

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
        """InvalidRecipe where more targets than the recipe allows are not quantized as it says, and why."""
        total, limit = len(self.targets.quantized), self.arguments.max_fallback_share
        if len(reasons) > limit * total:
            name, reason = next(iter(reasons.items()))
            raise InvalidRecipe(
                f"max_fallback_share: {len(reasons)} of {total} targets cannot be quantized as the recipe says, where "
                f"{limit:g} of them may, e.g. {name}: {reason}; ignore them, or raise max_fallback_share",
                field="max_fallback_share",
            )


def _misfits(arguments: QuantizeWeights, decoder: DecoderLayers, targets: Targets) -> dict[str, str]:
    inputs = {name: decoder.files.tensors[f"{name}.weight"].shape[1] for name in targets.quantized}
    size = arguments.group_size
    return {
        name: f"its {count} inputs are not divided by group_size {size}, so it stays float"
        for name, count in inputs.items()
        if size and count % size
    }
