"""How transformers' models lay out what their files store: literal tables, and which stored layers are loaded at all.

Free of torch: preflight and merge judge by the same tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

CONV1D_MODULES: Mapping[str, frozenset[str]] = dict.fromkeys(
    ("gpt2", "decision_transformer", "imagegpt", "openai-gpt", "clvp", "clvp_decoder"),
    frozenset({"c_attn", "c_proj", "c_fc", "q_attn"}),
)
"""model_type -> last names of the modules that are transformers' Conv1D: their weights are stored as [in, out]."""
TRANSPOSED_EXPERTS = frozenset({"gpt_oss", "openai_privacy_filter", "aria", "aria_text"})
"""Model types whose fused experts are [experts, in, out]."""
STORED_EXPERTS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "mlp.experts.gate_up_proj": (
        ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
        ("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"),
    ),
    "mlp.experts.down_proj": (("mlp.experts.{}.down_proj.weight",), ("block_sparse_moe.experts.{}.w2.weight",)),
}
"""End of a fused parameter's name -> how checkpoints store it: expert by expert, the parts one below the other."""
RENAMED = ((".mlp.", ".block_sparse_moe."),)
"""(part of a name in the loaded model, what it is in files of some model types)."""
SINGLE_EXPERT = re.compile(r"\.experts\.\d+\.")
LAYER_COUNTS = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers"),
    *("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"),
)
"""Fields of a config that count layers; a model of several parts has some in each part's own config."""
_NUMBERED_LAYER = re.compile(r"(?<![^.])(?:layers|layer|blocks|block|h)\.(\d+)\.")
_TOKEN_PREDICTION = re.compile(r"(?<![^.])mtp")
"""Modules of multi-token prediction, which transformers leaves out: `mtp.layers.0`, `model.mtp_block.0`."""


def is_conv1d(module: str, model_type: str | None) -> bool:
    """Whether the module's weight is stored as [in, out]."""
    return module.rpartition(".")[2] in CONV1D_MODULES.get(model_type or "", frozenset())


def layer_count(config: Mapping[str, Any]) -> int | None:
    """The layers of the deepest part of the model, as its config.json says; None where it does not."""
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    counts = [part[name] for part in parts for name in LAYER_COUNTS if type(part.get(name)) is int]
    return max((count for count in counts if count > 0), default=None)


def is_loaded(name: str, layers: int | None) -> bool:
    """Whether transformers loads the stored tensor: not so a layer numbered `layers` or higher, nor the modules of
    multi-token prediction (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report"), which are stored as either.
    """
    if _TOKEN_PREDICTION.search(name):
        return False
    numbered = _NUMBERED_LAYER.search(name)
    return numbered is None or layers is None or int(numbered[1]) < layers
