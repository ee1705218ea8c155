"""Every error that the service sends arrives as its own type, with reason, field and metadata."""

import grpc
import pytest

from modelpress import errors
from modelpress.wire_errors import BY_REASON, BY_STATUS, DETAILS_KEY, from_rpc_error
from service.edge.errors import to_status

DIGESTS = tuple(f"sha256:{n:064x}" for n in range(3))


class Failed(grpc.RpcError):
    """An error as gRPC's client raises it."""

    def __init__(self, code, details, trailers=()):
        self._code, self._details, self._trailers = code, details, trailers

    def code(self):
        return self._code

    def details(self):
        return self._details

    def trailing_metadata(self):
        return self._trailers


def over_the_wire(error):
    status = to_status(error)
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    trailers = (("other", "x"), (DETAILS_KEY, status.SerializeToString()))
    return from_rpc_error(Failed(code, status.message, trailers), address="h:1")


def every_type(kind=errors.ModelpressError):
    return [kind, *(leaf for child in kind.__subclasses__() for leaf in every_type(child))]


WIRE_TYPES = [kind for kind in every_type() if kind.__module__ == "modelpress.errors"]
PLAIN_TYPES = [kind for kind in WIRE_TYPES if kind not in (errors.ModelpressError, errors.MissingBlobs)]


def test_every_type_has_a_row():
    assert set(BY_REASON.values()) == set(WIRE_TYPES) - {errors.ModelpressError}
    assert {reason: kind.reason for reason, kind in BY_REASON.items()} == {reason: reason for reason in BY_REASON}


def test_every_status_code_has_a_row():
    assert set(BY_STATUS) == set(grpc.StatusCode)


@pytest.mark.parametrize("kind", PLAIN_TYPES, ids=lambda kind: kind.__name__)
def test_type_reason_field_and_metadata_arrive(kind):
    arrived = over_the_wire(kind("field x is 3: use 4", field="inputs.x", metadata={"limit": "4"}))
    assert type(arrived) is kind
    assert (arrived.message, str(arrived)) == ("field x is 3: use 4", "field x is 3: use 4")
    assert (arrived.reason, arrived.field, arrived.metadata) == (kind.reason, "inputs.x", {"limit": "4"})


@pytest.mark.parametrize("kind", PLAIN_TYPES, ids=lambda kind: kind.__name__)
def test_a_finer_reason_keeps_the_type(kind):
    arrived = over_the_wire(kind("no", reason="SOMETHING_FINER"))
    assert (type(arrived), arrived.reason) == (kind, "SOMETHING_FINER")


def test_missing_blobs_arrive_by_name_and_with_the_server_s_sentence():
    arrived = over_the_wire(errors.MissingBlobs(DIGESTS))
    assert isinstance(arrived, errors.MissingBlobs)
    assert arrived.digests == DIGESTS
    assert arrived.message == errors.MissingBlobs(DIGESTS).message


def test_an_unknown_reason_falls_back_to_the_status_code():
    status = to_status(errors.NotFound("gone", reason="NEWER_THAN_THIS_CLIENT"))
    status.details[0].value = status.details[0].value.replace(b"NOT_FOUND", b"NEW_FOUND")
    failed = Failed(grpc.StatusCode.NOT_FOUND, "gone", ((DETAILS_KEY, status.SerializeToString()),))
    assert type(from_rpc_error(failed, address="h:1")) is errors.NotFound


@pytest.mark.parametrize("code", list(grpc.StatusCode), ids=lambda code: code.name)
def test_an_error_without_details_is_one_line_of_the_right_type(code):
    arrived = from_rpc_error(Failed(code, "first\n\tat /srv/internal.py:3"), address="h:1")
    assert type(arrived) is BY_STATUS[code]
    assert "\n" not in arrived.message
    assert "/srv" not in arrived.message


def test_no_server_names_the_address_and_the_cause():
    text = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused"
    arrived = from_rpc_error(Failed(grpc.StatusCode.UNAVAILABLE, text), address="127.0.0.1:1")
    assert arrived.message.startswith("no server answers at 127.0.0.1:1")
    assert arrived.message.count("failed to connect") == 0
    assert "Connection refused" in arrived.message
