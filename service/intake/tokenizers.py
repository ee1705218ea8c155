"""A model's tokenizer: readable, and never able to name a row that the embedding table does not have."""

from __future__ import annotations

from typing import Any

from modelpress.errors import InvalidModel
from modelpress.manifests import FileEntry
from service.intake.configs import refuse_code_references
from service.intake.folder import MAX_CONFIG_BYTES, Folder

MAX_TOKENIZER_BYTES = 64 << 20
VOCABULARY_FILES = (
    *("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.txt", "vocab.json", "merges.txt"),
    "added_tokens.json",
)
"""Files that say which token has which id."""


def inspect_tokenizer(folder: Folder, *, vocabulary: int | None) -> dict[str, Any] | None:
    """Largest token id and `model_max_length`; None where there is neither tokenizer.json nor vocab.txt.

    `vocabulary` is the number of rows of the embedding table; None where config.json does not say it.
    """
    tokenizer, words = folder.manifest.entry("tokenizer.json"), folder.manifest.entry("vocab.txt")
    if tokenizer:
        largest = max(_ids(folder.json_object(tokenizer, InvalidModel, limit=MAX_TOKENIZER_BYTES), tokenizer))
    elif words:
        largest = _count_lines(folder, words) - 1
    else:
        return None
    file = (tokenizer or words or folder.manifest.files[0]).path
    settings = _settings(folder)
    for source, ids in (("tokenizer_config.json", _added(settings)), ("added_tokens.json", _added_alone(folder))):
        if max(ids, default=0) > largest:
            largest, file = max(ids), source
    if vocabulary is not None and largest >= vocabulary:
        raise InvalidModel(
            f"{file} has token ids up to {largest}, and the embedding table has {vocabulary} rows: "
            "this tokenizer belongs to another model",
            reason="BAD_TOKENIZER",
            field=file,
        )
    return {"largest_id": largest, "model_max_length": _max_length(settings)}


def vocabulary_digests(folder: Folder) -> dict[str, str]:
    """Digests of the VOCABULARY_FILES that are there, by name: equal ones give every token the same id."""
    entries = (folder.manifest.entry(name) for name in VOCABULARY_FILES)
    return {entry.path: str(entry.digest) for entry in entries if entry}


def _ids(tokenizer: dict[str, Any], file: FileEntry) -> list[int]:
    """Every token id of a tokenizer.json: its model's vocabulary and the added tokens."""
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    added = tokenizer.get("added_tokens") or []
    if isinstance(vocabulary, list):
        ids: list[Any] = list(range(len(vocabulary)))
    else:
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    ids += (
        [token.get("id") if isinstance(token, dict) else None for token in added] if isinstance(added, list) else [None]
    )
    if not ids or not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise InvalidModel(
            f"{file.path} has no usable vocabulary: save it with `tokenizer.save_pretrained(folder)`",
            reason="BAD_TOKENIZER",
            field=file.path,
        )
    return ids


def _count_lines(folder: Folder, file: FileEntry) -> int:
    last, count = b"", 0
    for chunk in folder.chunks(file, 0, file.size_bytes):
        count += chunk.count(b"\n")
        last = chunk[-1:]
    return count + (last not in (b"", b"\n"))


def _settings(folder: Folder) -> dict[str, Any]:
    """tokenizer_config.json; empty where there is none."""
    file = folder.manifest.entry("tokenizer_config.json")
    if file is None:
        return {}
    settings = folder.json_object(file, InvalidModel, limit=MAX_CONFIG_BYTES)
    refuse_code_references(settings, file.path)
    return settings


def _added(settings: dict[str, Any]) -> list[int]:
    """Ids that `added_tokens_decoder` gives, which transformers adds to those of tokenizer.json."""
    added = settings.get("added_tokens_decoder")
    return [int(key) for key in added if key.isdecimal() and len(key) < 20] if isinstance(added, dict) else []


def _added_alone(folder: Folder) -> list[int]:
    """Ids of added_tokens.json, which older releases wrote."""
    file = folder.manifest.entry("added_tokens.json")
    found = folder.json_object(file, InvalidModel, limit=MAX_TOKENIZER_BYTES) if file else {}
    return [token_id for token_id in found.values() if type(token_id) is int]


def _max_length(settings: dict[str, Any]) -> int | None:
    """`model_max_length`; None where it states none (transformers then writes 1e30)."""
    length = settings.get("model_max_length")
    return length if type(length) is int and 0 < length < 1 << 31 else None
