"""Claims, fences and what happens to the conversions of a dead server."""

from __future__ import annotations

import pytest

from modelpress.digests import digest_bytes
from modelpress.manifests import ArtifactKind, FileEntry, Manifest
from modelpress.reports import Verdict
from modelpress.requests import Limits
from service.failures import Failure, FailureKind
from service.state.artifacts import Artifact, ArtifactRepository
from service.state.leases import Lease, Leases, Result
from service.state.states import LostLease, State
from service.state.steps import StepKey, Steps
from service.steps import StepResult

BROKEN = Failure(FailureKind.INTERNAL, "BROKEN", "It broke.")
OUTPUT = Artifact(
    ArtifactKind.REPORT, Manifest((FileEntry("report.json", 2, digest_bytes(b"{}")),)), {}, created=1_000.0
)
STEP = StepKey("compress/1-prune", digest_bytes(b"key"))
MEASURED = StepResult(None, {"accuracy": 0.5}, 1.0, "c")


def kinds(journal, conversion):
    return [(event.sequence, event.kind) for event in journal.events_after(conversion, 0, seen=0)]


def test_the_highest_priority_is_claimed_first_then_the_oldest(conversions, new, leases):
    made = [conversions.create(new(priority=priority)).id for priority in (0, 5, 0, 5)]
    claimed = [leases.claim()[1].id for _ in made]
    assert claimed == [made[1], made[3], made[0], made[2]]
    assert leases.claim() is None


def test_every_claim_has_a_new_fence_and_attempt(conversions, queued, leases):
    first, conversion = leases.claim()
    leases.requeue(first, why="for a test")
    second, again = leases.claim()
    assert (first.fence, conversion.attempt, second.fence, again.attempt) == (1, 1, 2, 2)
    assert again.started == conversion.started


def writes(leases: Leases, steps: Steps, lease: Lease):
    return {
        "renew": lambda: leases.renew(lease, run_seconds=1.0),
        "finish": lambda: leases.finish(lease, Result(OUTPUT, Verdict.APPROVED, None)),
        "fail": lambda: leases.fail(lease, BROKEN),
        "cancelled": lambda: leases.cancelled(lease),
        "requeue": lambda: leases.requeue(lease, why="late"),
        "start": lambda: steps.start(lease, {"step": "x"}),
        "progress": lambda: steps.progress(lease, {"step": "x"}),
        "warn": lambda: steps.warn(lease, "late"),
        "finish step": lambda: steps.finish(lease, STEP, MEASURED),
        "checkpoint": lambda: steps.save_checkpoint(lease, STEP, digest_bytes(b"c")),
    }


@pytest.mark.parametrize("write", list(writes(None, None, None)))
def test_a_server_that_was_taken_over_can_write_nothing(conversions, queued, leases, journal, write):
    stale, _ = leases.claim()
    other = Leases(journal, holder="server-2", lease_s=30.0)
    assert other.release_dead(only_server=True) == 1
    other.claim()
    before, told = conversions.get("default", queued.id), kinds(journal, queued.id)
    with pytest.raises(LostLease):
        writes(leases, Steps(journal), stale)[write]()
    assert (conversions.get("default", queued.id), kinds(journal, queued.id)) == (before, told)
    assert Steps(journal).finished(queued.id, STEP) is None


def given_back(conversions, leases, lease):
    leases.requeue(lease, why="The server is stopping.")


def ended_by_cancel(conversions, leases, lease):
    conversions.cancel("default", lease.conversion)
    leases.cancelled(lease)


def retried_after_cancel(conversions, leases, lease):
    ended_by_cancel(conversions, leases, lease)
    conversions.retry("default", lease.conversion)


def failed(conversions, leases, lease):
    leases.fail(lease, BROKEN)


