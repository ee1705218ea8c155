"""The gRPC server: address, TLS, limits, health and reflection around the servicers."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from modelpress.errors import FailedPrecondition, InvalidRequest
from service.config import Server
from service.edge.interceptors import EdgeInterceptor

OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)
"""A second server on a port fails instead of sharing it; a dead connection frees its upload within 40 s; a client may
ping every 10 s. The message limit stays gRPC's own 4 MiB."""

SETTLE_S = 10.0
"""Longest wait for calls that were cut to put away what they hold, e.g. an upload's last bytes."""

Registration = Callable[[grpc.aio.Server], None]
"""Adds one servicer to the server."""


class EdgeServer:
    """Serves the registered services, by full name, from `start` to `drain`."""

    def __init__(self, config: Server, interceptor: EdgeInterceptor, services: Mapping[str, Registration]) -> None:
        self._config = config
        self._interceptor = interceptor
        self._services = tuple(services)
        self._server = grpc.aio.server(interceptors=[interceptor], options=OPTIONS)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        for register in services.values():
            register(self._server)
        reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    async def start(self) -> str:
        """Listen, say SERVING, return the address as `host:port`."""
        port = self._listen()
        await self._server.start()
        for name in ("", *self._services):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return f"{_bracketed(self._config.address)}:{port}"

    async def drain(self) -> None:
        """NOT_SERVING, no new calls, and `grace_s` for those in progress; what remains ends as UNAVAILABLE.

        Afterwards no call needs threads, database or store any more.
        """
        await self._health.enter_graceful_shutdown()
        await self._server.stop(self._config.grace_s)
        await self._interceptor.settled(SETTLE_S)

    def _listen(self) -> int:
        wanted = f"{_bracketed(self._config.address)}:{self._config.port}"
        credentials = self._credentials()
        try:
            if credentials is None:
                return int(self._server.add_insecure_port(wanted))
            return int(self._server.add_secure_port(wanted, credentials))
        except RuntimeError:
            raise FailedPrecondition(
                f"cannot listen on {wanted}: the port is taken or the address is not this machine's; choose another "
                "one with --port or server.address"
            ) from None

    def _credentials(self) -> grpc.ServerCredentials | None:
        certificate, key = self._config.tls_certificate, self._config.tls_key
        if certificate is None or key is None:
            return None
        check_key_pair(certificate, key)
        return grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])


def check_key_pair(certificate: Path, key: Path) -> None:
    """Both files can be read and belong together; gRPC itself would only fail to listen. Raises InvalidRequest."""
    field = "server.tls_certificate"
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        raise InvalidRequest(
            f"{field} and server.tls_key are not a certificate and its key ({error.reason}): give two PEM files that "
            "belong together",
            field=field,
        ) from None
    except OSError as error:
        raise InvalidRequest(f"{field} or server.tls_key cannot be read: {error.strerror}", field=field) from None


def _bracketed(address: str) -> str:
    """IPv6 addresses stand in brackets before a port."""
    return f"[{address}]" if ":" in address else address
