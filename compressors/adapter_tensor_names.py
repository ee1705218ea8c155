"""The names under which PEFT saves an adapter's tensors, taken apart: prefix, training wrappers, module and part.

    name = model_name("module.base_model.model.h.0.attn.c_attn.lora_A.weight")   # "h.0.attn.c_attn.lora_A.weight"
    PART.fullmatch(name)["module"]                                               # "h.0.attn.c_attn"

Free of torch: intake and merge read names by the same rules, so that neither refuses what the other takes.
"""

from __future__ import annotations

import re

PREFIX = "base_model.model."
"""What PEFT puts before the name of every tensor that belongs to a module."""
PART = re.compile(
    r"(?P<module>.+?)\.(?P<part>(?P<level>(base_layer\.)*)"
    r"(?P<factor>lora_A\.weight|lora_B\.(weight|bias)|lora_embedding_[AB]|lora_magnitude_vector)((?<=_vector)\.weight)?"
    r"|token_adapter\.trainable_tokens_delta|(token_adapter\.)?base_layer\.(?P<base>weight|bias))"
)
"""A LoRA's own tensors, by their name in the model: a `factor`, the `base`'s weight or bias saved along, or trained
rows of an embedding. `level` counts the adapters on one module, of which `target_parameters` makes several."""
_WRAPPED_PREFIX = re.compile(r"((_orig_mod|_fsdp_wrapped_module|module)\.)*base_model\.model\.")
_WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module)\.")
"""Names that torch.compile and FSDP put between a model's own: no module of a model is called so."""
_SAVED_MODULE = re.compile(r"\.(modules_to_save(\.default)?)(?=\.)")
_UNUSED_COPY = re.compile(r"(?!.*lora_).+\.original_module\.(.+\.)?(weight|(?P<bias>bias))")
"""What modules_to_save held before training, which PEFT never reads: it writes the weights with the embeddings of a
resized vocabulary, and the biases with bias 'all'."""


def model_name(stored: str) -> str | None:
    """The name without PEFT's prefix and without what training wrappers put before and between; None where the prefix
    is not there.
    """
    prefix = _WRAPPED_PREFIX.match(stored)
    return _WRAPPERS.sub("", stored[prefix.end() :]) if prefix else None


def plain_name(name: str, *, trained_biases: bool) -> str | None:
    """The tensor that PEFT saved as `name` (without its prefix), without the name of PEFT's wrapper for saved modules.

    None for a copy that PEFT never reads; there are such of biases only where every bias was trained (`bias` 'all').
    """
    copy = _UNUSED_COPY.fullmatch(name)
    if copy and (trained_biases or not copy["bias"]):
        return None
    return _SAVED_MODULE.sub("", name)
