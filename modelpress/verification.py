"""Offline verification of an output folder: is this what the service signed, and what did it say?

    verification = verify_folder(folder, public_key_pem=pem)
    verification.verdict is Verdict.APPROVED

Needs no server, no network and no torch, and trusts nothing in the folder. What must hold:

    1  the folder holds regular files only, and `model.sig` signs every one of them, byte for byte, except exactly the
       signed statements; git files and hidden files are files like any other
    2  `approval.dsse.json` is an approval, and both statements are signed by the given key
    3  the approval's subjects are the model and the documents that are there
    4  `report.json` is about the same conversion, model, recipe and policy, says what the approval says, and
       its figures do not contradict each other, nor the records of the stages that merged or quantized
    5  `policy.yaml`, applied again to the report's own measurements, gives that verdict and those gates
    6  the key is not a development key, unless the caller allows one

Which policy that was is for the caller to judge: an approval by a policy without teeth is an approval.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cryptography.hazmat.primitives.asymmetric import ec

from modelpress.attestations import (
    APPROVAL_TYPE,
    Approval,
    Statement,
    key_id,
    load_public_key,
    open_envelope,
    read_compact_json,
    read_json,
)
from modelpress.digests import Digest
from modelpress.documents import Document, read_value
from modelpress.errors import InvalidRequest, ModelpressError, VerificationFailed
from modelpress.gates import decide
from modelpress.manifests import FileEntry, Manifest
from modelpress.merge_changes import check_changes
from modelpress.output import APPROVAL, DOCUMENTS, MODEL, MODEL_SIGNATURE, POLICY, RECIPE, REPORT
from modelpress.policies import read_policy
from modelpress.quantized_layers import check_layers
from modelpress.reports import SCHEMA_VERSION, GateResult, Report, Verdict
from modelpress.signed_files import SignedFiles, read_bytes, read_signed_files

_RELATIVE_TOLERANCE = 1e-6
"""Of recomputed figures: mathematical libraries differ in the last digits between platforms."""

DocumentT = TypeVar("DocumentT", bound=Document)


@dataclass(frozen=True)
class Verification:
    """What a folder's signed statements say. Only `verdict is APPROVED` is a success: the caller looks at it."""

    conversion: str
    verdict: Verdict
    model_digest: str
    key_id: str
    development_key: bool
    signed: str
    """When the approval was signed: RFC 3339, UTC."""
    report: Report
    checked: tuple[str, ...]
    """The claims that hold, one sentence each."""


def verify_folder(folder: Path, *, public_key_pem: str, allow_development_key: bool = False) -> Verification:
    """Check every claim of the folder with the given key. VerificationFailed names the file or claim that is wrong."""
    key = load_public_key(public_key_pem)
    files = read_signed_files(folder, key)
    statement = _approval_statement(folder, key)
    model = _model_digest(files)
    _check_subjects(statement, files, model)
    approval = _document(Approval, statement.predicate, APPROVAL)
    _check_key(approval, key, allow_development_key)
    report = _report(files.read(REPORT))
    _check_same(report, approval, files, model)
    check_changes(report)
    check_layers(report)
    _check_decision(report, files.read(POLICY))
    return Verification(
        conversion=report.conversion,
        verdict=approval.verdict,
        model_digest=str(model),
        key_id=approval.key.id,
        development_key=approval.key.kind == "development",
        signed=approval.created,
        report=report,
        checked=tuple(_claims(len(files.digests), approval)),
    )


def _claims(files: int, approval: Approval) -> Iterator[str]:
    yield f"{MODEL_SIGNATURE} signs exactly the {files} files that are there"
    yield f"{APPROVAL} binds the model and {len(DOCUMENTS)} documents of {approval.conversion}"
    yield f"{POLICY} applied to the report's measurements gives {approval.verdict.value} again"
    yield f"both statements are signed by the {approval.key.kind} key {approval.key.id[:16]}"


def _approval_statement(folder: Path, key: ec.EllipticCurvePublicKey) -> Statement:
    statement = open_envelope(read_compact_json(read_bytes(folder, APPROVAL), APPROVAL), key, APPROVAL)
    if statement.predicate_type != APPROVAL_TYPE:
        raise VerificationFailed(f"{APPROVAL} holds a statement of type {statement.predicate_type[:80]!r}")
    return statement


