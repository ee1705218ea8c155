"""What a folder is, read offline: a model, an adapter, a dataset, or the output of a conversion.

Nothing is loaded or run: JSON files, safetensors headers and lines of text are read. What an output folder says about
itself is repeated as a claim; only `modelpress.verification` checks it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelpress.errors import InvalidModel, InvalidRequest
from modelpress.manifests import Manifest, scan_folder
from modelpress.output import APPROVAL, REPORT
from modelpress.safetensors_header import Header, read_header
from modelpress.strict_json import JsonError, read_object

MAX_JSON_BYTES = 64 << 20
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True)
class Inspection:
    """`kind` is `model`, `adapter`, `dataset` or `output`; `name` is what the folder is called once uploaded."""

    kind: str
    name: str
    size_bytes: int
    file_count: int
    facts: Mapping[str, Any]
    warnings: tuple[str, ...]


def inspect_folder(folder: Path) -> Inspection:
    """Raises InvalidRequest where the folder is nothing that modelpress knows."""
    manifest = scan_folder(folder)
    kind = folder_kind(folder)
    return Inspection(
        kind=kind,
        name=f"artifacts/{manifest.digest}",
        size_bytes=manifest.size_bytes,
        file_count=len(manifest.files),
        facts=_FACTS[kind](folder, manifest),
        warnings=_warnings(kind, manifest),
    )


def folder_kind(folder: Path) -> str:
    """Told by the files that only one kind has; quick, and enough to catch a folder given in the wrong place."""
    if not folder.is_dir():
        raise InvalidRequest(f"{str(folder)!r} is not a folder")
    if (folder / APPROVAL).is_file() or (folder / REPORT).is_file():
        return "output"
    if (folder / "adapter_config.json").is_file():
        return "adapter"
    if (folder / "config.json").is_file():
        return "model"
    if next(folder.rglob("*.jsonl"), None):
        return "dataset"
    raise InvalidRequest(
        f"{str(folder)!r} is nothing known: models have config.json, adapters adapter_config.json, "
        "datasets *.jsonl files, outputs report.json"
    )


def _model_facts(folder: Path, manifest: Manifest) -> dict[str, Any]:
    config = _read_json(folder / "config.json")
    labels = config.get("id2label")
    return {
        "model_type": config.get("model_type"),
        "architectures": config.get("architectures"),
        "labels": list(labels.values()) if isinstance(labels, dict) else None,
        "quantized_by": _quantization(config),
        **_tensor_facts(folder, manifest),
    }


def _quantization(config: Mapping[str, Any]) -> str | None:
    """The method that the weights were quantized with, None for none."""
    settings = config.get("quantization_config")
    if not settings:
        return None
    return str(settings.get("quant_method", "unknown")) if isinstance(settings, dict) else "unknown"


def _adapter_facts(folder: Path, manifest: Manifest) -> dict[str, Any]:
    config = _read_json(folder / "adapter_config.json")
    names = ("peft_type", "r", "lora_alpha", "target_modules", "modules_to_save", "base_model_name_or_path")
    return {**{name: config.get(name) for name in names}, **_tensor_facts(folder, manifest)}


def _dataset_facts(folder: Path, manifest: Manifest) -> dict[str, Any]:
    files = [folder / entry.path for entry in manifest.files if entry.path.endswith(".jsonl")]
    return {
        "files": [file.relative_to(folder).as_posix() for file in files],
        "rows": sum(_count_rows(file) for file in files),
        "columns_of_first_row": _first_columns(files[0]),
    }


def _output_facts(folder: Path, manifest: Manifest) -> dict[str, Any]:
    report = _read_json(folder / REPORT)
    decision = report.get("decision")
    return {
        "verdict_claimed": decision.get("verdict") if isinstance(decision, dict) else None,
        "conversion": report.get("conversion"),
        "created": report.get("created"),
        "requested_by": report.get("requested_by"),
        "model_digest": report.get("model_digest"),
        "signed": manifest.entry(APPROVAL) is not None,
    }


_FACTS: Mapping[str, Callable[[Path, Manifest], dict[str, Any]]] = {
    "model": _model_facts,
    "adapter": _adapter_facts,
    "dataset": _dataset_facts,
    "output": _output_facts,
}


def _warnings(kind: str, manifest: Manifest) -> tuple[str, ...]:
    paths = [entry.path for entry in manifest.files]
    warnings = [
        f"{path} looks like a pickle, which is never loaded" for path in paths if path.endswith(PICKLE_SUFFIXES)
    ]
    if kind == "output":
        warnings.append("nothing here was verified: run `modelpress verify`")
    if kind == "model" and not any(path.endswith((".safetensors", ".onnx")) for path in paths):
        warnings.append("there are no weights as .safetensors or .onnx")
    return tuple(warnings)


def _tensor_facts(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Parameters by dtype, from the headers alone."""
    elements: Counter[str] = Counter()
    for entry in manifest.files:
        if entry.path.endswith(".safetensors"):
            for tensor in _header(folder / entry.path, entry.path).tensors:
                elements[tensor.dtype] += tensor.elements
    return {"parameters": elements.total(), "dtypes": dict(sorted(elements.items()))}


def _header(file: Path, name: str) -> Header:
    with file.open("rb") as source:

        def read(offset: int, length: int) -> bytes:
            source.seek(offset)
            return source.read(length)

        return read_header(read, size_bytes=file.stat().st_size, name=name)


def _count_rows(file: Path) -> int:
    with file.open("rb") as source:
        return sum(1 for line in source if line.strip())


def _first_columns(file: Path) -> list[str] | None:
    """None where the file has no row, or its first one is no JSON object."""
    with file.open("rb") as source:
        first = next((line for line in source if line.strip()), b"")
    try:
        return list(read_object(first.removeprefix(b"\xef\xbb\xbf")))
    except JsonError:
        return None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > MAX_JSON_BYTES:
            raise InvalidModel(f"{file.name} has more than {MAX_JSON_BYTES} bytes")
        return read_object(file.read_bytes())
    except JsonError as fault:
        raise InvalidModel(f"{file.name} {fault}") from None
    except OSError as error:
        raise InvalidModel(f"cannot read {file.name}: {error.strerror}") from None
