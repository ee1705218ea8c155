"""GetReport: only finished conversions of the caller's tenant have one, and it is what was signed, byte for byte."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from sqlalchemy import insert

from modelpress.reports import Report
from modelpress.v1 import reports_pb2 as pb
from service.state.engine import open_database
from service.state.tables import conversions
from service.storage.store import ContentStore
from tests.evidence.samples import Case, sample_report

PAGE = b"<!doctype html><title>report</title>"


def row(identifier: str, **changes: Any) -> dict[str, Any]:
    """A queued conversion as the database has it, changed."""
    values = {column.name: None if column.nullable else 0 for column in conversions.columns}
    texts = {"id": identifier, "tenant": "default", "requested_by": "local", "request": {}, "state": "QUEUED"}
    return values | texts | {"request_id": identifier, "request_digest": "sha256:" + "0" * 64} | changes


@pytest.fixture
def finished(start_server: Any, call: Any, tmp_path: Path) -> Iterator[tuple[Any, Report]]:
    """A server with one finished conversion, one queued one, and one of another tenant."""
    store = ContentStore(str(tmp_path / "data" / "store"), scratch=tmp_path)
    report = sample_report(Case(), store.put_bytes(b"model"))
    output = tmp_path / "output"
    output.mkdir()
    (output / "report.json").write_text(report.model_dump_json())
    (output / "report.html").write_bytes(PAGE)
    digest = str(store.put_folder(output).digest)
    done = {"state": "SUCCEEDED", "verdict": report.decision.verdict.value, "output": digest}
    engine = open_database(f"sqlite:///{tmp_path / 'data' / 'modelpress.sqlite'}")
    with engine.begin() as connection:
        connection.execute(insert(conversions), [row("d0" * 16, **done), row("0a" * 16)])
        connection.execute(insert(conversions), [row("e0" * 16, tenant="other", **done)])
    engine.dispose()
    yield call(start_server(tmp_path / "data")), report


def get(wire: Any, name: str, view: int = pb.REPORT_VIEW_SUMMARY) -> pb.Report:
    return wire.reports.GetReport(pb.GetReportRequest(name=name, view=view))


def test_the_report_is_the_verdict_its_gates_and_the_signed_documents(finished: Any) -> None:
    wire, report = finished
    name = f"conversions/{'d0' * 16}/report"
    summary = get(wire, name)
    assert (summary.name, summary.json, summary.html) == (name, b"", b"")
    assert pb.Verdict.Name(summary.verdict) == f"VERDICT_{report.decision.verdict.value}"
    assert [(gate.name, gate.sentence) for gate in summary.gates] == [
        (gate.name, gate.sentence) for gate in report.decision.gates
    ]
    for sent, gate in zip(summary.gates, report.decision.gates, strict=True):
        assert pb.GateOutcome.Name(sent.outcome) == f"GATE_OUTCOME_{gate.outcome.value}"
        assert (sent.figure, sent.bound, sent.unit) == (gate.figure, gate.bound, gate.unit)
        assert sent.HasField("interval_low") == (gate.interval is not None)
        assert sent.HasField("examples_needed") == (gate.examples_needed is not None)
    assert get(wire, name, pb.REPORT_VIEW_JSON).json.decode() == report.model_dump_json()
    assert get(wire, name, pb.REPORT_VIEW_HTML).html == PAGE
    waiting = wire.refused(lambda: get(wire, f"conversions/{'0a' * 16}/report"))
    assert (waiting.code, waiting.metadata) == (grpc.StatusCode.FAILED_PRECONDITION, {"state": "QUEUED"})
    for name in (f"conversions/{'e0' * 16}/report", f"conversions/{'ff' * 16}/report"):
        assert wire.refused(lambda name=name: get(wire, name)).code == grpc.StatusCode.NOT_FOUND
    for name in (f"conversions/{'d0' * 16}", "report", ""):
        assert wire.refused(lambda name=name: get(wire, name)).code == grpc.StatusCode.INVALID_ARGUMENT
