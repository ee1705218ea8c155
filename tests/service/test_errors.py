"""Every error of ours has its status; nothing of ours that is not meant for callers reaches them."""

import errno
import logging

import grpc
import pytest
from google.rpc import error_details_pb2

from modelpress import errors
from modelpress.errors import ModelpressError
from service.edge.errors import STATUS, code_of, to_modelpress_error, to_status
from service.state.states import LostLease
from service.workers.station import Stopped

CODE = grpc.StatusCode


def tree() -> list[type[ModelpressError]]:
    found = [value for value in vars(errors).values() if isinstance(value, type)]
    return [kind for kind in found if issubclass(kind, ModelpressError)]


def test_every_error_type_is_in_the_table() -> None:
    assert set(tree()) == set(STATUS)


def test_a_subclass_made_elsewhere_has_its_parents_status() -> None:
    for error, code in ((LostLease("too late"), CODE.ABORTED), (Stopped("x"), CODE.CANCELLED)):
        assert code_of(error) is code
        assert to_status(error).code == code.value[0]


def test_reason_metadata_and_field_reach_the_wire() -> None:
    error = errors.InvalidRequest("x is 3: use 4", reason="BAD_X", field="a.x", metadata={"expected": "4"})
    status = to_status(error)
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info) and status.details[1].Unpack(bad)
    assert (status.code, status.message) == (3, "x is 3: use 4")
    assert (info.reason, info.domain, dict(info.metadata)) == ("BAD_X", "modelpress", {"expected": "4"})
    assert [(v.field, v.description) for v in bad.field_violations] == [("a.x", "x is 3: use 4")]


@pytest.mark.parametrize("fault", [RuntimeError("/srv/secret"), OSError(errno.EIO, "x", "/srv/secret"), KeyError("k")])
def test_any_other_exception_is_internal_with_an_id_that_only_the_log_explains(
    fault: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        error = to_modelpress_error(fault, "/x/Y")
    assert code_of(error) is CODE.INTERNAL
    assert "secret" not in error.message and error.metadata["error_id"] in error.message
    assert caplog.records[0].fields["error_id"] == error.metadata["error_id"]  # type: ignore[attr-defined]
    assert caplog.records[0].exc_info is not None


def test_a_message_of_an_internal_error_stays_inside(caplog: pytest.LogCaptureFixture) -> None:
    assert "secret" not in to_modelpress_error(errors.InternalError("secret"), "/x/Y").message


def test_a_full_disk_is_over_limit_whoever_notices_it() -> None:
    for fault in (OSError(errno.ENOSPC, "x"), RuntimeError("(sqlite3.OperationalError) database or disk is full")):
        assert code_of(to_modelpress_error(fault, "/x/Y")) is CODE.RESOURCE_EXHAUSTED


def test_the_trailer_stays_below_what_clients_take() -> None:
    digests = [f"sha256:{number:064x}" for number in range(10_000)]
    for error in (errors.MissingBlobs(digests), errors.InvalidRequest("y" * 100_000, field="x")):
        assert to_status(error).ByteSize() < 6000
