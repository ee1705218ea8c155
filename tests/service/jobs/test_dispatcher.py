"""The dispatcher with real worker processes: what becomes of a conversion, whatever happens to it."""

from __future__ import annotations

import signal
import time

import pytest

from modelpress.reports import Verdict
from modelpress.requests import Limits
from service.state.states import State
from tests.service.jobs.workshop import publish_text, step

AN_HOUR_S = 3600
"""Longer than any test may take: what ends before it was ended."""


def two_steps(desk):
    first = desk.run(step("first", "write", text="a"))
    second = desk.run(step("second", "write", {"model": first.digest}, text="b"))
    return publish_text(desk, str(second.digest))


def one(operation, **arguments):
    def pipeline(desk):
        desk.run(step("first", operation, **arguments))
        return publish_text(desk, "done")

    return pipeline


def test_a_conversion_runs_to_its_verdict_and_tells_every_step(workshop, new):
    shop = workshop(two_steps)
    done = shop.wait(shop.conversions.create(new()))
    assert (done.state, done.verdict, done.attempt) == (State.SUCCEEDED, Verdict.APPROVED, 1)
    kinds = [kind for kind, _ in shop.told(done)]
    steps = ["step_started", "step_finished"] * 2
    assert kinds == ["state_changed", "state_changed", *steps, "state_changed"]
    assert [e.sequence for e in shop.events(done)] == list(range(1, 8))
    assert done.last_sequence == 7
    started = [body for kind, body in shop.told(done) if kind == "step_started"]
    assert started[1] == {"step": "second", "step_index": 2, "step_count": 3}


def test_evidence_is_stored_and_named_in_the_record(workshop, new):
    seen = []
    shop = workshop(lambda desk: seen.append(desk.run(step("first", "write"))) or publish_text(desk, "x"))
    shop.wait(shop.conversions.create(new()))
    (result,) = seen
    (proof,) = shop.store.manifest(type(result.digest)(result.record["evidence"])).files
    assert (proof.path, shop.store.read_bytes(proof.digest)) == ("proof.txt", b"proof of first")


def test_what_streams_reads_and_writes_the_store_without_a_copy(workshop, new):
    seen = []

    def pipeline(desk):
        first = desk.run(step("first", "write", text="a"))
        seen.extend((first, desk.run(step("second", "stream", {"model": first.digest}, parts=2))))
        return publish_text(desk, "x")

    shop = workshop(pipeline)
    shop.wait(shop.conversions.create(new()))
    first, second = seen
    (result,) = shop.store.manifest(first.digest).files
    data = shop.store.read_bytes(result.digest)
    parts = {entry.path: shop.store.read_bytes(entry.digest) for entry in shop.store.manifest(second.digest).files}
    assert parts == {"part-0": b"0" + data, "part-1": b"1" + data}
    assert second.record == {"kept": 0, "fetched": False}


def test_an_operation_that_writes_into_its_folder_and_into_its_sink_is_our_fault(workshop, new):
    shop = workshop(one("litter"))
    assert shop.wait(shop.conversions.create(new())).failure["kind"] == "INTERNAL"


def test_an_equal_request_is_a_cache_hit_that_names_who_measured(workshop, new):
    shop = workshop(two_steps)
    first = shop.wait(shop.conversions.create(new()))
    second = shop.wait(shop.conversions.create(new()))
    assert (second.output, second.reused_from) == (first.output, first.id)
    finished = [body for kind, body in shop.told(second) if kind == "step_finished"]
    assert [(body["cached"], body["seconds"]) for body in finished] == [(True, 0.0)] * 2


def test_another_tenant_gets_nothing_from_the_cache(workshop, new):
    shop = workshop(two_steps)
    shop.wait(shop.conversions.create(new()))
    other = shop.conversions.create(new(tenant="other"))
    shop.dispatcher.wake()
    deadline = time.monotonic() + 20
    while shop.conversions.get("other", other.id).state is not State.SUCCEEDED:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert shop.conversions.get("other", other.id).reused_from is None


def test_a_cached_result_whose_bytes_are_gone_is_computed_again_and_says_so(workshop, new):
    shop = workshop(two_steps)
    first = shop.wait(shop.conversions.create(new()))
    (body, _) = [body for kind, body in shop.told(first) if kind == "step_finished"]
    (file,) = shop.store.manifest(first.output.__class__(body["digest"])).files
    shop.store.delete(file.digest)
    again = shop.wait(shop.conversions.create(new()))
    warnings = [body["message"] for kind, body in shop.told(again) if kind == "warning"]
    assert again.output == first.output
    assert warnings == ["The kept result of first is no longer in the store: it is computed again."]


