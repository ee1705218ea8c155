"""The decoder language models that the stages know: where their layers are and which linear layers read the same input.

A literal table, free of torch: preflight reads it too. A new family of the same kind is one row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embeddings whose frequencies do not depend on the length of the text."""


@dataclass(frozen=True)
class LinearGroup:
    """Linear layers of one decoder layer that read the same input, in the order in which they run.

    `source` is what makes that input, channel by channel: a norm, or the linear layer whose output channels become the
    input channels. Scaling its channels can be undone in the group. None: no such module.
    """

    linears: tuple[str, ...]
    source: str | None


@dataclass(frozen=True)
class DecoderFamily:
    """Module paths inside the model; those in `groups` and `norms` are inside one decoder layer."""

    architecture: str
    """The class under `architectures` in config.json."""
    layers: str
    embeddings: str
    norm: str
    rotary: str
    head: str
    groups: tuple[LinearGroup, ...]
    norms: tuple[str, ...]
    """Every other module of a decoder layer that has weights."""

    @property
    def linears(self) -> tuple[str, ...]:
        return tuple(linear for group in self.groups for linear in group.linears)

    def layer(self, number: int) -> str:
        """Path of decoder layer `number`, counted from 0."""
        return f"{self.layers}.{number}"


_GROUPS = (
    LinearGroup(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "input_layernorm"),
    LinearGroup(("self_attn.o_proj",), "self_attn.v_proj"),
    LinearGroup(("mlp.gate_proj", "mlp.up_proj"), "post_attention_layernorm"),
    LinearGroup(("mlp.down_proj",), "mlp.up_proj"),
)
_NORMS = ("input_layernorm", "post_attention_layernorm")


def _llama_like(architecture: str, norms: tuple[str, ...] = _NORMS) -> DecoderFamily:
    return DecoderFamily(
        architecture=architecture,
        layers="model.layers",
        embeddings="model.embed_tokens",
        norm="model.norm",
        rotary="model.rotary_emb",
        head="lm_head",
        groups=_GROUPS,
        norms=norms,
    )


DECODERS: Mapping[str, DecoderFamily] = {
    "llama": _llama_like("LlamaForCausalLM"),
    "mistral": _llama_like("MistralForCausalLM"),
    "qwen2": _llama_like("Qwen2ForCausalLM"),
    "qwen3": _llama_like("Qwen3ForCausalLM", (*_NORMS, "self_attn.q_norm", "self_attn.k_norm")),
}
"""config's model_type -> family."""
