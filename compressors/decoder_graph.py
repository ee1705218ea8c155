"""A decoder language model as one ONNX graph with a key/value cache.

    input_ids, position_ids [B, T], attention_mask [B, P + T], past_key_values.<layer>.{key,value} [B, H, P, D]
    -> logits [B, T, V], present.<layer>.{key,value} [B, H, P + T, D]

B rows, T tokens, P tokens before them, all three free and P may be 0; H key/value heads of width D; V tokens of the
vocabulary. The names are those that optimum and ONNX Runtime's own tools give.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes import common as passes
from torch import Tensor, nn
from torch.export import Dim
from transformers import DynamicCache

from compressors.decoder_families import STATIC_ROPE, DecoderFamily
from compressors.graph_capture import known_warnings
from modelpress.errors import InternalError, InvalidModel

INPUTS = ("input_ids", "attention_mask", "position_ids")
TRACED_SHAPE = (2, 3, 5)
"""B, T and P while tracing: three different numbers above 1."""
WRAPPED = "model."
"""In front of each weight's name: the graph holds the model inside a wrapper."""
FULL, SLIDING = "full_attention", "sliding_attention"


def _same_for_all(config: Any) -> tuple[str, ...]:
    return (FULL,) * int(config.num_hidden_layers)


def _one_window(config: Any) -> tuple[str, ...]:
    return (FULL if config.sliding_window is None else SLIDING,) * int(config.num_hidden_layers)


def _by_layer(config: Any) -> tuple[str, ...]:
    return tuple(config.layer_types)


ATTENTION: Mapping[str, Callable[[Any], tuple[str, ...]]] = {
    "llama": _same_for_all,
    "mistral": _one_window,
    "qwen2": _by_layer,
    "qwen3": _by_layer,
}
"""config's model_type -> each layer's kind of attention, as the family's code in transformers chooses it."""


