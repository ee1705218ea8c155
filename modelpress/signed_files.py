"""The files of a signed folder: what is there, what `model.sig` signs, and that both are the same.

    files = read_signed_files(folder, key)
    files.read("report.json")              # the signed bytes, or VerificationFailed

`model.sig` is an OpenSSF Model Signing v1.0 bundle, as the `model_signing` package writes and verifies it. It is read
here by the same strict code as every other statement and not by that package, whose verifier takes the list of ignored
files from the signature itself, accepts the formats of older releases, and prints.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from modelpress.attestations import MODEL_SIGNATURE_TYPE, Statement, exact_fields, open_bundle, read_compact_json
from modelpress.digests import Digest, digest_bytes, digest_file
from modelpress.errors import InvalidRequest, VerificationFailed
from modelpress.output import APPROVAL, DOCUMENTS, MODEL, MODEL_SIGNATURE, SIGNED_STATEMENTS

MAX_DOCUMENT_BYTES = 64 << 20
MAX_ENTRIES = 20_000
MADE_BY = {"method": "files", "hash_type": "sha256", "allow_symlinks": False}
"""The only way of signing that is accepted, beside the ignored paths."""


@dataclass(frozen=True)
class SignedFiles:
    """A folder whose every file was compared with the signed digests; paths are relative, POSIX."""

    folder: Path
    name: str
    """What the signature calls the folder."""
    digests: Mapping[str, Digest]

    def read(self, path: str) -> bytes:
        """The signed bytes of a file of at most 64 MiB, even where the folder changed after it was compared."""
        data = read_bytes(self.folder, path)
        if digest_bytes(data) != self.digests[path]:
            raise _changed(path)
        return data


def read_signed_files(folder: Path, key: ec.EllipticCurvePublicKey) -> SignedFiles:
    """Check that `model.sig`, signed by `key`, signs exactly the files of the folder. VerificationFailed names one."""
    if not folder.is_dir():
        raise VerificationFailed(f"{str(folder)!r} is not a folder")
    present, folders = _contents(folder)
    statement = open_bundle(
        read_compact_json(read_bytes(folder, MODEL_SIGNATURE), MODEL_SIGNATURE), key, MODEL_SIGNATURE
    )
    digests = _signed_digests(statement)
    _check_covers(digests)
    _check_present(present, digests)
    _check_folders(folders, present)
    for path, digest in digests.items():
        if _file_digest(folder, path) != digest:
            raise _changed(path)
    return SignedFiles(folder, next(iter(statement.subjects)), digests)


def read_bytes(folder: Path, path: str) -> bytes:
    """A whole file of at most 64 MiB, unverified. VerificationFailed where there is none."""
    file = folder / path
    try:
        if file.stat().st_size > MAX_DOCUMENT_BYTES:
            raise VerificationFailed(f"{path} has more than {MAX_DOCUMENT_BYTES} bytes")
        return file.read_bytes()
    except FileNotFoundError:
        raise VerificationFailed(f"{path!r} is missing") from None
    except OSError as fault:
        raise VerificationFailed(f"{path!r} cannot be read: {fault.strerror}") from None


def _contents(folder: Path) -> tuple[set[str], set[str]]:
    """Paths of all regular files and of all folders. Links and special files are refused."""
    files: set[str] = set()
    folders: set[str] = set()
    for path, mode in _walk(folder):
        if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
            raise VerificationFailed(f"{str(path)!r} is a link or a special file: only regular files can be verified")
        (folders if stat.S_ISDIR(mode) else files).add(str(path))
        if len(files) + len(folders) > MAX_ENTRIES:
            raise VerificationFailed(f"the folder holds more than {MAX_ENTRIES} files and folders")
    return files, folders


def _walk(folder: Path) -> Iterator[tuple[PurePosixPath, int]]:
    """Path and mode of everything below `folder`; links are not followed."""
    waiting = [PurePosixPath()]
    while waiting:
        path = waiting.pop()
        try:
            with os.scandir(folder / path) as entries:
                found = [(path / entry.name, entry.stat(follow_symlinks=False).st_mode) for entry in entries]
        except OSError as fault:
            raise VerificationFailed(f"folder {str(path)[:200]!r} cannot be read: {fault.strerror}") from None
        waiting += [child for child, mode in found if stat.S_ISDIR(mode)]
        yield from found


def _signed_digests(statement: Statement) -> Mapping[str, Digest]:
    """Path -> digest as signed, after checking that the signature was made as this verifier expects."""
    if statement.predicate_type != MODEL_SIGNATURE_TYPE:
        raise VerificationFailed(f"{MODEL_SIGNATURE} holds a statement of type {statement.predicate_type[:80]!r}")
    predicate = exact_fields(dict(statement.predicate), ("serialization", "resources"), MODEL_SIGNATURE)
    serialization = exact_fields(predicate["serialization"], (*MADE_BY, "ignore_paths"), MODEL_SIGNATURE)
    ignored = serialization["ignore_paths"]
    if not isinstance(ignored, list) or sorted(map(str, ignored)) != sorted(SIGNED_STATEMENTS):
        raise VerificationFailed(f"{MODEL_SIGNATURE} leaves out other files than {', '.join(SIGNED_STATEMENTS)}")
    if any(serialization[name] != value for name, value in MADE_BY.items()):
        raise VerificationFailed(f"{MODEL_SIGNATURE} was not made with {MADE_BY}")
    if not isinstance(predicate["resources"], list):
        raise VerificationFailed(f"{MODEL_SIGNATURE} has no list of files")
    resources = [_resource(resource) for resource in predicate["resources"]]
    root = hashlib.sha256(b"".join(bytes.fromhex(digest.hex) for _, digest in resources)).hexdigest()
    if [digest.hex for digest in statement.subjects.values()] != [root] or len(dict(resources)) != len(resources):
        raise VerificationFailed(f"{MODEL_SIGNATURE} contradicts itself: its subject does not name its files")
    return dict(resources)


def _resource(value: Any) -> tuple[str, Digest]:
    fields = exact_fields(value, ("name", "algorithm", "digest"), MODEL_SIGNATURE)
    if fields["algorithm"] != "sha256":
        raise VerificationFailed(f"{MODEL_SIGNATURE} uses {str(fields['algorithm'])[:40]!r}, expected sha256")
    try:
        return str(fields["name"]), Digest(f"sha256:{fields['digest']}")
    except InvalidRequest as fault:
        raise VerificationFailed(f"{MODEL_SIGNATURE}, file {str(fields['name'])[:80]!r}: {fault.message}") from None


def _check_covers(digests: Mapping[str, Digest]) -> None:
    if absent := [path for path in DOCUMENTS if path not in digests]:
        raise VerificationFailed(f"{MODEL_SIGNATURE} does not sign {absent[0]}")
    if not any(path.startswith(f"{MODEL}/") for path in digests):
        raise VerificationFailed(f"{MODEL_SIGNATURE} signs no file of {MODEL}/")


def _check_present(present: set[str], digests: Mapping[str, Digest]) -> None:
    if missing := sorted(set(digests) - present):
        raise VerificationFailed(f"{missing[0]!r} is missing: {MODEL_SIGNATURE} signs it")
    if added := sorted(present - set(digests) - {MODEL_SIGNATURE, APPROVAL}):
        raise VerificationFailed(f"{added[0]!r} was added: {MODEL_SIGNATURE} does not sign it")


def _check_folders(folders: set[str], files: set[str]) -> None:
    parents = {str(parent) for file in files for parent in PurePosixPath(file).parents}
    if empty := sorted(folders - parents):
        raise VerificationFailed(f"{empty[0]!r} is a folder without files, which no signature covers: remove it")


def _file_digest(folder: Path, path: str) -> Digest:
    try:
        return digest_file(folder / path)
    except OSError as fault:
        raise VerificationFailed(f"{path!r} cannot be read: {fault.strerror}") from None


def _changed(path: str) -> VerificationFailed:
    return VerificationFailed(f"{path!r} was changed: its digest is not the signed one")