@pytest.mark.parametrize("write", list(writes(None, None, None)))
@pytest.mark.parametrize("end", [given_back, ended_by_cancel, retried_after_cancel, failed])
def test_an_attempt_whose_lease_has_ended_can_write_nothing(conversions, queued, leases, journal, end, write):
    lease, _ = leases.claim()
    end(conversions, leases, lease)
    before, told = conversions.get("default", queued.id), kinds(journal, queued.id)
    with pytest.raises(LostLease):
        writes(leases, Steps(journal), lease)[write]()
    assert (conversions.get("default", queued.id), kinds(journal, queued.id)) == (before, told)


def test_a_finished_conversion_has_its_verdict_and_its_output_can_be_downloaded(conversions, queued, leases, engine):
    lease, _ = leases.claim()
    leases.finish(lease, Result(OUTPUT, Verdict.REJECTED, None))
    found = conversions.get("default", queued.id)
    assert (found.state, found.verdict, found.output) == (State.SUCCEEDED, Verdict.REJECTED, OUTPUT.manifest.digest)
    assert ArtifactRepository(engine).get("default", found.output).kind is ArtifactKind.REPORT
    assert ArtifactRepository(engine).held("default", [digest_bytes(b"{}")]) == {digest_bytes(b"{}"): 2}


def test_a_result_that_comes_after_cancel_was_asked_is_refused(conversions, queued, leases, engine):
    lease, _ = leases.claim()
    conversions.cancel("default", queued.id)
    with pytest.raises(LostLease):
        leases.finish(lease, Result(OUTPUT, Verdict.APPROVED, None))
    assert conversions.get("default", queued.id).verdict is None
    assert ArtifactRepository(engine).held("default", [digest_bytes(b"{}")]) == {}


def test_a_lease_that_is_renewed_is_never_taken_over_and_one_that_is_not_is(
    conversions, queued, leases, journal, clock
):
    lease, _ = leases.claim()
    other = Leases(journal, holder="server-2", lease_s=30.0)
    for _ in range(3):
        clock.now += 20
        leases.renew(lease, run_seconds=20.0)
        assert other.release_dead(only_server=False) == 0
    clock.now += 31
    assert other.release_dead(only_server=False) == 1
    assert conversions.get("default", queued.id).state is State.QUEUED


def test_a_restarted_server_requeues_what_ran_and_ends_what_was_being_cancelled(conversions, new, leases, journal):
    running, cancelling = conversions.create(new(priority=1)), conversions.create(new())
    leases.claim()
    leases.claim()
    conversions.cancel("default", cancelling.id)
    assert Leases(journal, holder="server-2", lease_s=30.0).release_dead(only_server=True) == 2
    assert conversions.get("default", running.id).state is State.QUEUED
    assert conversions.get("default", cancelling.id).state is State.CANCELLED


def test_a_server_does_not_take_its_own_conversions_for_dead(conversions, queued, leases):
    leases.claim()
    assert leases.release_dead(only_server=True) == 0


def test_what_waited_longer_than_its_queue_timeout_fails_and_says_so(conversions, new, leases, clock):
    made = conversions.create(new(limits=Limits(queue_timeout_s=60.0)))
    conversions.create(new())
    clock.now += 61
    assert leases.fail_overdue() == 1
    failed = conversions.get("default", made.id)
    assert (failed.state, failed.failure["kind"]) == (State.FAILED, "TIMED_OUT_IN_QUEUE")
    assert failed.failure["message"] == "It waited longer than limits.queue_timeout (60 s) for a free worker."
    assert leases.claim()[1].id != made.id


def test_an_overdue_conversion_is_not_claimed_even_before_it_is_failed(conversions, new, leases, clock):
    conversions.create(new(limits=Limits(queue_timeout_s=1.0)))
    clock.now += 2
    assert leases.claim() is None


def test_crashes_are_counted_until_a_step_finishes(conversions, queued, leases, journal):
    for expected in (1, 2):
        lease, _ = leases.claim()
        leases.requeue(lease, why="worker died", crashes=1)
        assert conversions.get("default", queued.id).crashes == expected
    lease, _ = leases.claim()
    Steps(journal).finish(lease, STEP, MEASURED)
    assert conversions.get("default", queued.id).crashes == 0
