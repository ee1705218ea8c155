"""`python -m service.health [--config FILE]`: whether the service of this configuration can be called.

Exits 0 where it answers SERVING, else 1 with one sentence on standard error. It asks the standard gRPC health service
at the configured address and port, over TLS where that is configured: then the server must prove that it has the
configured certificate. Health needs no token.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import grpc
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from modelpress.errors import InvalidRequest, ModelpressError, Unavailable
from service.config import Config, Server, load_config

TIMEOUT_S = 3.0
"""For connecting and the answer together; the image's health check allows 5 s with the start of Python."""
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - what is listened on, mapped to what is called


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m service.health", description="Ask a running service for health.")
    parser.add_argument("--config", type=Path, help="TOML file that the service was started with")
    try:
        check(load_config(parser.parse_args().config, os.environ))
    except ModelpressError as error:
        print(f"modelpress: {error.message}", file=sys.stderr)
        return 1
    return 0


def check(config: Config) -> None:
    """Return where the service says SERVING. Raises Unavailable, or InvalidRequest where it cannot be asked."""
    request = health_pb2.HealthCheckRequest()
    with _open_channel(config.server) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise Unavailable(f"the service at {target(config.server)} does not answer: {error.code().name}") from None
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        raise Unavailable(f"the service at {target(config.server)} answers {status}: it is starting or draining")


def target(server: Server) -> str:
    """HOST:PORT at which this machine reaches the server; for one that listens on all addresses, loopback."""
    if server.port == 0:
        raise InvalidRequest("server.port is 0, so its port is not known: configure the port", field="server.port")
    address = ANY_ADDRESS.get(server.address, server.address)
    return f"[{address}]:{server.port}" if ":" in address else f"{address}:{server.port}"


def _open_channel(server: Server) -> grpc.Channel:
    options = [("grpc.enable_http_proxy", 0)]
    if server.tls_certificate is None:
        return grpc.insecure_channel(target(server), options=options)
    chain = _read_chain(server.tls_certificate)
    name = ("grpc.ssl_target_name_override", certified_name(chain))
    return grpc.secure_channel(target(server), grpc.ssl_channel_credentials(chain), options=[*options, name])


def _read_chain(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InvalidRequest(
            f"server.tls_certificate cannot be read: {error.strerror}", field="server.tls_certificate"
        ) from None


def certified_name(chain: bytes) -> str:
    """A host that the server's own certificate, the chain's first, is for. Loopback, which is called, rarely is one."""
    try:
        certificate = x509.load_pem_x509_certificate(chain)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        raise _nameless() from None
    hosts = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    if not hosts:
        raise _nameless()
    return hosts[0].replace("*", "health", 1)


def _nameless() -> InvalidRequest:
    return InvalidRequest(
        "server.tls_certificate is no PEM certificate that names a host (subject alternative name): clients refuse it",
        field="server.tls_certificate",
    )


if __name__ == "__main__":
    sys.exit(main())
