"""Create, list, cancel and retry: what an owner sees of conversions."""

from __future__ import annotations

import pytest

from modelpress.errors import AlreadyExists, Conflict, FailedPrecondition, NotFound
from modelpress.requests import Limits
from service.failures import Failure, FailureKind
from service.state.conversions import Filter
from service.state.states import State

EVERYTHING = Filter()
BROKEN = Failure(FailureKind.INTERNAL, "BROKEN", "It broke.")


def test_the_same_request_id_with_the_same_body_gives_the_same_conversion(conversions, new):
    first = conversions.create(new(request_id="r-1", seed=3))
    assert conversions.create(new(request_id="r-1", seed=3)) == first
    assert len(conversions.page("default", only=EVERYTHING, after=None, limit=9)) == 1


def test_the_same_request_id_with_another_body_is_refused_naming_the_conversion(conversions, new):
    first = conversions.create(new(request_id="r-1", seed=3))
    with pytest.raises(AlreadyExists, match="'r-1' was used for another request") as caught:
        conversions.create(new(request_id="r-1", seed=4))
    assert (caught.value.field, caught.value.metadata) == ("request_id", {"conversion": f"conversions/{first.id}"})


def test_another_tenant_may_use_the_same_request_id_and_sees_nothing_of_the_first(conversions, new):
    mine, theirs = conversions.create(new(request_id="r")), conversions.create(new(request_id="r", tenant="other"))
    assert mine.id != theirs.id
    for call in (conversions.get, conversions.cancel, conversions.retry):
        with pytest.raises(NotFound):
            call("other", mine.id)


def test_without_a_request_id_every_call_makes_a_new_conversion(conversions, new):
    assert conversions.create(new()).id != conversions.create(new()).id


def test_pages_hold_every_conversion_once_newest_first_also_while_new_ones_come(conversions, new):
    made = [conversions.create(new(seed=n)).id for n in range(5)]
    seen, after = [], None
    while page := conversions.page("default", only=EVERYTHING, after=after, limit=2):
        seen += [conversion.id for conversion in page]
        after = (page[-1].created, page[-1].id)
        conversions.create(new(seed=99))
    assert seen == made[::-1]


def test_conversions_created_in_the_same_instant_are_all_listed(conversions, new, journal):
    journal.clock = lambda: 5.0
    made = {conversions.create(new()).id for _ in range(4)}
    first = conversions.page("default", only=EVERYTHING, after=None, limit=3)
    second = conversions.page("default", only=EVERYTHING, after=(5.0, first[-1].id), limit=3)
    assert (len(first), len(second), {c.id for c in first + second}) == (3, 1, made)


def test_filters_hold_together(conversions, new, leases):
    labels = {"project": "guard", "owner": "ada"}
    both = conversions.create(new(labels=labels))
    one = conversions.create(new(labels={"project": "guard"}))

    def ids(only):
        return {c.id for c in conversions.page("default", only=only, after=None, limit=9)}

    assert ids(Filter(labels={"project": "guard"})) == {both.id, one.id}
    assert ids(Filter(labels=labels)) == {both.id}
    leases.claim()
    assert ids(Filter(states=(State.RUNNING,), labels={"project": "guard"})) == {both.id}
    assert ids(Filter(states=(State.QUEUED, State.RUNNING))) == {both.id, one.id}


def test_a_queued_conversion_is_cancelled_at_once_and_cancelling_again_changes_nothing(conversions, queued):
    cancelled = conversions.cancel("default", queued.id)
    assert (cancelled.state, cancelled.ended is not None) == (State.CANCELLED, True)
    assert conversions.cancel("default", queued.id) == cancelled


def test_a_running_conversion_is_cancelling_until_its_worker_has_stopped(conversions, queued, leases):
    lease, _ = leases.claim()
    assert conversions.cancel("default", queued.id).state is State.CANCELLING
    leases.cancelled(lease)
    assert conversions.get("default", queued.id).state is State.CANCELLED


def test_what_has_ended_cannot_be_cancelled_and_what_has_not_cannot_be_retried(conversions, queued, leases):
    with pytest.raises(FailedPrecondition, match="is QUEUED: only a FAILED or CANCELLED one"):
        conversions.retry("default", queued.id)
    lease, _ = leases.claim()
    leases.fail(lease, BROKEN)
    with pytest.raises(FailedPrecondition, match="has FAILED already"):
        conversions.cancel("default", queued.id)


def test_a_retry_queues_a_failed_conversion_as_new(conversions, new, leases, clock):
    made = conversions.create(new(limits=Limits(queue_timeout_s=60.0)))
    lease, _ = leases.claim()
    leases.renew(lease, run_seconds=12.0)
    leases.fail(lease, BROKEN)
    clock.now += 1000
    again = conversions.retry("default", made.id)
    assert (again.state, again.failure, again.ended, again.run_seconds) == (State.QUEUED, None, None, 0.0)
    assert leases.fail_overdue() == 0
    _, claimed = leases.claim()
    assert (claimed.id, claimed.attempt) == (made.id, 2)


def test_an_old_etag_is_refused(conversions, queued, leases):
    leases.claim()
    with pytest.raises(Conflict, match="etag"):
        conversions.cancel("default", queued.id, etag=queued.etag)
    present = conversions.get("default", queued.id)
    assert conversions.cancel("default", queued.id, etag=present.etag).etag != present.etag