def test_a_paired_step_is_measured_anew_unless_everything_was_cached(workshop, new):
    measured = []

    def pipeline(desk):
        desk.run(step("first", "write", text=desk.conversion.request.labels["text"]))
        measured.append(desk.run_paired(step("second", "measure")).record)
        return publish_text(desk, "x")

    shop = workshop(pipeline)
    for text in ("a", "a", "b"):
        shop.wait(shop.conversions.create(new(labels={"text": text})))
    assert measured[0] == measured[1] != measured[2]


def test_an_input_at_fault_fails_with_its_sentence_and_step(workshop, new):
    shop = workshop(one("refuse"))
    failed = shop.wait(shop.conversions.create(new()))
    assert failed.failure == {
        "kind": "INVALID_INPUT",
        "reason": "INVALID_MODEL",
        "message": "tensor 'w' holds NaN: upload weights that are finite",
        "step": "first",
        "next_action": "Change the input that the message names and create a new conversion.",
    }


def test_our_own_fault_has_an_opaque_id_and_no_detail(workshop, new):
    shop = workshop(one("stumble"))
    failure = shop.wait(shop.conversions.create(new())).failure
    assert (failure["kind"], failure["step"]) == ("INTERNAL", "first")
    assert "secret" not in failure["message"] and "/srv" not in failure["message"]


def test_a_fault_of_the_pipeline_itself_fails_the_conversion_and_not_the_server(workshop, new):
    shop = workshop(lambda desk: 1 / 0)
    assert shop.wait(shop.conversions.create(new())).failure["kind"] == "INTERNAL"
    shop.pipeline = two_steps
    assert shop.wait(shop.conversions.create(new())).state is State.SUCCEEDED


@pytest.mark.parametrize(
    ("operation", "arguments", "cause"),
    [
        ("crash", {"signal": signal.SIGSEGV}, "was killed by signal 11 (SIGSEGV)"),
        ("leave", {}, "exited with code 3"),
    ],
)
def test_a_crashing_worker_is_retried_a_few_times_then_fails_with_its_cause(workshop, new, operation, arguments, cause):
    shop = workshop(one(operation, **arguments))
    failed = shop.wait(shop.conversions.create(new()))
    warnings = [body["message"] for kind, body in shop.told(failed) if kind == "warning"]
    assert (failed.attempt, len(warnings)) == (3, 2)
    assert all(cause in text for text in (*warnings, failed.failure["message"]))
    assert failed.failure["message"].endswith("3 times in a row")
    assert (failed.failure["kind"], failed.failure["reason"]) == ("INTERNAL", "WORKER_DIED")
    assert shop.leftovers() == []


def test_a_killed_worker_resumes_at_its_last_checkpoint_and_finished_steps_are_kept(workshop, new):
    results = {}

    def pipeline(desk):
        results["measured"] = desk.run(step("first", "measure")).record
        trained = desk.run(step("second", "train", steps=4, crash_at=2))
        results["started_from"] = trained.record["started_from"]
        return publish_text(desk, str(trained.digest))

    shop = workshop(pipeline)
    done = shop.wait(shop.conversions.create(new()))
    assert (done.state, done.attempt, results["started_from"]) == (State.SUCCEEDED, 2, 2)
    finished = [body["step"] for kind, body in shop.told(done) if kind == "step_finished"]
    assert finished == ["first", "second"]
    assert not (shop.data / "store" / "checkpoints" / done.id).exists()


@pytest.mark.parametrize("operation", ["allocate", "blame"])
def test_memory_beyond_the_limit_fails_naming_limit_and_cure(workshop, new, operation):
    shop = workshop(one(operation, megabytes=3000))
    limit = 700 << 20
    failed = shop.wait(shop.conversions.create(new(limits=Limits(memory_limit_bytes=limit))))
    assert (failed.failure["kind"], failed.attempt) == ("OUT_OF_MEMORY", 1)
    assert f"limits.memory_limit_bytes ({limit} bytes" in failed.failure["message"]
    assert "raise the limit" in failed.failure["message"]
    assert "window" in failed.failure["message"]


def test_memory_within_the_limit_is_given(workshop, new):
    shop = workshop(one("allocate", megabytes=100))
    made = shop.conversions.create(new(limits=Limits(memory_limit_bytes=700 << 20)))
    assert shop.wait(made).state is State.SUCCEEDED


