"""INT8 through torchao's PT2E: which tensors are quantized, on which grid, and the states of a graph.

    captured --prepare--> prepared --observe, fix_ranges--> trained, perhaps --convert--> integer codes

| tensor | grid |
|---|---|
| input of a linear layer | uint8 per tensor, affine, range by a moving average over the calibration batches |
| weight [O, I] of a linear layer | int8 per output channel, symmetric, codes in [-63, 63] |
| bias [O] | int32 on (input scale x weight scale), what integer kernels accumulate in |

Weights use 7 of their 8 bits: CPUs without VNNI add two products u8 x s8 in 16 bits, and 2 x 255 x 63 = 32,130 is
the largest such sum that stays below 32,768. So the shipped file gives the same integers on every CPU.
Ranges are fixed before training starts: training moves the weights on the grid that ships.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e import (
    FakeQuantize,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    disable_fake_quant,
    disable_observer,
    enable_fake_quant,
)
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_qat_pt2e
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer

from compressors.graph_capture import PREFIX, known_warnings
from modelpress.errors import InvalidModel

WEIGHT_CODE_MAX = 63
ACTIVATION_CODE_MAX = 255
AVERAGING_CONSTANT = 0.1
"""Weight of each calibration batch in the moving average of a range."""
BIAS_CODE_MAX = 2**30
"""Half of int32's range: the rest is for the sum of products."""
LINEAR = torch.ops.aten.linear.default


INPUT_SPEC = QuantizationSpec(
    dtype=torch.uint8,
    observer_or_fake_quant_ctr=FakeQuantize.with_args(
        observer=MovingAverageMinMaxObserver, averaging_constant=AVERAGING_CONSTANT
    ),
    quant_min=0,
    quant_max=ACTIVATION_CODE_MAX,
    qscheme=torch.per_tensor_affine,
)
WEIGHT_SPEC = QuantizationSpec(
    dtype=torch.int8,
    observer_or_fake_quant_ctr=FakeQuantize.with_args(
        observer=MovingAveragePerChannelMinMaxObserver, averaging_constant=1.0
    ),
    quant_min=-WEIGHT_CODE_MAX,
    quant_max=WEIGHT_CODE_MAX,
    qscheme=torch.per_channel_symmetric,
    ch_axis=0,
)


class LinearQuantizer(Quantizer):  # type: ignore[misc]
    """Annotates the inputs and weights of exactly these linear layers, by module path."""

    def __init__(self, modules: frozenset[str]) -> None:
        super().__init__()
        self.modules = modules

    def annotate(self, model: GraphModule) -> GraphModule:
        for node in linear_nodes(model):
            if module_path(node.args[1]) in self.modules:
                node.meta["quantization_annotation"] = QuantizationAnnotation(
                    input_qspec_map={node.args[0]: INPUT_SPEC, node.args[1]: WEIGHT_SPEC}, _annotated=True
                )
        return model

    def validate(self, model: GraphModule) -> None:
        """Nothing to refuse: `prepare` checks what was annotated."""


@dataclass(frozen=True)
class Site:
    """A quantized linear layer of a prepared graph. Layers that read the same tensor share `input`."""

    module: str
    input: Any
    weight: Any
    bias: Tensor | None
    """[O]"""


def prepare(captured: GraphModule, *, modules: Iterable[str]) -> GraphModule:
    """Insert fake quantization at every layer of `modules`, ranges still unknown."""
    wanted = frozenset(modules)
    with known_warnings():
        prepared: GraphModule = prepare_qat_pt2e(captured, LinearQuantizer(wanted))
    missing = wanted - {site.module for site in sites(prepared)}
    if missing:
        raise InvalidModel(f"linear layer {min(missing)!r} is not in the model's graph: add it to `ignore`")
    return prepared


def observe(prepared: GraphModule, batches: Iterable[tuple[Tensor, ...]]) -> None:
    """Set every range from float forward passes over the calibration batches, then fix it.

    Raises InvalidModel naming the layer whose input is not finite.
    """
    prepared.apply(disable_fake_quant)
    with torch.no_grad():
        for inputs in batches:
            try:
                prepared(*inputs)
            except AssertionError:  # torchao's, where a range is NaN
                for site in sites(prepared):
                    _check_finite(site)
                raise
    fix_ranges(prepared)


