"""Beyond loopback: TLS and a bearer token, which is a name and a tenant; tenants see nothing of each other."""

import datetime
import hashlib
import ipaddress
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health_pb2, health_pb2_grpc

from modelpress.errors import InvalidRequest, Unauthenticated
from modelpress.v1 import artifacts_pb2 as pb
from modelpress.v1.artifacts_pb2_grpc import ArtifactsStub
from service.config import Token
from service.edge.server import check_key_pair
from service.identity import LOCAL, Caller, Doorkeeper
from tests.service.wire import chunks, refusal, sha256

CODE = grpc.StatusCode


def write_pair(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "modelpress test")])
    now = datetime.datetime.now(datetime.timezone.utc)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).add_extension(address, critical=False)
    builder = builder.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    certificate = builder.sign(key, hashes.SHA256())
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder / "cert.pem", folder / "key.pem"


def hashed(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


@pytest.fixture
def secured(start_server: Any, tmp_path: Path) -> Iterator[tuple[Any, grpc.Channel]]:
    certificate, key = write_pair(tmp_path / "tls")
    toml = f"""
    [server]
    address = "0.0.0.0"
    tls_certificate = "{certificate}"
    tls_key = "{key}"
    [[identity.tokens]]
    name = "ci"
    tenant = "search"
    sha256 = "{hashed("first token")}"
    [[identity.tokens]]
    name = "nightly"
    tenant = "ads"
    sha256 = "{hashed("second token")}"
    """
    running = start_server(tmp_path / "data", toml)
    address = running.address.replace("0.0.0.0", "127.0.0.1")  # noqa: S104
    credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
    with grpc.secure_channel(address, credentials) as channel:
        yield running, channel


def find(channel: grpc.Channel, digest: str, *metadata: tuple[str, str]) -> pb.FindMissingResponse:
    stub = ArtifactsStub(channel)
    return stub.FindMissing(pb.FindMissingRequest(digests=[digest]), metadata=metadata)


def test_over_tls_only_known_tokens_are_served_and_tenants_are_apart(secured: Any) -> None:
    running, channel = secured
    data, digest = b"some bytes", sha256(b"some bytes")
    health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", "Basic first token"),)):
        with pytest.raises(grpc.RpcError) as caught:
            find(channel, digest, *metadata)
        assert refusal(caught.value).code == CODE.UNAUTHENTICATED
    first, second = (("authorization", f"Bearer {which} token") for which in ("first", "second"))
    stub = ArtifactsStub(channel)
    request = pb.CreateUploadRequest(digest=digest, size_bytes=len(data))
    upload = stub.CreateUpload(request, metadata=(first,))
    assert stub.WriteUpload(chunks(upload.name, data), metadata=(first,)).complete
    assert not find(channel, digest, first).missing_digests
    assert find(channel, digest, second).missing_digests
    for call in (
        lambda: stub.GetUpload(pb.GetUploadRequest(name=upload.name), metadata=(second,)),
        lambda: next(stub.Download(pb.DownloadRequest(digest=digest), metadata=(second,))),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert refusal(caught.value).code == CODE.NOT_FOUND
    assert "first token" not in running.log.read_text()


def test_a_server_with_tls_does_not_answer_in_plain_text(secured: Any) -> None:
    running, _ = secured
    port = running.address.rpartition(":")[2]
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as caught:
        find(channel, sha256(b""))
    assert caught.value.code() == CODE.UNAVAILABLE


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    certificate, key = write_pair(tmp_path / "a")
    _, other = write_pair(tmp_path / "b")
    check_key_pair(certificate, key)
    (tmp_path / "text").write_text("no PEM")
    for pair in ((certificate, other), (tmp_path / "text", key), (certificate, tmp_path / "none")):
        with pytest.raises(InvalidRequest, match=r"server\.tls_certificate") as caught:
            check_key_pair(*pair)
        assert str(tmp_path) not in str(caught.value)


def test_without_tokens_everybody_is_local_and_with_them_nobody_is() -> None:
    assert Doorkeeper(()).identify("") == LOCAL == Caller("local", "default")
    doorkeeper = Doorkeeper((Token(name="ci", tenant="search", sha256=hashed("t")),))
    assert doorkeeper.identify("bearer t") == Caller("ci", "search")
    for authorization in ("", "t", "Bearer", "Bearer ", "Bearer T", f"Bearer {hashed('t')}"):
        with pytest.raises(Unauthenticated):
            doorkeeper.identify(authorization)
