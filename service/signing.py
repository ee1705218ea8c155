"""The signing key, and the two things that are signed with it. Lives in the service process only.

    signer = load_or_create_signer(data, key_file=None)
    approval = signer.sign_statement(statement)              # bytes of approval.dsse.json
    signer.sign_folder(folder, folder / "model.sig", ignore=SIGNED_STATEMENTS)

Without a configured key the embedded service makes a development key at its first start and says so: such a key proves
that a folder was not changed since, and nothing about who made it. The key is never shown, logged or pickled.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import model_signing
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from model_signing._signing import sign_ec_key
from securesystemslib.dsse import Envelope
from securesystemslib.signer import CryptoSigner, SSlibKey

from modelpress.attestations import PAYLOAD_TYPE, SigningKey, key_id, public_pem
from modelpress.canonical import canonical_json
from modelpress.errors import FailedPrecondition
from service.faults import fault_point

VARIABLE = "MODELPRESS_KEY_PASSPHRASE"
DEVELOPMENT_KEY = Path("keys", "development-key.pem")
DEVELOPMENT_PUBLIC_KEY = Path("keys", "development-key.pub.pem")
MAKE_A_KEY = "openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -aes256 -out key.pem"

log = logging.getLogger(__name__)


class Signer:
    """One EC P-256 key. `development`: made by this service for itself, trusted by nobody else."""

    __slots__ = ("_key", "development")

    def __init__(self, key: ec.EllipticCurvePrivateKey, *, kind: Literal["development", "configured"]) -> None:
        self._key = key
        self.development = kind == "development"

    def __repr__(self) -> str:
        return f"<Signer {self.identity.kind} {self.identity.id[:16]}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a signer never leaves the service process")

    @property
    def public_key_pem(self) -> str:
        return public_pem(self._key.public_key())

    @property
    def identity(self) -> SigningKey:
        return SigningKey(kind="development" if self.development else "configured", id=key_id(self._key.public_key()))

    def sign_statement(self, statement: dict[str, Any]) -> bytes:
        """The statement in a DSSE envelope with one signature, as canonical JSON."""
        public_key = SSlibKey.from_crypto(self._key.public_key(), keyid=self.identity.id)
        envelope = Envelope(canonical_json(statement), PAYLOAD_TYPE, {})
        envelope.sign(CryptoSigner(self._key, public_key))
        return canonical_json(envelope.to_dict())

    def sign_folder(self, folder: Path, signature_file: Path, ignore: Sequence[str]) -> None:
        """Write an OpenSSF Model Signing bundle over every file of `folder`, git files too, but those in `ignore`.

        Ignored paths are relative to `folder`. The bundle names the folder by its last part.
        """
        hashing = model_signing.hashing.Config().use_file_serialization(hashing_algorithm="sha256", max_workers=2)
        hashing.set_ignored_paths(paths=list(ignore), ignore_git_paths=False)
        config = model_signing.signing.Config().set_hashing_config(hashing)
        config._signer = _LoadedKeySigner(self._key)
        config.sign(folder, signature_file)


class _LoadedKeySigner(sign_ec_key.Signer):  # type: ignore[misc]  # model_signing has no type stubs
    """The package's own signer with a key from memory: it would read an unprotected file at every signature."""

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self._private_key = key


def load_or_create_signer(folder: Path, key_file: Path | None) -> Signer:
    """The configured key, or else the development key in `folder`/keys, made at the first start.

    An encrypted PEM is opened with the passphrase in MODELPRESS_KEY_PASSPHRASE, which is taken out of the environment
    so that no worker inherits it. FailedPrecondition where the key cannot be used.
    """
    passphrase = os.environ.pop(VARIABLE, None)
    if key_file is None:
        return _development_signer(folder)
    key = _load(key_file, passphrase.encode() if passphrase else None)
    _warn_if_readable_by_others(key_file)
    development = folder / DEVELOPMENT_KEY
    if development.is_file() and _load(development, None).public_key() == key.public_key():
        log.warning("signing.key_file is the development key of this service: what it signs says so")
        return Signer(key, kind="development")
    return Signer(key, kind="configured")


def _development_signer(folder: Path) -> Signer:
    file = folder / DEVELOPMENT_KEY
    if not file.exists():
        _create(file)
    signer = Signer(_load(file, None), kind="development")
    _write_once(folder / DEVELOPMENT_PUBLIC_KEY, signer.public_key_pem.encode(), mode=0o644)
    _warn_if_readable_by_others(file)
    log.warning(
        "signing with a development key made by this service (%s): it shows that nothing was changed since, not who "
        "signed. Set signing.key_file for a key that others can trust",
        signer.identity.id[:16],
    )
    return signer


def _create(file: Path) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.parent.chmod(0o700)
    pem = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _write_once(file, pem, mode=0o600)


def _write_once(file: Path, data: bytes, *, mode: int) -> None:
    """Write a file that is complete and durable from the moment that it has its name. One that is there stays."""
    if file.exists():
        return
    new = file.with_name(f".{file.name}.new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as sink:
        sink.write(data)
        sink.flush()
        os.fsync(descriptor)
    fault_point("signing.key.before")
    with contextlib.suppress(FileExistsError):
        os.link(new, file)
    new.unlink()
    _sync_folder(file.parent)
    fault_point("signing.key.after")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _load(file: Path, passphrase: bytes | None) -> ec.EllipticCurvePrivateKey:
    """An EC P-256 private key. No message repeats a path, a passphrase or key material."""
    try:
        key = serialization.load_pem_private_key(file.read_bytes(), passphrase)
    except OSError as fault:
        raise FailedPrecondition(
            f"the signing key cannot be read: {fault.strerror}", field="signing.key_file"
        ) from None
    except TypeError:
        wanted = f"set {VARIABLE}" if passphrase is None else f"it is not encrypted: unset {VARIABLE}"
        raise FailedPrecondition(f"the signing key cannot be opened: {wanted}", field="signing.key_file") from None
    except (ValueError, UnsupportedAlgorithm):
        raise FailedPrecondition(
            f"the signing key cannot be opened: it is no PEM private key, or {VARIABLE} is wrong. "
            f"Make one with: {MAKE_A_KEY}",
            field="signing.key_file",
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise FailedPrecondition(
            f"the signing key is not an EC P-256 key. Make one with: {MAKE_A_KEY}", field="signing.key_file"
        )
    return key


def _warn_if_readable_by_others(file: Path) -> None:
    if file.stat().st_mode & 0o077:
        log.warning("the signing key can be read by other users of this machine: chmod 600 its file")
