"""Only what is safe is repeated, with growing pauses and for a bounded time."""

import grpc
import pytest

from modelpress.retries import RETRYABLE, RetryPolicy
from modelpress.v1 import artifacts_pb2, capabilities_pb2, conversions_pb2, reports_pb2

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


class Clock:
    """Time that passes only in sleep."""

    def __init__(self):
        self.now, self.pauses = 100.0, []

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def policy(clock):
    return RetryPolicy(first_delay_s=1.0, max_delay_s=8.0, sleep=clock.sleep, clock=lambda: clock.now)


def wire_methods():
    for module in (artifacts_pb2, capabilities_pb2, conversions_pb2, reports_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            yield from (method.name for method in service.methods)


def test_every_method_of_the_wire_has_a_row():
    assert sorted(wire_methods()) == sorted(RETRYABLE)


def test_what_the_caller_must_decide_is_never_repeated():
    assert not RETRYABLE["CancelConversion"]
    assert not RETRYABLE["RetryConversion"]
    assert not RETRYABLE["AbortUpload"]


def test_only_lost_calls_and_a_busy_upload_are_repeated():
    lost = {UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
    assert RETRYABLE["WriteUpload"] == lost | {grpc.StatusCode.ABORTED}
    assert all(codes <= lost for method, codes in RETRYABLE.items() if method != "WriteUpload")


def test_a_code_that_is_not_in_the_row_ends_it_without_a_pause(policy, clock):
    assert not policy.patience(60.0).allows("GetConversion", grpc.StatusCode.NOT_FOUND)
    assert clock.pauses == []


def test_pauses_grow_to_the_bound_and_end_in_time(policy, clock):
    patience = policy.patience(60.0)
    while patience.allows("GetConversion", UNAVAILABLE):
        pass
    bounds = [1.0, 2.0, 4.0, *[8.0] * len(clock.pauses)]
    assert all(bound / 2 <= pause <= bound for pause, bound in zip(clock.pauses, bounds, strict=False))
    assert 60.0 - 8.0 <= clock.now - 100.0 <= 60.0


def test_what_arrives_renews_the_patience(policy, clock):
    patience = policy.patience(10.0)
    for _ in range(20):
        assert patience.allows("WatchConversion", UNAVAILABLE)
        patience.renew()
    assert max(clock.pauses) <= 1.0
