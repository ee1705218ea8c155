"""Whose fault a failure is."""

from __future__ import annotations

import pytest

from modelpress import errors
from modelpress.v1 import conversions_pb2 as pb
from service.desk import ERRORS
from service.failures import NEXT_ACTION, FailureKind, OutOfMemory, failure_of


def test_every_kind_is_on_the_wire_and_says_what_to_do_next():
    on_the_wire = {name.removeprefix("FAILURE_KIND_") for name, _ in pb.FailureKind.items()} - {"UNSPECIFIED"}
    assert {kind.value for kind in FailureKind} == on_the_wire
    assert set(NEXT_ACTION) == set(FailureKind)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.InvalidModel("x"), "INVALID_INPUT"),
        (errors.InvalidDataset("x"), "INVALID_INPUT"),
        (errors.InvalidRecipe("x"), "INVALID_INPUT"),
        (errors.FailedPrecondition("recovery gained nothing"), "INVALID_INPUT"),
        (errors.NotFound("x"), "INVALID_INPUT"),
        (errors.OverLimit("the disk is full"), "NO_CAPACITY"),
        (OutOfMemory(1), "OUT_OF_MEMORY"),
        (errors.DataLoss("x"), "INTERNAL"),
        (errors.Conflict("x"), "INTERNAL"),
    ],
)
def test_an_error_says_whose_fault_it_is(error, kind):
    failure = failure_of(error, step="compress/2-prune")
    assert (failure.kind.value, failure.reason, failure.step) == (kind, error.reason, "compress/2-prune")


def test_an_error_that_a_worker_told_of_keeps_its_type():
    assert all(name == kind.__name__ and issubclass(kind, errors.ModelpressError) for name, kind in ERRORS.items())
