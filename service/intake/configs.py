"""What a model's config.json may say: nothing that would run code, nothing that would be passed over silently."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from modelpress.errors import InvalidModel

MAX_LABELS = 10_000
MAX_LABEL_CHARACTERS = 255

ACTIVATIONS = frozenset(
    {"gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu", "swish", "tanh"}
)

CODE_FIELDS = ("auto_map", "custom_pipelines", "trust_remote_code")
KERNEL_FIELDS = ("attn_implementation", "_attn_implementation", "experts_implementation")
"""transformers loads a kernel from a hub where one of these names its repository."""


def is_share(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1


def is_above_zero(value: Any) -> bool:
    return type(value) is float and value > 0


COMMON_VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "initializer_range": (lambda value: type(value) is float and value >= 0, "a decimal number, e.g. 0.02"),
    **dict.fromkeys(
        ("dtype", "torch_dtype"),
        (lambda value: value in (None, "float32", "float16", "bfloat16", "float64"), "the dtype of the weights"),
    ),
}
"""What holds for classifiers and decoders alike."""

VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), (is_share, "a number from 0 to 1")),
    "classifier_dropout": (lambda value: value is None or is_share(value), "null or a number from 0 to 1"),
    "layer_norm_eps": (is_above_zero, "a decimal number above 0, e.g. 1e-12"),
    "return_dict": (lambda value: value in (None, True), "true, or left out"),
    "chunk_size_feed_forward": (lambda value: value == 0, "0, or left out"),
}
"""field -> (whether transformers makes a model of the value that can be compressed, what it must be)."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def refuse_code_references(settings: Mapping[str, Any], file: str) -> None:
    """Refuse what names code of the folder or of a hub: `auto_map`, `trust_remote_code`, attention kernels by name.

    Also in the parts of a model of several (`text_config`, `vision_config`).
    """
    parts = [settings]
    while parts:
        part = parts.pop()
        parts += [value for value in part.values() if isinstance(value, dict)]
        named = [field for field in KERNEL_FIELDS if part.get(field) not in (None, "eager", "sdpa")]
        field = next((name for name in (*CODE_FIELDS, *named) if part.get(name)), None)
        if field:
            raise InvalidModel(
                f"{file}: {field} asks for code that comes with the model, which is never run: "
                "save the model with one of transformers' own classes",
                reason="CODE_REFERENCE",
                field=field,
            )


def quantization_of(config: Mapping[str, Any]) -> dict[str, str | None]:
    """`quantization`: the method that the weights were quantized with already, None for none. `quantization_type`:
    the number format of weights that bitsandbytes is said to have made, `nf4`, `fp4` or `int8`.
    """
    found = config.get("quantization_config") or config.get("compression_config")
    if not found:
        return {"quantization": None, "quantization_type": None}
    settings: Mapping[str, Any] = found if isinstance(found, dict) else {}
    bits = [name for name in ("load_in_4bit", "load_in_8bit") if settings.get(name)]
    method = settings.get("quant_method") or ("bitsandbytes" if bits else "an unnamed method")
    four_bit = "load_in_4bit" in bits
    kind = settings.get("bnb_4bit_quant_type", "fp4") if four_bit else "int8" if bits else None
    is_told = kind is not None and settings.get("quant_method") == "bitsandbytes"
    return {"quantization": str(method)[:40], "quantization_type": str(kind)[:40] if is_told else None}


def refuse_quantized(config: Mapping[str, Any]) -> None:
    if config.get("quantization_config"):
        fail("quantization_config", "is set: the base must not be quantized yet, upload the model it was made from")


def refuse_unsupported_settings(config: Mapping[str, Any]) -> None:
    """Refuse settings that the loaded model would not have, or that the task does not allow."""
    refuse_quantized(config)
    if config.get("pruned_heads"):
        fail("pruned_heads", "is not empty: fold the pruned heads into the weights first")
    position = config.get("position_embedding_type", "absolute")
    if position != "absolute":
        fail("position_embedding_type", f"is {position!r}: only 'absolute' is supported")
    activation = config.get("hidden_act", "gelu")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        fail("hidden_act", f"is {str(activation)[:40]!r}; known: {', '.join(sorted(ACTIVATIONS))}")
    problem = config.get("problem_type")
    if problem not in (None, "single_label_classification"):
        fail("problem_type", f"is {str(problem)[:40]!r}: only 'single_label_classification' is supported")
    if config.get("is_decoder") or config.get("add_cross_attention"):
        fail("is_decoder", "or add_cross_attention is set: only encoders are supported")


def refuse_impossible_values(config: Mapping[str, Any]) -> None:
    """Refuse values of which no model can be made, and a padding token that the embedding table does not have."""
    check_values(config, VALUES)
    pad, vocabulary = config.get("pad_token_id"), config.get("vocab_size")
    if pad is not None and not (type(pad) is int and type(vocabulary) is int and 0 <= pad < vocabulary):
        fail("pad_token_id", f"is {str(pad)[:40]!r}: it must be null or an id below vocab_size, {str(vocabulary)[:40]}")


def check_values(config: Mapping[str, Any], values: Mapping[str, tuple[Callable[[Any], bool], str]]) -> None:
    """Every field of `values` or COMMON_VALUES that is there is as they say."""
    for field, (is_possible, wanted) in {**COMMON_VALUES, **values}.items():
        if field in config and not is_possible(config[field]):
            fail(field, f"is {str(config[field])[:40]!r}: it must be {wanted}")


def labels_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Label names in the order of their ids, from `id2label`; `label2id` and `num_labels` must agree where given."""
    table = config.get("id2label")
    if not isinstance(table, dict) or len(table) < 2:
        _labels_fail("id2label", 'is needed: name every class, e.g. {"0": "benign", "1": "injection"}')
    if len(table) > MAX_LABELS:
        _labels_fail("id2label", f"has {len(table)} labels: at most {MAX_LABELS} are allowed")
    wanted = [str(i) for i in range(len(table))]
    if set(table) != set(wanted):
        _labels_fail("id2label", f'must have exactly the keys "0" to "{len(table) - 1}"')
    labels = tuple(table[i] for i in wanted)
    _check_names(labels)
    back = config.get("label2id")
    if "label2id" in config and back != {label: i for i, label in enumerate(labels)}:
        _labels_fail("label2id", "is not the inverse of id2label: correct it, or leave it out")
    if config.get("num_labels") not in (None, len(labels)):
        _labels_fail("num_labels", f"is {str(config['num_labels'])[:40]}, id2label has {len(labels)} labels")
    return labels


def _check_names(labels: Sequence[Any]) -> None:
    for label in labels:
        if not isinstance(label, str) or not 1 <= len(label) <= MAX_LABEL_CHARACTERS or _CONTROL.search(label):
            _labels_fail("id2label", f"has the name {str(label)[:80]!r}: use 1 to {MAX_LABEL_CHARACTERS} characters")
    if len(set(labels)) != len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        _labels_fail("id2label", f"names two classes {twice[:80]!r}")


def fail(field: str, what: str) -> NoReturn:
    """Refuse a config for one of its fields."""
    raise InvalidModel(f"config.json: {field} {what}", reason="BAD_CONFIG", field=field)


def _labels_fail(field: str, what: str) -> NoReturn:
    raise InvalidModel(f"config.json: {field} {what}", reason="BAD_LABELS", field=field)
