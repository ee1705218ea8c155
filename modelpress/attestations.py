"""Signed statements: in-toto Statement v1 in a DSSE envelope, and the strict reading of one.

    statement = approval_statement(report, subjects, key=key, created="2026-11-30T12:00:00+00:00")
    open_envelope(envelope, public_key, "approval.dsse.json") == Statement.from_json(statement)

Both statements of an output folder are read by the same code: `model.sig` holds its envelope inside a Sigstore
bundle. A reader accepts one form only. The file is JSON without duplicate keys or non-finite numbers, exactly as a
writer would have written it; the envelope has exactly one signature, by the given key. So no byte of a statement can
change unnoticed, and no parser can be made to see something else than the signer meant.

Specifications: in-toto Attestation Framework v1, DSSE v1.0, Sigstore bundle v0.3, OpenSSF Model Signing v1.0.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from securesystemslib.dsse import Envelope

from modelpress.digests import Digest
from modelpress.documents import Document
from modelpress.errors import InvalidRequest, VerificationFailed
from modelpress.reports import GateResult, Report, Verdict
from modelpress.strict_json import JsonError, read_object

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
APPROVAL_TYPE = "urn:modelpress:approval:v1"
MODEL_SIGNATURE_TYPE = "https://model_signing/signature/v1.0"


class SigningKey(Document):
    """Which key signed. `development`: made by an embedded service at its first start, trusted by nobody else."""

    kind: Literal["development", "configured"]
    id: str
    """SHA-256 of the public key's PEM (SubjectPublicKeyInfo), 64 hex digits."""


class Approval(Document):
    """The predicate of an approval statement. Its name is the record's, not the verdict's: it may say REJECTED."""

    conversion: str
    verdict: Verdict
    gates: tuple[GateResult, ...]
    key: SigningKey
    created: str
    """When it was signed: RFC 3339, UTC."""


@dataclass(frozen=True)
class Statement:
    """An in-toto statement whose every subject has a name and exactly one SHA-256 digest."""

    predicate_type: str
    subjects: Mapping[str, Digest]
    predicate: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """For every statement s: Statement.from_json(s.to_json()) == s."""
        subjects = [{"name": name, "digest": {"sha256": digest.hex}} for name, digest in self.subjects.items()]
        return {
            "_type": STATEMENT_TYPE,
            "subject": subjects,
            "predicateType": self.predicate_type,
            "predicate": dict(self.predicate),
        }

    @staticmethod
    def from_json(value: Any) -> Statement:
        """VerificationFailed where a field is missing, unknown or of another type."""
        fields = exact_fields(value, ("_type", "subject", "predicateType", "predicate"), "statement")
        if fields["_type"] != STATEMENT_TYPE:
            raise VerificationFailed(f"statement type {str(fields['_type'])[:80]!r} is not {STATEMENT_TYPE}")
        if not isinstance(fields["predicate"], dict) or not isinstance(fields["subject"], list):
            raise VerificationFailed("a statement needs a list `subject` and an object `predicate`")
        named = [_subject(subject) for subject in fields["subject"]]
        if len(dict(named)) != len(named):
            raise VerificationFailed("the statement names a subject twice")
        return Statement(str(fields["predicateType"]), dict(named), fields["predicate"])


def approval_statement(
    report: Report, subjects: Mapping[str, Digest], *, key: SigningKey, created: str
) -> dict[str, Any]:
    """The statement that binds the report's verdict and gates to the digests of what they were measured on."""
    approval = Approval(
        conversion=report.conversion,
        verdict=report.decision.verdict,
        gates=report.decision.gates,
        key=key,
        created=created,
    )
    return Statement(APPROVAL_TYPE, subjects, approval.model_dump(mode="json")).to_json()


def load_public_key(pem: str) -> ec.EllipticCurvePublicKey:
    """VerificationFailed unless `pem` is one EC P-256 public key."""
    try:
        key = serialization.load_pem_public_key(pem.encode())
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise VerificationFailed("the public key is not a PEM public key: give the service's own, as a file") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise VerificationFailed("the public key is not an EC P-256 key: modelpress signs with no other kind")
    return key


