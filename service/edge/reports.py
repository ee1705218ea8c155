"""The Reports servicer: the evidence of finished conversions, read from their signed output."""

# ruff: noqa: N802 - the methods' names are the wire's

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelpress.digests import Digest
from modelpress.errors import FailedPrecondition, InternalError, InvalidRequest, OverLimit
from modelpress.output import REPORT, REPORT_PAGE
from modelpress.reports import GateResult, Outcome, Report, Verdict
from modelpress.v1 import reports_pb2 as pb
from modelpress.v1 import reports_pb2_grpc as rpc
from service.edge.context import Context
from service.edge.names import resource_id
from service.identity import current_caller
from service.state.conversions import Conversion, Conversions
from service.state.states import State
from service.storage.store import ContentStore
from service.threads import Threads

MAX_DOCUMENT_BYTES = 3 << 20
"""A larger document does not fit into one message of 4 MiB."""

VERDICTS: Mapping[Verdict, Any] = {
    Verdict.APPROVED: pb.VERDICT_APPROVED,
    Verdict.REJECTED: pb.VERDICT_REJECTED,
    Verdict.INCONCLUSIVE: pb.VERDICT_INCONCLUSIVE,
}
_OUTCOMES: Mapping[Outcome, Any] = {
    Outcome.PASSED: pb.GATE_OUTCOME_PASSED,
    Outcome.FAILED: pb.GATE_OUTCOME_FAILED,
    Outcome.INCONCLUSIVE: pb.GATE_OUTCOME_INCONCLUSIVE,
}


class ReportsServicer(rpc.ReportsServicer):
    def __init__(self, conversions: Conversions, store: ContentStore, threads: Threads) -> None:
        self._conversions = conversions
        self._store = store
        self._threads = threads

    async def GetReport(self, request: pb.GetReportRequest, context: Context) -> pb.Report:
        identifier = _conversion_id(request.name)
        return await self._threads.run(self._report, current_caller().tenant, identifier, request.view)

    def _report(self, tenant: str, identifier: str, view: int) -> pb.Report:
        conversion = self._conversions.get(tenant, identifier)
        document = self._document(conversion, REPORT)
        report = Report.model_validate_json(document)
        message = pb.Report(
            name=f"conversions/{identifier}/report",
            verdict=VERDICTS[report.decision.verdict],
            gates=[_gate(gate) for gate in report.decision.gates],
        )
        if view == pb.REPORT_VIEW_JSON:
            message.json = _sendable(document)
        if view == pb.REPORT_VIEW_HTML:
            message.html = _sendable(self._document(conversion, REPORT_PAGE))
        return message

    def _document(self, conversion: Conversion, path: str) -> bytes:
        entry = self._store.manifest(_output(conversion)).entry(path)
        if entry is None:
            raise InternalError(f"the output of conversion {conversion.id} has no {path}")
        return self._store.read_bytes(entry.digest)


def _conversion_id(name: str) -> str:
    parent, slash, last = name.rpartition("/")
    if last != "report" or not slash:
        raise InvalidRequest(f"name {name[:120]!r} is not 'conversions/<id>/report'", field="name")
    return resource_id(parent, "conversions")


def _output(conversion: Conversion) -> Digest:
    if conversion.state is not State.SUCCEEDED or conversion.output is None:
        raise FailedPrecondition(
            f"the conversion is {conversion.state.value}: it has a report once it is SUCCEEDED",
            reason="NO_REPORT_YET",
            metadata={"state": conversion.state.value},
        )
    return conversion.output


def _sendable(document: bytes) -> bytes:
    if len(document) > MAX_DOCUMENT_BYTES:
        raise OverLimit(
            f"the document has {len(document)} bytes: more than {MAX_DOCUMENT_BYTES} do not fit into one message, "
            "download it from the conversion's output",
            reason="DOCUMENT_TOO_LARGE",
        )
    return document


def _gate(gate: GateResult) -> pb.Gate:
    message = pb.Gate(
        name=gate.name,
        outcome=_OUTCOMES[gate.outcome],
        figure=gate.figure,
        bound=gate.bound,
        comparison=gate.comparison,
        unit=gate.unit,
        sentence=gate.sentence,
        examples_needed=gate.examples_needed,
    )
    if gate.interval:
        message.interval_low, message.interval_high = gate.interval.low, gate.interval.high
        message.confidence = gate.interval.confidence
    return message
