"""Tokens and TLS against a real server: who is let in, and that no token is ever printed."""

import hashlib
import json
from datetime import datetime, timedelta, timezone

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from modelpress.cli.app import run
from modelpress.cli.exits import Exit
from modelpress.client import Client
from modelpress.errors import Unauthenticated, Unavailable
from modelpress.retries import RetryPolicy

TOKEN = "token-of-ci-that-nobody-may-see"


def write_certificate(folder):
    """A self-signed certificate for `localhost` and its key, as PEM files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    start = datetime.now(timezone.utc) - timedelta(hours=1)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    (folder / "server.crt").write_bytes(certificate.public_bytes(pem))
    (folder / "server.key").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory, launch_server):
    """A server with TLS and one token; its address by name, and the CA file."""
    folder = tmp_path_factory.mktemp("guarded")
    write_certificate(folder)
    running = launch_server(
        folder / "data",
        MODELPRESS_WORKERS_SLOTS="0",
        MODELPRESS_SERVER_TLS_CERTIFICATE=str(folder / "server.crt"),
        MODELPRESS_SERVER_TLS_KEY=str(folder / "server.key"),
        MODELPRESS_IDENTITY_TOKENS=json.dumps([{"name": "ci", "sha256": hashlib.sha256(TOKEN.encode()).hexdigest()}]),
    )
    return f"https://localhost:{running.address.rpartition(':')[2]}", folder / "server.crt"


def test_the_right_token_over_tls_is_let_in(guarded):
    address, authority = guarded
    with Client(address, token=TOKEN, tls_ca=authority) as client:
        assert client.capabilities().version


@pytest.mark.parametrize("token", [None, "another"])
def test_no_or_another_token_is_not(guarded, token):
    address, authority = guarded
    with Client(address, token=token, tls_ca=authority) as client, pytest.raises(Unauthenticated):
        client.capabilities()


def test_a_certificate_of_another_authority_is_refused(guarded, tmp_path):
    address, _ = guarded
    write_certificate(tmp_path)
    authority, quick = tmp_path / "server.crt", RetryPolicy(call_patience_s=0.0)
    refused = pytest.raises(Unavailable, match="certificate")
    with Client(address, token=TOKEN, tls_ca=authority, retry_policy=quick) as client, refused:
        client.capabilities()


@pytest.mark.parametrize("source", ["environment", "environment file", "flag", "settings file"])
def test_the_command_line_finds_the_token_and_never_prints_it(guarded, source, monkeypatch, capsys, tmp_path):
    address, authority = guarded
    token_file, settings = tmp_path / "token", tmp_path / "config.toml"
    token_file.write_text(TOKEN + "\n")
    settings.write_text(f'address = "{address}"\ntls_ca = "{authority}"\n')
    monkeypatch.setenv("MODELPRESS_CONFIG", str(settings))
    arguments = ["list", "--json"]
    if source == "environment":
        monkeypatch.setenv("MODELPRESS_TOKEN", TOKEN)
    elif source == "environment file":
        monkeypatch.setenv("MODELPRESS_TOKEN_FILE", str(token_file))
    elif source == "flag":
        arguments += ["--token-file", str(token_file)]
    else:
        settings.write_text(settings.read_text() + f'token = "{TOKEN}"\n')
    assert run(arguments) == Exit.OK
    assert run(["get", "none", "--json", *arguments[2:]]) == Exit.NOT_FOUND
    assert TOKEN not in "".join(capsys.readouterr())


def test_the_command_line_says_what_is_missing(guarded, monkeypatch, capsys, tmp_path):
    address, authority = guarded
    monkeypatch.setenv("MODELPRESS_CONFIG", str(tmp_path / "config.toml"))
    (tmp_path / "config.toml").write_text("")
    assert run(["list", "--address", address, "--tls-ca", str(authority)]) == Exit.NOT_ALLOWED
    assert "wants a token" in capsys.readouterr().err
    assert run(["list", "--address", address, "--tls-ca", str(tmp_path / "none.pem")]) == Exit.INVALID_REQUEST
    assert "cannot read the CA file" in capsys.readouterr().err
