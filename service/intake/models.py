"""Models: a config and weights that are sound, finite, and carry nothing that could run.

Of a supported family the weights are also what the config says, so that every stage can take the model. Any other
architecture is taken in too: merging is arithmetic on files, and `obstacle` says why other stages cannot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from compressors.model_layouts import layer_count
from modelpress.errors import InvalidModel
from service.intake.compressible import compressible_facts
from service.intake.configs import quantization_of, refuse_code_references
from service.intake.folder import MAX_CONFIG_BYTES, Folder, refuse_other_weights, refuse_payloads
from service.intake.quantized_codes import refuse_stripped_codes
from service.intake.tokenizers import inspect_tokenizer, vocabulary_digests
from service.intake.weights import Weight, read_weights, refuse_empty, refuse_non_finite

WRAPPERS: Mapping[str, str] = {
    "_orig_mod.": "torch.compile: save `model._orig_mod`",
    "_fsdp_wrapped_module.": "FSDP: save the gathered, full state_dict",
    "module.": "DistributedDataParallel: save `model.module`",
}
"""What a wrapper puts before tensors' names, and which model to save instead."""

RESERVED: Mapping[str, str] = {
    "adapter_config.json": "belongs to an adapter: upload that as an artifact of its own, of kind ADAPTER",
    "quantization.json": "is the name of a file that the stage `quantize` writes: rename it, or leave it out",
}
"""Files that would change how the model is loaded."""


def inspect_model(folder: Folder) -> dict[str, Any]:
    """Facts of a model. Cheap checks come first: the weights' bytes are read last."""
    refuse_payloads(folder, InvalidModel)
    refuse_other_weights(folder, InvalidModel)
    refuse_reserved_names(folder)
    config = _read_config(folder)
    check_generation(folder)
    weights = read_weights(folder, "model")
    refuse_wrapper_names(weights)
    refuse_empty(weights)
    quantization = quantization_of(config)
    refuse_stripped_codes(weights, method=quantization["quantization"])
    tokenizer = inspect_tokenizer(folder, vocabulary=_count(config, "vocab_size"))
    compressible = compressible_facts(config, weights, tokenizer)
    refuse_non_finite(folder, weights)
    return {
        **config_facts(config),
        **quantization,
        **weight_facts(weights),
        "tokenizer": tokenizer,
        "vocabulary_files": vocabulary_digests(folder),
        **compressible,
        "warnings": [],
    }


def refuse_reserved_names(folder: Folder) -> None:
    for name, sentence in RESERVED.items():
        if folder.manifest.entry(name):
            raise InvalidModel(f"{name} {sentence}", reason="BAD_CONFIG", field=name)


def check_generation(folder: Folder) -> None:
    """generation_config.json, where there is one, is an object whose end-of-text tokens are ids."""
    file = folder.manifest.entry("generation_config.json")
    if file is None:
        return
    ids = folder.json_object(file, InvalidModel, limit=MAX_CONFIG_BYTES).get("eos_token_id")
    given = ids if isinstance(ids, list) else [ids] if ids is not None else []
    wrong = next((each for each in given if type(each) is not int or each < 0), None)
    if wrong is not None:
        raise InvalidModel(
            f"{file.path}: eos_token_id holds {str(wrong)[:40]!r}: it must be a token id or a list of them",
            reason="BAD_CONFIG",
            field="eos_token_id",
        )


def config_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """What any config.json may say; None where it does not."""
    kind, classes, tied = (config.get(name) for name in ("model_type", "architectures", "tie_word_embeddings"))
    names = [name for name in classes if isinstance(name, str)] if isinstance(classes, list) else []
    return {
        "model_type": kind if isinstance(kind, str) else None,
        "architecture": names[0] if names else None,
        "tie_word_embeddings": tied if isinstance(tied, bool) else None,
        "layers": layer_count(config),
    }


def weight_facts(weights: Mapping[str, Weight]) -> dict[str, Any]:
    """Counts, bytes, every tensor's shape and dtype: the one of most tensors, and those of the others."""
    tensors = [weight.tensor for weight in weights.values()]
    dtypes = Counter(tensor.dtype for tensor in tensors)
    most = max(dtypes, key=lambda dtype: (dtypes[dtype], dtype))
    return {
        "parameters": sum(tensor.elements for tensor in tensors),
        "weight_bytes": sum(tensor.end - tensor.begin for tensor in tensors),
        "largest_tensor_bytes": max(tensor.end - tensor.begin for tensor in tensors),
        "dtypes": dict(sorted(dtypes.items())),
        "dtype": most,
        "other_dtypes": {tensor.name: tensor.dtype for tensor in tensors if tensor.dtype != most},
        "tensors": {tensor.name: list(tensor.shape) for tensor in tensors},
    }


def refuse_wrapper_names(weights: Mapping[str, Weight]) -> None:
    """Refuse tensors named by a training wrapper. `module.` is one in front of every name; models use it themselves.

    Where a tensor stands with and without it, two states of one model may be mixed: which one is meant is not told.
    """
    is_data_parallel = all(name.startswith("module.") for name in weights)
    for name, weight in weights.items():
        bare = name.removeprefix("module.")
        if bare != name and bare in weights:
            raise InvalidModel(
                f"{weight.file.path}: holds both {name!r} and {bare!r}, and either may be the model's: save one of the "
                "two, or rename the submodule `module`",
                reason="AMBIGUOUS_NAMES",
                field=bare,
            )
        for wrapper, cure in WRAPPERS.items():
            wraps = is_data_parallel if wrapper == "module." else f".{wrapper}" in f".{name}"
            if wraps:
                raise InvalidModel(
                    f"{weight.file.path}: tensor {name!r} carries the {wrapper!r} of {cure} instead",
                    reason="WRAPPED_WEIGHTS",
                    field=name,
                )


def _read_config(folder: Folder) -> dict[str, Any]:
    file = folder.manifest.entry("config.json")
    if file is None:
        raise InvalidModel(
            "the model has no config.json: upload the whole folder that `save_pretrained` wrote",
            reason="NO_CONFIG",
            field="config.json",
        )
    config = folder.json_object(file, InvalidModel, limit=MAX_CONFIG_BYTES)
    refuse_code_references(config, file.path)
    return config


def _count(config: Mapping[str, Any], field: str) -> int | None:
    value = config.get(field)
    return value if type(value) is int and value > 0 else None
