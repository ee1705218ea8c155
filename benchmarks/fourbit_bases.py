"""The models that are quantized: SmolLM2-135M as it is, and the same function in another basis.

SmolLM2's weights lie on an asymmetric 4-bit grid of groups of 32. In the second base every width of the residual stream
is turned by one random orthogonal matrix (Ashkboos et al. 2024, "SliceGPT": norms folded into the layers behind them),
so that no grid is a gift; its head is untied.

Shapes: H hidden width, I inputs, O outputs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

READERS = (
    ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
)
"""A layer's norms, and the linear layers that read the residual stream through them."""
WRITERS = ("self_attn.o_proj", "mlp.down_proj")
GRAPH = "graph"
"""The folder, beside a base's, that holds it as an FP32 graph."""


def write_rotated(source: Path, folder: Path, *, seed: int) -> Path:
    """The model of `source` in a random orthogonal basis: equal logits up to float rounding."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    basis_HH = orthogonal(model.config.hidden_size, seed=seed)
    embeddings_VH = model.model.embed_tokens.weight.detach().double()
    head_VH = embeddings_VH * model.model.norm.weight.detach().double()
    for layer in model.model.layers:
        _turn(layer, basis_HH)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter((head_VH @ basis_HH).float())
    model.model.embed_tokens.weight = torch.nn.Parameter((embeddings_VH @ basis_HH).float())
    torch.nn.init.ones_(model.model.norm.weight)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def orthogonal(width: int, *, seed: int) -> Tensor:
    """A random orthogonal matrix [H, H] in float64: Q of the QR decomposition of a Gaussian one."""
    generator = torch.Generator().manual_seed(seed)
    basis_HH, triangle_HH = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))
    return basis_HH * triangle_HH.diagonal().sign()


def _turn(layer: Any, basis_HH: Tensor) -> None:
    for norm, readers in READERS:
        scale_H = layer.get_submodule(norm).weight.detach().double()
        for name in readers:
            weight_OI = layer.get_submodule(name).weight
            weight_OI.data = ((weight_OI.detach().double() * scale_H) @ basis_HH).float()
        torch.nn.init.ones_(layer.get_submodule(norm).weight)
    for name in WRITERS:
        weight_OI = layer.get_submodule(name).weight
        weight_OI.data = (basis_HH.T @ weight_OI.detach().double()).float()
