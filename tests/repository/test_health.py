"""The image's health check: 0 only where the configured service itself answers SERVING, over TLS too."""

import datetime
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from modelpress.errors import InvalidRequest
from service.config import Server
from service.health import certified_name, target
from tests.servers import ROOT, RunningServer, launch

PEM = serialization.Encoding.PEM


@pytest.fixture
def start() -> Iterator[Callable[[Path, str], RunningServer]]:
    started: list[RunningServer] = []

    def begin(data: Path, toml: str) -> RunningServer:
        started.append(launch(data, toml))
        return started[-1]

    yield begin
    for running in started:
        running.kill()


def ask(config: Path, port: str) -> subprocess.CompletedProcess[str]:
    """Run the check with the server's own configuration; the test's server chose its port itself."""
    environment = {**os.environ, "MODELPRESS_SERVER_PORT": port}
    command = [sys.executable, "-m", "service.health", "--config", str(config)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=30, check=False)


def certify(folder: Path, *names: x509.GeneralName) -> tuple[Path, Path]:
    """A chain of one certificate, which an authority outside the file has signed, and its key."""
    folder.mkdir(parents=True)
    authority, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    subject, issuer = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in ("modelpress test", "an authority")
    )
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now)
    builder = builder.not_valid_after(now + datetime.timedelta(days=1))
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    chain, private = folder / "chain.pem", folder / "key.pem"
    chain.write_bytes(builder.sign(authority, hashes.SHA256()).public_bytes(PEM))
    private.write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    return chain, private


def secured(chain: Path, key: Path) -> str:
    return f"""
    [server]
    address = "0.0.0.0"
    tls_certificate = "{chain}"
    tls_key = "{key}"
    [[identity.tokens]]
    name = "ci"
    sha256 = "{"0" * 64}"
    """


def test_a_serving_server_is_healthy_and_a_stopped_one_is_not(start: Any, tmp_path: Path) -> None:
    running = start(tmp_path / "data", "")
    port = running.address.rpartition(":")[2]
    config = running.data.with_suffix(".toml")
    assert ask(config, port).returncode == 0
    assert running.stop() == 0
    ended = ask(config, port)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f"modelpress: the service at 127.0.0.1:{port} does not answer: UNAVAILABLE\n"


def test_over_tls_the_server_must_have_the_configured_certificate(start: Any, tmp_path: Path) -> None:
    chain, key = certify(tmp_path / "tls", x509.DNSName("*.models.example"))
    running = start(tmp_path / "data", secured(chain, key))
    port = running.address.rpartition(":")[2]
    assert ask(running.data.with_suffix(".toml"), port).returncode == 0
    other = tmp_path / "other.toml"
    other.write_text(secured(*certify(tmp_path / "other", x509.DNSName("*.models.example"))))
    assert ask(other, port).returncode == 1
    plain = tmp_path / "plain.toml"
    plain.write_text("")
    assert ask(plain, port).returncode == 1


def test_a_port_that_takes_connections_and_says_nothing_is_not_healthy(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ended = ask(config, str(silent.getsockname()[1]))
    assert ended.returncode == 1 and ended.stderr.startswith("modelpress: the service at 127.0.0.1:")


def test_a_configuration_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    ended = ask(tmp_path / "absent.toml", "8471")
    assert ended.returncode == 1
    assert ended.stderr == "modelpress: cannot read the configuration file 'absent.toml': No such file or directory\n"


def test_a_server_on_all_addresses_is_asked_on_loopback() -> None:
    assert target(Server(address="0.0.0.0", port=9000)) == "127.0.0.1:9000"  # noqa: S104
    assert target(Server(address="::", port=9000)) == "[::1]:9000"
    assert target(Server(address="192.0.2.7", port=9000)) == "192.0.2.7:9000"
    with pytest.raises(InvalidRequest, match="port is 0"):
        target(Server(port=0))


def test_a_certificate_that_names_no_host_is_refused(tmp_path: Path) -> None:
    chain, _ = certify(tmp_path / "one", x509.DNSName("models.example"), x509.DNSName("other.example"))
    assert certified_name(chain.read_bytes()) == "models.example"
    nameless = certify(tmp_path / "two")[0], certify(tmp_path / "three", x509.RFC822Name("a@b.example"))[0]
    for text in (*(file.read_bytes() for file in nameless), b"no PEM"):
        with pytest.raises(InvalidRequest, match="names a host"):
            certified_name(text)
