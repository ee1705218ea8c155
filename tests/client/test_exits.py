"""Exit codes: every error has one, nothing but OK is 0, and APPROVED is the only verdict that is OK."""

from dataclasses import replace

import pytest

from modelpress import errors, wire
from modelpress.cli.exits import FOR_VERDICT, Exit, Interrupted, of_conversion, of_error
from modelpress.reports import Verdict
from modelpress.v1 import conversions_pb2
from modelpress.views import ConversionState

CONVERSION = wire.conversion_from_wire(conversions_pb2.Conversion(name="conversions/a"))


def leaves(kind):
    return [leaf for child in kind.__subclasses__() for leaf in leaves(child)] or [kind]


@pytest.mark.parametrize("kind", leaves(errors.ModelpressError), ids=lambda kind: kind.__name__)
def test_no_error_exits_0(kind):
    error = kind(["sha256:0"]) if kind is errors.MissingBlobs else kind("sentence")
    assert of_error(error) is not Exit.OK
    assert (of_error(error) is Exit.INTERNAL) == isinstance(error, errors.InternalError)


def test_only_approved_exits_0():
    assert [verdict for verdict in Verdict if FOR_VERDICT[verdict] is Exit.OK] == [Verdict.APPROVED]


@pytest.mark.parametrize(
    ("state", "verdict", "code"),
    [
        (ConversionState.SUCCEEDED, Verdict.APPROVED, Exit.OK),
        (ConversionState.SUCCEEDED, Verdict.REJECTED, Exit.REJECTED),
        (ConversionState.SUCCEEDED, Verdict.INCONCLUSIVE, Exit.INCONCLUSIVE),
        (ConversionState.SUCCEEDED, None, Exit.INTERNAL),
        (ConversionState.FAILED, None, Exit.CONVERSION_FAILED),
        (ConversionState.CANCELLED, None, Exit.CONVERSION_CANCELLED),
        (ConversionState.UNKNOWN, None, Exit.INTERNAL),
    ],
)
def test_how_a_conversion_ended_is_the_code(state, verdict, code):
    assert of_conversion(replace(CONVERSION, state=state, verdict=verdict)) is code


def test_an_interrupt_is_what_shells_expect():
    assert of_error(Interrupted("detached")) == 130
