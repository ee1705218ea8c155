"""The client: what a training pipeline calls.

    with modelpress.Client("127.0.0.1:8471") as client:
        base = client.upload_folder(Path("model"), ArtifactKind.MODEL)
        test = client.upload_folder(Path("test"), ArtifactKind.DATASET)
        documents = Documents(recipe=Path("recipe.yaml").read_text(), policy=Path("policy.yaml").read_text())
        conversion = client.create_conversion(ConversionRequest(documents, base=base, evaluation=test))
        done = client.wait(conversion.name)
        if done.verdict is Verdict.APPROVED:
            client.download(done.output, Path("approved"))

Every method raises `modelpress.errors` only. What is safe to repeat is repeated (`modelpress.retries`).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

from modelpress import wire
from modelpress.connection import DEFAULT_ADDRESS, Connection, Endpoint
from modelpress.downloads import download_files
from modelpress.errors import InvalidRequest
from modelpress.manifests import ArtifactKind, scan_folder
from modelpress.reports import Verdict
from modelpress.requests import ARTIFACT_NAME, CONVERSION_NAME, ConversionRequest
from modelpress.retries import RetryPolicy
from modelpress.transfers import Meter, upload_blob
from modelpress.v1 import artifacts_pb2, capabilities_pb2, conversions_pb2, reports_pb2
from modelpress.views import (
    Artifact,
    Conversion,
    ConversionState,
    Estimate,
    Event,
    ReportSummary,
    ServerCapabilities,
    TransferProgress,
)
from modelpress.watching import watch_events

PAGE_SIZE = 100


def _show_nothing(_: TransferProgress) -> None:
    """The default of `show`: nobody looks."""


class Client:
    """One server, one identity. Use it as a context manager, or call `close`. Safe to use from several threads."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        token: str | None = None,
        tls_ca: Path | None = None,
        retry_policy: RetryPolicy | None = None,
    ) -> None:
        """`address` is HOST:PORT, or https://HOST:PORT for TLS with the system's CAs; `tls_ca` is a CA file (PEM).

        Nothing is sent before the first call.
        """
        self._connection = Connection(Endpoint(address, token, tls_ca), retry_policy or RetryPolicy())

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def upload_folder(
        self, folder: Path, kind: ArtifactKind, *, show: Callable[[TransferProgress], None] = _show_nothing
    ) -> str:
        """Name every file below `folder` as an artifact, and return the name. Only missing bytes are sent."""
        manifest = scan_folder(folder)
        files = {str(entry.digest): entry for entry in manifest.files}
        found: artifacts_pb2.FindMissingResponse = self._connection.call(
            "FindMissing", artifacts_pb2.FindMissingRequest(digests=files)
        )
        missing = [files[digest] for digest in found.missing_digests]
        meter = Meter(sum(entry.size_bytes for entry in missing), show)
        for entry in missing:
            upload_blob(self._connection, folder / entry.path, entry, meter)
        request = artifacts_pb2.CreateArtifactRequest(
            kind=wire.kind_to_wire(kind), manifest=wire.manifest_to_wire(manifest)
        )
        artifact: artifacts_pb2.Artifact = self._connection.call("CreateArtifact", request)
        return artifact.name

    def get_artifact(self, name: str) -> Artifact:
        """An artifact with its manifest, whose digest is checked against the name."""
        request = artifacts_pb2.GetArtifactRequest(name=_artifact_name(name))
        return wire.artifact_from_wire(self._connection.call("GetArtifact", request), name=name)

    def download(self, output: str, folder: Path, *, show: Callable[[TransferProgress], None] = _show_nothing) -> None:
        """Make `folder` hold exactly the files of the artifact `output`, every digest checked; resumes after a cut."""
        download_files(self._connection, self.get_artifact(output).manifest, folder, show)

    def create_conversion(self, request: ConversionRequest, *, request_id: str | None = None) -> Conversion:
        """Queue a conversion. The same `request_id` with the same request gives the same conversion again."""
        message = wire.request_to_wire(request)
        message.request_id = request_id or str(uuid.uuid4())
        return wire.conversion_from_wire(self._connection.call("CreateConversion", message))

    def estimate(self, request: ConversionRequest) -> Estimate:
        """Check a request against the server and its artifacts, and say what it would take. Queues nothing."""
        message = wire.request_to_wire(request)
        message.validate_only = True
        answer: conversions_pb2.Conversion = self._connection.call("CreateConversion", message)
        return wire.estimate_from_wire(answer.estimate)

    def get(self, name: str) -> Conversion:
        request = conversions_pb2.GetConversionRequest(name=conversion_name(name))
        return wire.conversion_from_wire(self._connection.call("GetConversion", request))

    def list(
        self,
        *,
        states: tuple[ConversionState, ...] = (),
        verdicts: tuple[Verdict, ...] = (),
        labels: Mapping[str, str] | None = None,
    ) -> Iterator[Conversion]:
        """Conversions, newest first, fetched page by page as they are read. Empty filters: all."""
        request = conversions_pb2.ListConversionsRequest(
            page_size=PAGE_SIZE,
            states=[wire.state_to_wire(state) for state in states],
            verdicts=[wire.verdict_to_wire(verdict) for verdict in verdicts],
            labels=labels or {},
        )
        while True:
            page: conversions_pb2.ListConversionsResponse = self._connection.call("ListConversions", request)
            yield from map(wire.conversion_from_wire, page.conversions)
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def watch(self, name: str, *, after: int = 0, timeout_s: float | None = None) -> Iterator[Event]:
        """Events with a sequence number greater than `after`, until the final one; survives a restart of the server.

        Raises Unavailable (reason WAIT_TIMED_OUT) where `timeout_s` pass before that.
        """
        return watch_events(self._connection, conversion_name(name), after=after, timeout_s=timeout_s)

    def wait(self, name: str, *, timeout_s: float | None = None) -> Conversion:
        """The conversion once it has ended. Raises as `watch` does."""
        for _ in self.watch(name, after=self.get(name).last_sequence, timeout_s=timeout_s):
            pass
        return self.get(name)

    def cancel(self, name: str, *, etag: str = "") -> Conversion:
        """Ask a conversion to stop; with `etag`, only if it is unchanged. Not repeated: read it again, then decide."""
        request = conversions_pb2.CancelConversionRequest(name=conversion_name(name), etag=etag)
        return wire.conversion_from_wire(self._connection.call("CancelConversion", request))

    def retry(self, name: str, *, etag: str = "") -> Conversion:
        """Queue a failed or cancelled conversion again; it resumes at its last finished step. Not repeated."""
        request = conversions_pb2.RetryConversionRequest(name=conversion_name(name), etag=etag)
        return wire.conversion_from_wire(self._connection.call("RetryConversion", request))

    def report(self, name: str) -> ReportSummary:
        """The verdict and the gates of a conversion that has SUCCEEDED."""
        return wire.report_from_wire(self._get_report(name, reports_pb2.REPORT_VIEW_SUMMARY))

    def report_json(self, name: str) -> bytes:
        """report.json as signed."""
        return self._get_report(name, reports_pb2.REPORT_VIEW_JSON).json

    def report_html(self, name: str) -> bytes:
        """report.html as signed."""
        return self._get_report(name, reports_pb2.REPORT_VIEW_HTML).html

    def _get_report(self, name: str, view: reports_pb2.ReportView.ValueType) -> reports_pb2.Report:
        request = reports_pb2.GetReportRequest(name=f"{conversion_name(name)}/report", view=view)
        answer: reports_pb2.Report = self._connection.call("GetReport", request)
        return answer

    def capabilities(self) -> ServerCapabilities:
        request = capabilities_pb2.GetCapabilitiesRequest()
        return wire.capabilities_from_wire(self._connection.call("GetCapabilities", request))


def conversion_name(name: str) -> str:
    """`conversions/<id>` from that or from the bare id."""
    full = name if name.startswith("conversions/") else f"conversions/{name}"
    if not CONVERSION_NAME.fullmatch(full):
        raise InvalidRequest(f"{name[:90]!r} is not a conversion's name: write conversions/<id>", field="name")
    return full


def _artifact_name(name: str) -> str:
    if not ARTIFACT_NAME.fullmatch(name):
        raise InvalidRequest(f"{name[:90]!r} is not an artifact's name: write artifacts/sha256:<hex>", field="name")
    return name