def public_pem(key: ec.EllipticCurvePublicKey) -> str:
    encoding, form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_bytes(encoding, form).decode()


def key_id(key: ec.EllipticCurvePublicKey) -> str:
    """SHA-256 of the key's PEM: the `hint` of a model signature, the `keyid` of an approval."""
    return hashlib.sha256(public_pem(key).encode()).hexdigest()


def open_envelope(envelope: Any, key: ec.EllipticCurvePublicKey, name: str) -> Statement:
    """The statement in a DSSE envelope, once its signature by `key` was checked. `name`: the file's, for messages."""
    fields = exact_fields(envelope, ("payload", "payloadType", "signatures"), name)
    if fields["payloadType"] != PAYLOAD_TYPE:
        raise VerificationFailed(f"{name} holds {str(fields['payloadType'])[:80]!r}, expected {PAYLOAD_TYPE}")
    signatures = fields["signatures"]
    if not isinstance(signatures, list) or len(signatures) != 1:
        raise VerificationFailed(f"{name} must have exactly one signature")
    signature = exact_fields(signatures[0], ("sig", "keyid"), name)
    if signature["keyid"] not in ("", key_id(key)):
        raise VerificationFailed(f"{name} was signed with another key than the one given")
    payload = _base64(fields["payload"], name)
    try:
        signed = Envelope(payload, PAYLOAD_TYPE, {}).pae()
        key.verify(_base64(signature["sig"], name), signed, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        raise VerificationFailed(
            f"the signature of {name} is wrong: another key signed it, or it was changed"
        ) from None
    return Statement.from_json(read_json(payload, name))


def open_bundle(bundle: Any, key: ec.EllipticCurvePublicKey, name: str) -> Statement:
    """The same for the envelope in a Sigstore bundle with a plain public key, as OpenSSF Model Signing writes it."""
    fields = exact_fields(bundle, ("mediaType", "verificationMaterial", "dsseEnvelope"), name)
    if fields["mediaType"] != BUNDLE_TYPE:
        raise VerificationFailed(f"{name} is {str(fields['mediaType'])[:80]!r}, expected {BUNDLE_TYPE}")
    if fields["verificationMaterial"] != {"publicKey": {"hint": key_id(key)}, "tlogEntries": []}:
        raise VerificationFailed(f"{name} was signed with another key than the one given")
    return open_envelope(fields["dsseEnvelope"], key, name)


def read_json(data: bytes, name: str) -> dict[str, Any]:
    """One strict JSON object. VerificationFailed names the file."""
    try:
        return read_object(data)
    except JsonError as fault:
        raise VerificationFailed(f"{name} {fault}") from None


def read_compact_json(data: bytes, name: str) -> dict[str, Any]:
    """Strict JSON without insignificant bytes, as every writer of a signed statement leaves it."""
    value = read_json(data, name)
    if json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() != data:
        raise VerificationFailed(f"{name} was changed after it was written: its JSON is not in the writer's form")
    return value


def exact_fields(value: Any, names: tuple[str, ...], where: str) -> dict[str, Any]:
    """`value`, if it is an object with exactly these fields."""
    if not isinstance(value, dict) or set(value) != set(names):
        raise VerificationFailed(f"{where}: expected an object with exactly the fields {', '.join(names)}")
    return value


def _subject(value: Any) -> tuple[str, Digest]:
    fields = exact_fields(value, ("name", "digest"), "subject")
    digest = exact_fields(fields["digest"], ("sha256",), "subject digest")
    try:
        return str(fields["name"]), Digest(f"sha256:{digest['sha256']}")
    except InvalidRequest as fault:
        raise VerificationFailed(f"subject {str(fields['name'])[:80]!r}: {fault.message}") from None


def _base64(text: Any, name: str) -> bytes:
    """Standard alphabet, padded, and the one encoding of its bytes."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise VerificationFailed(f"{name} holds text that is not base64") from None
    if base64.b64encode(data).decode() != text:
        raise VerificationFailed(f"{name} holds base64 that no encoder writes: its last bits were changed")
    return data