class DecoderGraph(nn.Module):
    """The model's modules, called one after the other as its own forward pass does, with masks in plain arithmetic."""

    def __init__(self, model: Any, family: DecoderFamily) -> None:
        super().__init__()
        self.model, self.family = model, family
        self.kinds = ATTENTION[model.config.model_type](model.config)
        if unknown := set(self.kinds) - {FULL, SLIDING}:
            raise InvalidModel(f"layer_types {', '.join(sorted(unknown))} is not supported", field="layer_types")
        rope = model.config.rope_parameters["rope_type"]
        if rope not in STATIC_ROPE:
            raise InvalidModel(
                f"rope_type {rope!r} depends on the text's length, which an ONNX graph cannot: possible are "
                f"{', '.join(STATIC_ROPE)}",
                field="rope_parameters",
            )

    def forward(self, ids_BT: Tensor, mask_BS: Tensor, positions_BT: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        """`past` and what follows the logits: key and value [B, H, P, D] of layer 0, then of layer 1, ..."""
        get = self.model.get_submodule
        cache = DynamicCache(ddp_cache_data=list(zip(past[::2], past[1::2], strict=True)))
        masks = {kind: self._additive_mask(mask_BS, ids_BT.shape[1], kind) for kind in sorted(set(self.kinds))}
        hidden_BTE = get(self.family.embeddings)(ids_BT)
        rotary = get(self.family.rotary)(hidden_BTE, positions_BT)
        for number, kind in enumerate(self.kinds):
            hidden_BTE = get(self.family.layer(number))(
                hidden_BTE,
                attention_mask=masks[kind],
                position_ids=positions_BT,
                position_embeddings=rotary,
                cache=cache,
                use_cache=True,
            )
        logits_BTV = get(self.family.head)(get(self.family.norm)(hidden_BTE))
        return (logits_BTV, *(state for layer in cache.layers for state in (layer.keys, layer.values)))

    def _additive_mask(self, mask_BS: Tensor, tokens: int, kind: str) -> Tensor:
        """[B, 1, T, S]: 0 where a token is seen, the lowest float where not. A window counts cached places."""
        places_S = torch.arange(mask_BS.shape[1])
        queries_T1 = (torch.arange(tokens) + (mask_BS.shape[1] - tokens))[:, None]
        seen_TS = places_S <= queries_T1
        if kind == SLIDING:
            seen_TS = seen_TS & (places_S > queries_T1 - self.model.config.sliding_window)
        seen_B1TS = seen_TS & (mask_BS[:, None, None, :] != 0)
        return torch.where(seen_B1TS, 0.0, torch.finfo(torch.float32).min)


class TransposedHead(nn.Module):
    """The logits as one Gemm that reads the weight [V, E] as the embedding has it: a tied weight is stored once."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = head.weight, head.bias

    def forward(self, hidden_BTE: Tensor) -> Tensor:
        hidden_NE = hidden_BTE.flatten(0, 1)
        vocabulary = self.weight.shape[0]
        logits_NV = torch.onnx.ops.symbolic(
            "Gemm",
            (hidden_NE, self.weight, *(() if self.bias is None else (self.bias,))),
            {"transB": 1},
            dtype=hidden_NE.dtype,
            shape=(hidden_NE.shape[0], vocabulary),
        )
        return logits_NV.view(*hidden_BTE.shape[:2], vocabulary)


def past_names(layers: int) -> tuple[str, ...]:
    return tuple(f"past_key_values.{layer}.{part}" for layer in range(layers) for part in ("key", "value"))


def output_names(layers: int) -> tuple[str, ...]:
    presents = (f"present.{layer}.{part}" for layer in range(layers) for part in ("key", "value"))
    return ("logits", *presents)


def empty_past(config: Any, *, rows: int, tokens: int = 0) -> list[Tensor]:
    """Zeros in the shapes of `past`."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (rows, config.num_key_value_heads, tokens, width)
    return [torch.zeros(shape) for _ in range(2 * config.num_hidden_layers)]


def to_onnx(model: Any, family: DecoderFamily, *, opset: int) -> ir.Model:
    """The model, whose quantized layers are `MatMulNBits` modules, as ONNX; its head is replaced on the way."""
    head = model.get_submodule(family.head)
    if isinstance(head, nn.Linear):
        model.set_submodule(family.head, TransposedHead(head))
    rows, tokens, before = TRACED_SHAPE
    layers = model.config.num_hidden_layers
    batch, sequence, past = Dim("batch"), Dim("sequence"), Dim("past")
    free = ({0: batch, 1: sequence}, {0: batch, 1: Dim.DYNAMIC}, {0: batch, 1: sequence})
    with known_warnings():
        program = torch.onnx.export(
            DecoderGraph(model, family).eval(),
            (
                torch.zeros(rows, tokens, dtype=torch.int64),
                torch.ones(rows, before + tokens, dtype=torch.int64),
                torch.arange(before, before + tokens).repeat(rows, 1),
                *empty_past(model.config, rows=rows, tokens=before),
            ),
            dynamo=True,
            dynamic_shapes=(*free, tuple({0: batch, 2: past} for _ in range(2 * layers))),
            input_names=[*INPUTS, *past_names(layers)],
            output_names=list(output_names(layers)),
            opset_version=opset,
            verbose=False,
        )
    if program is None:
        raise InternalError("torch.onnx gave no program")
    return _cleaned(program.model)


def _cleaned(model: ir.Model) -> ir.Model:
    """Without what does not compute; weights are named as in torch, the mask's length as the outputs name theirs."""
    passes.RemoveUnusedNodesPass()(model)
    passes.ClearMetadataAndDocStringPass()(model)
    for weight in tuple(model.graph.initializers.values()):
        weight.name = (weight.name or "").removeprefix(WRAPPED)
    mask = next(value for value in model.graph.inputs if value.name == "attention_mask")
    mask.shape = ir.Shape(["batch", "past + sequence"])
    return model