@pytest.mark.parametrize("deaf", [False, True])
def test_cancel_ends_a_running_step_long_before_it_would_end(workshop, new, deaf):
    shop = workshop(one("wait", seconds=AN_HOUR_S, deaf=deaf))
    made = shop.conversions.create(new())
    shop.dispatcher.wake()
    shop.wait_for_event(made, "progress")
    shop.conversions.cancel("default", made.id)
    cancelled = shop.wait(made, State.CANCELLED)
    states = [body["state"] for kind, body in shop.told(cancelled) if kind == "state_changed"]
    assert states == ["QUEUED", "RUNNING", "CANCELLING", "CANCELLED"]


def test_cancel_is_heeded_while_the_pipeline_itself_is_busy(workshop, new):
    shop = workshop(lambda desk: time.sleep(3) or publish_text(desk, "late"))
    made = shop.conversions.create(new())
    shop.wait(made, State.RUNNING)
    shop.conversions.cancel("default", made.id)
    assert shop.wait(made, State.CANCELLED).output is None
    assert shop.dispatcher.running == 1


@pytest.mark.parametrize("operation", ["measure", "refuse", "leave"])
def test_a_cancel_in_the_last_moment_wins_over_every_other_outcome(workshop, new, operation):
    def pipeline(desk):
        shop.conversions.cancel("default", desk.conversion.id)
        return one(operation)(desk)

    shop = workshop(pipeline)
    cancelled = shop.wait(shop.conversions.create(new()))
    assert (cancelled.state, cancelled.output, cancelled.attempt) == (State.CANCELLED, None, 1)


def test_a_cancelled_conversion_keeps_its_checkpoint_for_a_retry(workshop, new):
    results = []

    def pipeline(desk):
        results.append(desk.run(step("first", "train", steps=40)).record["started_from"])
        return publish_text(desk, "x")

    shop = workshop(pipeline)
    made = shop.conversions.create(new())
    shop.dispatcher.wake()
    shop.wait_for_event(made, "progress")
    shop.conversions.cancel("default", made.id)
    shop.wait(made, State.CANCELLED)
    shop.conversions.retry("default", made.id)
    assert shop.wait(made, State.SUCCEEDED).attempt == 2
    assert results[-1] > 0


def test_what_runs_longer_than_its_run_timeout_fails_and_names_it(workshop, new):
    shop = workshop(one("wait", seconds=60))
    failed = shop.wait(shop.conversions.create(new(limits=Limits(run_timeout_s=0.5))))
    assert (failed.failure["kind"], failed.failure["step"]) == ("TIMED_OUT_RUNNING", "first")
    assert "limits.run_timeout (0.5 s)" in failed.failure["message"]


def test_what_waits_longer_than_its_queue_timeout_fails(workshop, new):
    shop = workshop(one("wait", seconds=60), slots=1)
    shop.wait(shop.conversions.create(new(priority=1)), State.RUNNING)
    late = shop.wait(shop.conversions.create(new(limits=Limits(queue_timeout_s=0.3))))
    assert late.failure["kind"] == "TIMED_OUT_IN_QUEUE"


def test_as_many_run_at_once_as_there_are_slots(workshop, new):
    shop = workshop(one("wait", seconds=60), slots=2)
    made = [shop.conversions.create(new()) for _ in range(3)]
    for conversion in made[:2]:
        shop.wait(conversion, State.RUNNING)
    time.sleep(0.5)
    assert shop.conversions.get("default", made[2].id).state is State.QUEUED
    shop.conversions.cancel("default", made[0].id)
    shop.wait(made[2], State.RUNNING)


def test_a_drained_server_queues_what_ran_and_the_next_one_finishes_it(workshop, new):
    runs = []

    def pipeline(desk):
        runs.append(desk.run(step("first", "measure")).record)
        desk.run(step("second", "wait", seconds=60 if len(runs) == 1 else 0))
        return publish_text(desk, "x")

    shop = workshop(pipeline)
    made = shop.conversions.create(new())
    shop.dispatcher.wake()
    shop.wait_for_event(made, "progress")
    shop.close()
    shop = workshop(pipeline)
    done = shop.wait(made)
    assert (done.state, done.attempt, runs[0] == runs[1]) == (State.SUCCEEDED, 2, True)
    warnings = [body["message"] for kind, body in shop.told(done) if kind == "warning"]
    assert warnings == ["The server is stopping; it goes on when one is there again."]


def test_the_worker_sees_a_session_and_folder_of_its_own_and_no_secret(workshop, new, monkeypatch):
    seen = {}
    shop = workshop(lambda desk: seen.update(desk.run(step("first", "look")).record) or publish_text(desk, "x"))
    done = shop.wait(shop.conversions.create(new()))
    assert seen["session"] and seen["group"]
    assert seen["folder"].endswith(f"workers/{done.id}-1")
    assert [name for name in seen["environment"] if name.startswith("MODELPRESS_")] == []
    assert shop.leftovers() == []
