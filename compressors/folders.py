"""Model folders: safetensors, config, tokenizer and companions, read and written without running anything in them.

A model folder is what transformers writes. Its companion files are everything that is neither weights nor
config.json: every stage copies them byte for byte.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from compressors.families import model_class_of
from modelpress.errors import InvalidModel

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
LOADING_ERRORS = (
    *(RuntimeError, ValueError, KeyError, TypeError, AttributeError, AssertionError, OSError),
    *(SafetensorError, StrictDataclassError),
)
"""What transformers and torch raise for a config or weights that they cannot make a model of."""
FOREIGN_WEIGHTS = (
    *(".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack", ".gguf", ".tflite"),
    *(".onnx", ".onnx.data", ".onnx_data"),
)


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json; InvalidModel where it is missing, no JSON object, or of a quantized model."""
    file = folder / CONFIG
    if not file.is_file():
        raise InvalidModel(f"the model has no {CONFIG}: save it with save_pretrained", field=CONFIG)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise InvalidModel(f"{CONFIG} is not valid JSON", field=CONFIG) from None
    if not isinstance(config, dict):
        raise InvalidModel(f"{CONFIG} holds {type(config).__name__}: expected a JSON object", field=CONFIG)
    if config.get("quantization_config"):
        raise InvalidModel(
            f"{CONFIG} has a quantization_config: the model is quantized already; submit the full-precision one",
            field="quantization_config",
        )
    return config


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files that hold the model, in the order of their names."""
    if (folder / WEIGHTS).is_file():
        return (folder / WEIGHTS,)
    if not (folder / WEIGHTS_INDEX).is_file():
        foreign = ", ".join(foreign_weight_files(folder))
        cure = "save it with save_pretrained, which writes safetensors"
        raise InvalidModel(f"the model has no {WEIGHTS}{f', only {foreign}' if foreign else ''}: {cure}", field=WEIGHTS)
    try:
        names = sorted(set(json.loads((folder / WEIGHTS_INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InvalidModel(f"{WEIGHTS_INDEX} is not a safetensors index", field=WEIGHTS_INDEX) from None
    missing = [name for name in names if PurePosixPath(name).name != name or not (folder / name).is_file()]
    if missing:
        raise InvalidModel(f"{WEIGHTS_INDEX} names {missing[0]!r}, which the model does not have", field=WEIGHTS_INDEX)
    return tuple(folder / name for name in names)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the model under its stored name and dtype, on the CPU."""
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        for name, tensor in read_tensor_file(file).items():
            if name in tensors:
                raise InvalidModel(f"tensor {name!r} stands in two files of the model", field=file.name)
            tensors[name] = tensor
    return tensors


