"""Decoder language models: what a config must say and which tensors its weights must have.

The families are those of `compressors.decoder_families`; here stand their sizes, as transformers' configs define them.
Linear weights are [out, in].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from compressors.decoder_families import DECODERS, DecoderFamily
from service.intake.configs import check_values, fail, is_above_zero, is_share, refuse_quantized
from service.intake.families import MAX_LAYERS, MIN_POSITIONS, Shapes, size_of, unknown
from service.intake.rotary import check_rotary

TASK = "text-generation"
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
FEED_FORWARD = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
ACTIVATIONS = frozenset({"silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"})


@dataclass(frozen=True)
class DecoderSizes:
    """A config's sizes, each an integer >= 1. `max_positions` is the longest input in tokens."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    max_positions: int


@dataclass(frozen=True)
class _Defaults:
    """What a config of one family means where it leaves a field out, and which of its linear layers have a bias."""

    kv_heads: int | None = None
    """None: as many as heads."""
    head_dim: int | None = None
    """None: the hidden width over the heads."""
    always_biased: tuple[str, ...] = ()
    biased: Mapping[str, tuple[str, ...]] | None = None
    """Field of the config that is true -> linear layers that then have a bias."""


_DEFAULTS: Mapping[str, _Defaults] = {
    "llama": _Defaults(biased={"attention_bias": ATTENTION, "mlp_bias": FEED_FORWARD}),
    "mistral": _Defaults(kv_heads=8),
    "qwen2": _Defaults(kv_heads=32, always_biased=ATTENTION[:3]),
    "qwen3": _Defaults(kv_heads=32, head_dim=128, biased={"attention_bias": ATTENTION}),
}
_LINEARS: Mapping[str, Callable[[DecoderSizes], tuple[int, int]]] = {
    "self_attn.q_proj": lambda d: (d.heads * d.head_dim, d.hidden),
    **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), lambda d: (d.kv_heads * d.head_dim, d.hidden)),
    "self_attn.o_proj": lambda d: (d.hidden, d.heads * d.head_dim),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), lambda d: (d.ffn, d.hidden)),
    "mlp.down_proj": lambda d: (d.hidden, d.ffn),
}
_PER_HEAD = ("self_attn.q_norm", "self_attn.k_norm")
"""Norms over the channels of one head; every other one is over the hidden width."""
_VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "rms_norm_eps": (is_above_zero, "a decimal number above 0, e.g. 1e-05"),
    "attention_dropout": (is_share, "a number from 0 to 1"),
    "tie_word_embeddings": (lambda value: type(value) is bool, "true or false"),
    **dict.fromkeys(("attention_bias", "mlp_bias"), (lambda value: type(value) is bool, "true or false")),
    "hidden_act": (lambda value: isinstance(value, str) and value in ACTIVATIONS, ", ".join(sorted(ACTIVATIONS))),
}


def is_decoder(config: Mapping[str, Any]) -> bool:
    kind = config.get("model_type")
    return isinstance(kind, str) and kind in DECODERS


def read_decoder(config: Mapping[str, Any]) -> DecoderSizes:
    """The sizes that a decoder's config.json gives; InvalidModel names the field that cannot be."""
    family, defaults = DECODERS[config["model_type"]], _DEFAULTS[config["model_type"]]
    if config.get("architectures") != [family.architecture]:
        unknown("architectures", config.get("architectures"), f'["{family.architecture}"]')
    refuse_quantized(config)
    check_values(config, _VALUES)
    check_rotary(config)
    hidden, heads = size_of(config, "hidden_size"), size_of(config, "num_attention_heads")
    return DecoderSizes(
        vocabulary=size_of(config, "vocab_size"),
        hidden=hidden,
        layers=size_of(config, "num_hidden_layers", MAX_LAYERS),
        heads=heads,
        kv_heads=_kv_heads(config, heads, defaults),
        head_dim=_head_dim(config, hidden, heads, defaults),
        ffn=size_of(config, "intermediate_size"),
        max_positions=size_of(config, "max_position_embeddings", least=MIN_POSITIONS),
    )


def decoder_shapes(config: Mapping[str, Any], sizes: DecoderSizes) -> Shapes:
    """The tensors that the weights must have."""
    family = DECODERS[config["model_type"]]
    shapes: dict[str, tuple[int, ...]] = {
        f"{family.embeddings}.weight": (sizes.vocabulary, sizes.hidden),
        f"{family.norm}.weight": (sizes.hidden,),
    }
    if not config.get("tie_word_embeddings", False):
        shapes[f"{family.head}.weight"] = (sizes.vocabulary, sizes.hidden)
    for number in range(sizes.layers):
        shapes |= {f"{family.layer(number)}.{name}": shape for name, shape in _layer(config, family, sizes).items()}
    return shapes


def optional_tensors(config: Mapping[str, Any], sizes: DecoderSizes) -> frozenset[str]:
    """Tensors that may be stored, too, and are not read: tables of angles, and a head that is tied."""
    family = DECODERS[config["model_type"]]
    angles = [f"{family.layer(number)}.self_attn.rotary_emb.inv_freq" for number in range(sizes.layers)]
    return frozenset((*angles, f"{family.rotary}.inv_freq", f"{family.head}.weight"))


def _layer(config: Mapping[str, Any], family: DecoderFamily, sizes: DecoderSizes) -> dict[str, tuple[int, ...]]:
    """One decoder layer, by names inside it."""
    biased = _biased(config)
    shapes: dict[str, tuple[int, ...]] = {}
    for linear in family.linears:
        shapes[f"{linear}.weight"] = _LINEARS[linear](sizes)
        if linear in biased:
            shapes[f"{linear}.bias"] = _LINEARS[linear](sizes)[:1]
    return shapes | {
        f"{norm}.weight": (sizes.head_dim if norm in _PER_HEAD else sizes.hidden,) for norm in family.norms
    }


def _biased(config: Mapping[str, Any]) -> tuple[str, ...]:
    defaults = _DEFAULTS[config["model_type"]]
    asked = (linears for field, linears in (defaults.biased or {}).items() if config.get(field))
    return (*defaults.always_biased, *(linear for linears in asked for linear in linears))


def _kv_heads(config: Mapping[str, Any], heads: int, defaults: _Defaults) -> int:
    given = config.get("num_key_value_heads")
    count = (defaults.kv_heads or heads) if given is None else size_of(config, "num_key_value_heads")
    if heads % count:
        fail("num_key_value_heads", f"is {count}, which does not divide num_attention_heads {heads}")
    return count


def _head_dim(config: Mapping[str, Any], hidden: int, heads: int, defaults: _Defaults) -> int:
    if config.get("head_dim") is not None:
        return size_of(config, "head_dim")
    if defaults.head_dim is None and hidden % heads:
        fail("num_attention_heads", f"is {heads}, which does not divide hidden_size {hidden}")
    return defaults.head_dim or hidden // heads