def _model_digest(files: SignedFiles) -> Digest:
    """Digest of the manifest of `model/`, from the verified digests and the sizes on disk."""
    paths = [path for path in files.digests if path.startswith(f"{MODEL}/")]
    try:
        entries = [
            FileEntry(path[len(MODEL) + 1 :], (files.folder / path).stat().st_size, files.digests[path])
            for path in paths
        ]
        return Manifest(tuple(entries)).digest
    except (InvalidRequest, UnicodeEncodeError, OSError):
        raise VerificationFailed(f"{MODEL}/ holds file names that no artifact may have") from None


def _check_subjects(statement: Statement, files: SignedFiles, model: Digest) -> None:
    expected = {f"{MODEL}/": model, **{name: files.digests[name] for name in DOCUMENTS}}
    if set(statement.subjects) != set(expected):
        raise VerificationFailed(f"{APPROVAL} must name exactly {', '.join(expected)} as its subjects")
    for name, digest in expected.items():
        if statement.subjects[name] != digest:
            raise VerificationFailed(f"{APPROVAL} was given for another {name} than the one present")


def _check_key(approval: Approval, key: ec.EllipticCurvePublicKey, allow_development_key: bool) -> None:
    if approval.key.id != key_id(key):
        raise VerificationFailed(f"{APPROVAL} names another key than the one that signed it")
    if approval.key.kind == "development" and not allow_development_key:
        raise VerificationFailed(
            f"{APPROVAL} is signed with a development key, which a service made for itself: "
            "sign with a configured key, or allow development keys (`--allow-development-key`)",
            reason="DEVELOPMENT_KEY",
        )


def _report(data: bytes) -> Report:
    value = read_json(data, REPORT)
    if value.get("schema_version") != SCHEMA_VERSION:
        raise VerificationFailed(
            f"{REPORT} has schema version {str(value.get('schema_version'))[:20]}, this release reads "
            f"{SCHEMA_VERSION}: use the release that wrote it"
        )
    return _document(Report, value, REPORT)


def _check_same(report: Report, approval: Approval, files: SignedFiles, model: Digest) -> None:
    """Report, approval and files speak of one conversion, and say the same."""
    pairs = {
        "conversion": (report.conversion, approval.conversion),
        "model digest": (report.model_digest, str(model)),
        "recipe digest": (report.recipe_digest, str(files.digests[RECIPE])),
        "policy digest": (report.policy_digest, str(files.digests[POLICY])),
        "verdict": (report.decision.verdict.value, approval.verdict.value),
    }
    for what, (reported, expected) in pairs.items():
        if reported != expected:
            raise VerificationFailed(f"{REPORT} gives {what} {reported[:90]!r}, expected {expected!r}")
    if report.decision.gates != approval.gates:
        raise VerificationFailed(f"{APPROVAL} and {REPORT} give different gates")
    if files.name != report.conversion.rpartition("/")[2]:
        raise VerificationFailed(f"{MODEL_SIGNATURE} was made for another conversion than {report.conversion}")


def _check_decision(report: Report, policy_yaml: bytes) -> None:
    """The verdict follows from the policy and the report's measurements, by the same rules as in the service."""
    try:
        again = decide(read_policy(policy_yaml.decode()), report.measured)
    except (ModelpressError, UnicodeDecodeError) as fault:
        raise VerificationFailed(f"{POLICY} cannot be applied to {REPORT}: {fault}") from None
    if again.verdict is not report.decision.verdict:
        raise VerificationFailed(
            f"{REPORT} says {report.decision.verdict.value}, "
            f"but {POLICY} applied to its measurements gives {again.verdict.value}"
        )
    given = report.decision.gates
    if [gate.name for gate in given] != [gate.name for gate in again.gates]:
        raise VerificationFailed(f"{REPORT} does not give exactly the gates of {POLICY}")
    for gate, recomputed in zip(given, again.gates, strict=True):
        if not _same_gate(gate, recomputed):
            raise VerificationFailed(f"{REPORT} gives gate {gate.name} otherwise than {POLICY} and its measurements do")


def _same_gate(one: GateResult, other: GateResult) -> bool:
    if (one.outcome, one.comparison, one.unit) != (other.outcome, other.comparison, other.unit):
        return False
    pairs = [(one.figure, other.figure), (one.bound, other.bound)]
    if one.interval and other.interval:
        pairs += [(one.interval.low, other.interval.low), (one.interval.high, other.interval.high)]
    return (one.interval is None) == (other.interval is None) and all(_close(a, b) for a, b in pairs)


def _close(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=_RELATIVE_TOLERANCE, abs_tol=1e-9)


def _document(kind: type[DocumentT], value: Any, name: str) -> DocumentT:
    try:
        return read_value(kind, value, InvalidRequest)
    except InvalidRequest as fault:
        raise VerificationFailed(f"{name}: {fault.message}") from None
