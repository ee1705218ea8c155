"""The signing key: made once, kept to itself, and never anything but EC P-256."""

from __future__ import annotations

import copy
import logging
import multiprocessing
import os
import pickle
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from modelpress.attestations import key_id, load_public_key, open_envelope, read_compact_json
from modelpress.errors import FailedPrecondition
from service.signing import DEVELOPMENT_KEY, DEVELOPMENT_PUBLIC_KEY, VARIABLE, load_or_create_signer

STATEMENT = {"_type": "https://in-toto.io/Statement/v1", "subject": [], "predicateType": "urn:x", "predicate": {}}


def write_key(file: Path, key, passphrase: bytes | None = None) -> Path:
    encryption = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    file.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))
    file.chmod(0o600)
    return file


@pytest.fixture
def p256():
    return ec.generate_private_key(ec.SECP256R1())


def test_the_development_key_is_made_once_and_readable_by_its_owner_only(tmp_path, caplog):
    first = load_or_create_signer(tmp_path / "data", None)
    key = tmp_path / "data" / DEVELOPMENT_KEY
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    assert first.development
    assert "development key" in caplog.text
    second = load_or_create_signer(tmp_path / "data", None)
    assert second.public_key_pem == first.public_key_pem
    assert (tmp_path / "data" / DEVELOPMENT_PUBLIC_KEY).read_text() == first.public_key_pem
    assert sorted(file.name for file in key.parent.iterdir()) == ["development-key.pem", "development-key.pub.pem"]


@pytest.mark.parametrize("point", ["signing.key.before", "signing.key.after"])
def test_a_kill_while_the_key_is_written_leaves_a_whole_key_or_none(tmp_path, point):
    program = (
        "import sys, pathlib; from service.signing import load_or_create_signer; "
        "load_or_create_signer(pathlib.Path(sys.argv[1]), None)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "data")]
    killed = subprocess.run(command, env={**os.environ, "MODELPRESS_KILL_AT": point}, check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    signer = load_or_create_signer(tmp_path / "data", None)
    assert load_or_create_signer(tmp_path / "data", None).identity == signer.identity
    assert len(list((tmp_path / "data" / "keys").iterdir())) == 2


def test_what_is_signed_opens_with_the_public_key_and_with_no_other(tmp_path, signer):
    envelope = signer.sign_statement(STATEMENT)
    opened = open_envelope(read_compact_json(envelope, "x"), load_public_key(signer.public_key_pem), "x")
    assert opened.to_json() == STATEMENT
    assert key_id(load_public_key(signer.public_key_pem)) == signer.identity.id


def test_a_configured_key_is_used_and_says_so(tmp_path, p256):
    signer = load_or_create_signer(tmp_path / "data", write_key(tmp_path / "key.pem", p256))
    assert (signer.identity.kind, signer.development) == ("configured", False)
    assert not (tmp_path / "data").exists()


def test_the_development_key_configured_by_hand_stays_a_development_key(tmp_path, caplog):
    made = load_or_create_signer(tmp_path, None)
    copied = tmp_path / "key.pem"
    copied.write_bytes((tmp_path / DEVELOPMENT_KEY).read_bytes())
    signer = load_or_create_signer(tmp_path, copied)
    assert signer.identity == made.identity
    assert "is the development key" in caplog.text


def test_an_encrypted_key_is_opened_with_the_passphrase_which_leaves_the_environment(tmp_path, p256, monkeypatch):
    file = write_key(tmp_path / "key.pem", p256, b"correct horse")
    monkeypatch.setenv(VARIABLE, "correct horse")
    signer = load_or_create_signer(tmp_path, file)
    assert signer.identity.id == key_id(p256.public_key())
    assert VARIABLE not in os.environ


@pytest.mark.parametrize(("encrypted", "given"), [(True, None), (True, "wrong"), (False, "needless")])
def test_a_wrong_passphrase_is_refused_without_repeating_it(tmp_path, p256, monkeypatch, encrypted, given):
    file = write_key(tmp_path / "key.pem", p256, b"correct horse" if encrypted else None)
    if given:
        monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(FailedPrecondition, match=VARIABLE) as raised:
        load_or_create_signer(tmp_path, file)
    assert str(tmp_path) not in raised.value.message
    assert "wrong" not in raised.value.message.replace(f"{VARIABLE} is wrong", "")
    assert raised.value.__cause__ is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: rsa.generate_private_key(public_exponent=65537, key_size=2048),
        lambda: ec.generate_private_key(ec.SECP384R1()),
        lambda: ec.generate_private_key(ec.SECP256K1()),
        ed25519.Ed25519PrivateKey.generate,
    ],
    ids=["RSA", "P-384", "secp256k1", "Ed25519"],
)
def test_any_other_kind_of_key_is_refused(tmp_path, make):
    with pytest.raises(FailedPrecondition, match="not an EC P-256 key"):
        load_or_create_signer(tmp_path, write_key(tmp_path / "key.pem", make()))


@pytest.mark.parametrize(
    "content", [b"", b"not a key", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"]
)
def test_what_is_no_key_is_refused_with_a_way_to_make_one(tmp_path, content):
    (tmp_path / "key.pem").write_bytes(content)
    with pytest.raises(FailedPrecondition, match="openssl genpkey") as raised:
        load_or_create_signer(tmp_path, tmp_path / "key.pem")
    assert raised.value.field == "signing.key_file"


def test_a_missing_key_file_is_never_replaced_by_a_development_key(tmp_path):
    with pytest.raises(FailedPrecondition, match="cannot be read"):
        load_or_create_signer(tmp_path, tmp_path / "nowhere.pem")
    assert not (tmp_path / "keys").exists()


def test_a_key_that_others_can_read_is_named_in_the_log(tmp_path, p256, caplog):
    file = write_key(tmp_path / "key.pem", p256)
    file.chmod(0o644)
    load_or_create_signer(tmp_path, file)
    assert "can be read by other users" in caplog.text


def test_the_key_appears_nowhere(tmp_path, p256, caplog):
    caplog.set_level(logging.DEBUG)
    signer = load_or_create_signer(tmp_path, write_key(tmp_path / "key.pem", p256))
    secret = p256.private_numbers().private_value
    shown = repr(signer) + str(signer) + f"{signer!r:>200}" + caplog.text + signer.sign_statement(STATEMENT).decode()
    pem = (tmp_path / "key.pem").read_text().splitlines()[1]
    assert not any(form in shown for form in (str(secret), f"{secret:x}", pem, pem[:20]))


def test_a_signer_cannot_leave_the_process(signer):
    for leave in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="never leaves"):
            leave(signer)
    with pytest.raises(TypeError, match="never leaves"):
        multiprocessing.get_context("spawn").SimpleQueue().put(signer)
