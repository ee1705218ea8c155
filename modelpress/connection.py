"""One channel to one server: address, TLS, token, deadlines, retries, and errors in modelpress's own types."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from modelpress.errors import InvalidRequest, ModelpressError
from modelpress.retries import Patience, RetryPolicy
from modelpress.v1 import artifacts_pb2_grpc, capabilities_pb2_grpc, conversions_pb2_grpc, reports_pb2_grpc
from modelpress.wire_errors import from_rpc_error

DEFAULT_ADDRESS = "127.0.0.1:8471"
DEFAULT_PORT = 8471
CALL_TIMEOUT_S = 30.0
CREATE_ARTIFACT_TIMEOUT_S = 900.0  # the server reads every tensor before it answers
WRITE_TIMEOUT_S = 24 * 3600.0  # one stream may carry a whole model; a dead connection is found by keepalive
TIMEOUT_S = {"CreateArtifact": CREATE_ARTIFACT_TIMEOUT_S, "WriteUpload": WRITE_TIMEOUT_S}

_SCHEME = "https://"
_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)
_LOOPBACK_OPTIONS = (("grpc.enable_http_proxy", 0),)


@dataclass(frozen=True)
class Endpoint:
    """Where the server is and what proves who speaks. `https://` or `tls_ca` means TLS.

    A token is never sent in the clear to another machine: that is refused here, before a connection exists.
    """

    address: str = DEFAULT_ADDRESS
    token: str | None = field(default=None, repr=False)
    tls_ca: Path | None = None

    def __post_init__(self) -> None:
        if not self.host:
            raise InvalidRequest(
                f"address {self.address!r} has no host: write HOST:PORT or https://HOST:PORT", field="address"
            )
        if self.token is not None and not (self.token and self.token.isascii() and self.token.isprintable()):
            raise InvalidRequest(
                "the token is empty or has characters that cannot be sent: check where it is read from", field="token"
            )
        if self.token and not self.tls and not self.loopback:
            raise InvalidRequest(
                f"a token would travel unencrypted to {self.address}: write https:// before it, or give the CA file",
                field="address",
            )

    @property
    def tls(self) -> bool:
        return self.tls_ca is not None or self.address.startswith(_SCHEME)

    @property
    def target(self) -> str:
        """HOST:PORT, the port filled in where it is left out."""
        bare = self.address.removeprefix(_SCHEME).rstrip("/")
        has_port = bare.rpartition(":")[2].isdigit() and not bare.endswith("]")
        return bare if has_port else f"{bare}:{DEFAULT_PORT}"

    @property
    def host(self) -> str:
        return self.target.rpartition(":")[0].strip("[]")

    @property
    def loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


class Connection:
    """Every method of the wire, by name. Raises modelpress errors, except where a caller resumes by itself."""

    def __init__(self, endpoint: Endpoint, policy: RetryPolicy) -> None:
        self.policy = policy
        self._address = endpoint.target
        self._metadata = (("authorization", f"Bearer {endpoint.token}"),) if endpoint.token else ()
        self._channel = _open_channel(endpoint)
        self._methods = _methods(self._channel)

    def close(self) -> None:
        self._channel.close()

    def call(self, method: str, request: Any) -> Any:
        """One unary call, repeated where that is safe."""
        return self.call_patiently(method, request, self.policy.patience(self.policy.call_patience_s))

    def call_patiently(self, method: str, request: Any, patience: Patience) -> Any:
        """The same as part of a longer series of tries."""
        while True:
            try:
                return self.try_once(method, request)
            except grpc.RpcError as error:
                if not patience.allows(method, error.code()):
                    raise self.translate(error) from None

    def try_once(self, method: str, request: Any) -> Any:
        """One try of a call with one answer; `request` is a message or an iterator of them. Raises grpc.RpcError."""
        return self._methods[method](request, timeout=TIMEOUT_S.get(method, CALL_TIMEOUT_S), metadata=self._metadata)

    def stream_once(self, method: str, request: Any, *, timeout_s: float | None = None) -> Iterator[Any]:
        """One try of a call with a stream of answers, which ends with the iterator. Raises grpc.RpcError."""
        call = self._methods[method](request, timeout=timeout_s, metadata=self._metadata)
        try:
            yield from call
        finally:
            call.cancel()

    def translate(self, error: grpc.RpcError) -> ModelpressError:
        return from_rpc_error(error, address=self._address)


def _methods(channel: grpc.Channel) -> Mapping[str, Any]:
    """Method name -> callable. Names are unique over the four services."""
    stubs = (
        artifacts_pb2_grpc.ArtifactsStub(channel),
        conversions_pb2_grpc.ConversionsStub(channel),
        reports_pb2_grpc.ReportsStub(channel),
        capabilities_pb2_grpc.CapabilitiesStub(channel),
    )
    return {name: method for stub in stubs for name, method in vars(stub).items()}


def _open_channel(endpoint: Endpoint) -> grpc.Channel:
    options = [*_OPTIONS, *(_LOOPBACK_OPTIONS if endpoint.loopback else ())]
    if endpoint.tls:
        return grpc.secure_channel(endpoint.target, _tls_credentials(endpoint.tls_ca), options=options)
    return grpc.insecure_channel(endpoint.target, options=options)


def _tls_credentials(tls_ca: Path | None) -> grpc.ChannelCredentials:
    if tls_ca is None:
        return grpc.ssl_channel_credentials()
    try:
        return grpc.ssl_channel_credentials(tls_ca.read_bytes())
    except OSError as error:
        raise InvalidRequest(f"cannot read the CA file {str(tls_ca)!r}: {error.strerror}", field="tls_ca") from None