def fix_ranges(prepared: GraphModule) -> None:
    """Turn observation off and fake quantization on; put each bias on its int32 grid, and freeze it there.

    Afterwards `prepared` computes what `convert(prepared)` does, up to the rounding of FP32 sums.
    """
    for site in sites(prepared):
        _check_finite(site)
        _refresh(site.input)
        if site.bias is not None:
            _widen_weight_range(site.weight, site.bias, input_scale=site.input.scale)
        _refresh(site.weight)
        if site.bias is not None:
            scale_O = site.input.scale * site.weight.scale
            site.bias.data = bias_codes(site.bias.detach(), scale_O).to(torch.float32) * scale_O
            site.bias.requires_grad_(False)
    prepared.apply(disable_observer)
    prepared.apply(enable_fake_quant)


def bias_codes(bias_O: Tensor, scale_O: Tensor) -> Tensor:
    """int32 [O], rounded half to even; bias_codes(codes * scale, scale) == codes."""
    return torch.round(bias_O.double() / scale_O.double()).to(torch.int32)


def ranges(prepared: GraphModule) -> dict[str, Tensor]:
    """The fixed ranges by name: `MODULE.input_min`, `.input_max` (scalars), `.weight_min`, `.weight_max` ([O])."""
    return {name: value.detach().clone() for name, (_, _, value) in _range_buffers(prepared).items()}


def load_ranges(prepared: GraphModule, tensors: Mapping[str, Tensor]) -> None:
    """The reverse of `ranges`: afterwards the graph computes exactly as the one that they were taken from.

    Raises InvalidModel where a range is missing or unknown.
    """
    buffers = _range_buffers(prepared)
    if buffers.keys() != tensors.keys():
        odd = min(buffers.keys() ^ tensors.keys())
        raise InvalidModel(f"the quantizer state does not fit the model: range {odd!r} is in one of them only")
    for name, (observer, end, _) in buffers.items():
        setattr(observer, end, tensors[name].clone())
    fix_ranges(prepared)


def convert(prepared: GraphModule) -> GraphModule:
    """Fold the weights into integer codes. `prepared` is used up."""
    with known_warnings():
        converted: GraphModule = convert_pt2e(prepared)
    return converted


def sites(prepared: GraphModule) -> tuple[Site, ...]:
    """Every quantized linear layer, in the order of the graph."""
    found = []
    for node in linear_nodes(prepared):
        inputs, weight, *rest = node.args
        if weight.op == "call_module":
            found.append(
                Site(
                    module=module_path(weight.args[0]),
                    input=prepared.get_submodule(inputs.target),
                    weight=prepared.get_submodule(weight.target),
                    bias=prepared.get_parameter(rest[0].target) if rest and rest[0] is not None else None,
                )
            )
    return tuple(found)


def linear_nodes(graph: GraphModule) -> list[Any]:
    return [node for node in graph.graph.nodes if node.target is LINEAR]


def module_path(weight: Node) -> str:
    """`bert.pooler.dense` for the node that reads its weight."""
    return str(weight.target).removeprefix(PREFIX).removesuffix(".weight")


def _range_buffers(prepared: GraphModule) -> dict[str, tuple[Any, str, Tensor]]:
    """Name of every range, with its observer, the observer's attribute and the value."""
    found = {}
    for site in sites(prepared):
        for role, fake_quantize in (("input", site.input), ("weight", site.weight)):
            observer = fake_quantize.activation_post_process
            for end in ("min", "max"):
                attribute = f"{end}_val"
                found[f"{site.module}.{role}_{end}"] = (observer, attribute, getattr(observer, attribute))
    return found


def _check_finite(site: Site) -> None:
    for role, fake_quantize in (("input", site.input), ("weight", site.weight)):
        observer = fake_quantize.activation_post_process
        for bound in (observer.min_val, observer.max_val):
            if bound.numel() == 0 or not torch.isfinite(bound).all():
                raise InvalidModel(
                    f"the {role} of {site.module!r} is not finite on the calibration data: "
                    "check the model's weights, or add the layer to `ignore`",
                    reason="NON_FINITE",
                    field=site.module,
                )


def _widen_weight_range(weight: Any, bias_O: Tensor, *, input_scale: Tensor) -> None:
    """Raise the scale of channels whose weights are so small that their bias would not fit into int32.

    Such a row's codes may become 0: what is lost is below 2**-21 of the channel's own bias.
    """
    observer = weight.activation_post_process
    least_O = bias_O.detach().abs() / input_scale / BIAS_CODE_MAX * WEIGHT_CODE_MAX
    observer.max_val = torch.maximum(observer.max_val, least_O.to(observer.max_val))


def _refresh(fake_quantize: Any) -> None:
    """Set scale and zero point from the observed range: the fused kernel does so only in its next forward pass."""
    scale, zero_point = fake_quantize.calculate_qparams()
    for buffer, value in ((fake_quantize.scale, scale), (fake_quantize.zero_point, zero_point)):
        buffer.resize_(value.shape)
        buffer.copy_(value)