def read_tensor_file(file: Path) -> dict[str, Tensor]:
    """Every tensor of one safetensors file; InvalidModel where it is not one."""
    try:
        with safe_open(file, framework="pt", device="cpu") as source:
            return {name: source.get_tensor(name) for name in source.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        raise InvalidModel(f"{file.name} is not a valid safetensors file: {error}", field=file.name) from None


def check_finite(tensors: Mapping[str, Tensor], *, of: str) -> None:
    """Raise InvalidModel naming the first tensor with a NaN or an infinity."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise InvalidModel(f"tensor {name!r} of {of} holds NaN or infinite values", reason="NON_FINITE", field=name)


def load_model(folder: Path, *, device: str = "cpu") -> Any:
    """The model in FP32, eval mode and eager attention; every tensor of the architecture comes from the folder.

    Raises InvalidModel for an unknown architecture, a missing, surplus or misshapen tensor, and for NaN.
    """
    model_class = model_class_of(read_config(folder))
    weight_files(folder)
    try:
        model, loading = model_class.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=torch.float32,
            attn_implementation="eager",
            ignore_mismatched_sizes=True,  # reported below with both shapes, where transformers' error names none
            output_loading_info=True,
        )
    except LOADING_ERRORS as error:
        raise InvalidModel(f"the weights do not load into {model_class.__name__}: {_sentence(error, folder)}") from None
    for fault in ("missing", "unexpected", "mismatched"):
        names = sorted(_tensor_and_shapes(key) for key in loading[f"{fault}_keys"])
        if names:
            raise InvalidModel(f"{len(names)} {fault} tensors for {model_class.__name__}: {', '.join(names[:3])}")
    check_finite(model.state_dict(), of="the model")
    return model.eval().to(device)


def _sentence(error: Exception, folder: Path) -> str:
    """A library's message on one line, without the folder's path."""
    return " ".join(str(error).replace(str(folder), "the model").split())[:300]


def _tensor_and_shapes(key: Any) -> str:
    """transformers reports a name, or a name with the shape found and the shape expected."""
    if isinstance(key, str):
        return key
    name, found, expected = key
    return f"{name} {list(found)} instead of {list(expected)}"


def load_tokenizer(folder: Path) -> Any:
    """The folder's fast tokenizer; InvalidModel where there is none."""
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt", "tokenizer.model", "vocab.json")):
        raise InvalidModel(
            "the model has no tokenizer: add tokenizer.json (tokenizer.save_pretrained)", field="tokenizer.json"
        )
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, use_fast=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidModel(f"the tokenizer does not load: {_sentence(error, folder)}", field="tokenizer.json") from None


def save_model(model: Any, *, source: Path, output: Path) -> None:
    """Write `model` as one safetensors file, each tensor in the dtype that it has in `source`.

    config.json is that of `source` with the fields that differ between the model's config and it; companion files
    are copied byte for byte.
    """
    stored = stored_dtypes(source)
    tensors = {
        name: tensor.detach().to("cpu", stored.get(name, torch.float32)).contiguous()
        for name, tensor in untied_state(model).items()
    }
    write_folder(tensors, config=changed_config(model, source), source=source, output=output)


def write_folder(tensors: Mapping[str, Tensor], *, config: Mapping[str, Any], source: Path, output: Path) -> None:
    """A complete model folder in `output`: these tensors, this config, the companions of `source`."""
    output.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), output / WEIGHTS, metadata={"format": "pt"})
    if config == read_config(source):
        shutil.copyfile(source / CONFIG, output / CONFIG)
    else:
        (output / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for name in companion_files(source):
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, output / name)


def stored_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """dtype of every stored tensor."""
    return {name: tensor.dtype for name, tensor in read_tensors(folder).items()}


def untied_state(model: Any) -> dict[str, Tensor]:
    """The state dict without second names of one storage: safetensors stores a tied tensor once."""
    state, seen = {}, set()
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride()) if tensor.numel() else name
        if key not in seen:
            state[name] = tensor
        seen.add(key)
    return state


def changed_config(model: Any, source: Path) -> dict[str, Any]:
    """config.json of `source`, with the fields in which the model's config now differs."""
    config = read_config(source)
    loaded = type(model.config).from_dict(dict(config)).to_dict()
    ignored = {"transformers_version", "_name_or_path", "dtype", "architectures"}
    return config | {k: v for k, v in model.config.to_dict().items() if k not in ignored and loaded.get(k) != v}


def companion_files(folder: Path) -> tuple[str, ...]:
    """Relative paths of everything but weights and config.json, sorted."""
    left_out = {
        CONFIG,
        WEIGHTS,
        WEIGHTS_INDEX,
        *(file.name for file in weight_files(folder)),
        *foreign_weight_files(folder),
    }
    return tuple(sorted(name for name in _files(folder) if name not in left_out))


def foreign_weight_files(folder: Path) -> tuple[str, ...]:
    """Weights in other formats: stale once the model has changed, so never carried on."""
    return tuple(sorted(name for name in _files(folder) if name.endswith(FOREIGN_WEIGHTS)))


def left_out_warnings(folder: Path) -> tuple[str, ...]:
    """One sentence for each file of a source that its compressed model does not get."""
    return tuple(
        f"{name} was left out: it holds the weights as they were before" for name in foreign_weight_files(folder)
    )


def _files(folder: Path) -> list[str]:
    return [
        file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file() and not file.is_symlink()
    ]
