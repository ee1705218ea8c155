"""A plain gRPC caller that sees raw statuses."""

import hashlib
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import google_crc32c
import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from modelpress.v1 import artifacts_pb2 as pb
from modelpress.v1 import artifacts_pb2_grpc, capabilities_pb2_grpc, conversions_pb2_grpc, reports_pb2_grpc


@dataclass(frozen=True)
class Refusal:
    """A call's error as the wire has it."""

    code: grpc.StatusCode
    message: str
    reason: str
    metadata: dict[str, str]
    fields: list[str]
    missing: list[str]


@dataclass
class Caller:
    """Stubs over one channel."""

    channel: grpc.Channel
    artifacts: Any = field(init=False)
    reports: Any = field(init=False)
    capabilities: Any = field(init=False)
    conversions: Any = field(init=False)

    def __post_init__(self) -> None:
        self.artifacts = artifacts_pb2_grpc.ArtifactsStub(self.channel)
        self.reports = reports_pb2_grpc.ReportsStub(self.channel)
        self.capabilities = capabilities_pb2_grpc.CapabilitiesStub(self.channel)
        self.conversions = conversions_pb2_grpc.ConversionsStub(self.channel)

    def upload(self, data: bytes, *, chunk_bytes: int = 1 << 20) -> str:
        """Upload one blob that the server does not hold yet, and return its digest."""
        upload = self.create_upload(data)
        if not upload.complete:
            upload = self.artifacts.WriteUpload(chunks(upload.name, data, chunk_bytes=chunk_bytes))
        assert upload.complete
        return str(upload.digest)

    def create_upload(self, data: bytes) -> pb.Upload:
        return self.artifacts.CreateUpload(pb.CreateUploadRequest(digest=sha256(data), size_bytes=len(data)))

    def download(self, digest: str, *, offset: int = 0, length: int = 0) -> bytes:
        """A range of a blob; every message's place and CRC32C are checked."""
        request = pb.DownloadRequest(digest=digest, offset_bytes=offset, length_bytes=length)
        data = b""
        for message in self.artifacts.Download(request):
            assert message.offset_bytes == offset + len(data)
            assert message.crc32c == google_crc32c.value(message.data)
            assert len(message.data) <= 1 << 20
            data += message.data
        return data

    def refused(self, call: Callable[[], Any]) -> Refusal:
        """Make a call that must fail. A stream's first message is asked for."""
        with pytest.raises(grpc.RpcError) as caught:
            result = call()
            next(iter(result))
        return refusal(caught.value)


def refusal(error: grpc.RpcError) -> Refusal:
    status = rpc_status.from_call(error)
    info, bad, failure = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.PreconditionFailure(),
    )
    for detail in status.details if status else ():
        for kind in (info, bad, failure):
            if detail.Is(kind.DESCRIPTOR):
                detail.Unpack(kind)
    assert not status or info.domain == "modelpress"
    fields = [violation.field for violation in bad.field_violations]
    missing = [violation.subject for violation in failure.violations]
    return Refusal(error.code(), error.details() or "", info.reason, dict(info.metadata), fields, missing)


def sha256(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def chunk(name: str, offset: int, data: bytes) -> pb.WriteUploadRequest:
    return pb.WriteUploadRequest(name=name, offset_bytes=offset, data=data, crc32c=google_crc32c.value(data))


def chunks(name: str, data: bytes, *, start: int = 0, chunk_bytes: int = 1 << 20) -> Iterator[pb.WriteUploadRequest]:
    for offset in range(start, len(data), chunk_bytes):
        yield chunk(name, offset, data[offset : offset + chunk_bytes])


class Drip:
    """A request stream that the test feeds message by message."""

    def __init__(self) -> None:
        self._queue: queue.Queue[pb.WriteUploadRequest | None] = queue.Queue()

    def send(self, request: pb.WriteUploadRequest) -> None:
        self._queue.put(request)

    def end(self) -> None:
        self._queue.put(None)

    def __iter__(self) -> Iterator[pb.WriteUploadRequest]:
        return iter(self._queue.get, None)


def wait_until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
