"""Watching and deciding over lost connections: every event arrives once, and nothing is done twice."""

import itertools
import threading

import pytest

from modelpress.client import Client
from modelpress.errors import AlreadyExists, Conflict, FailedPrecondition, InvalidRequest, NotFound, Unavailable
from modelpress.manifests import ArtifactKind
from modelpress.requests import ConversionRequest, Documents
from modelpress.retries import RetryPolicy
from modelpress.views import ConversionState, StateChanged


@pytest.fixture
def request_for(inputs):
    """request_for(client, **changes): the tiny conversion, its inputs uploaded."""

    def make(client, **changes):
        texts = {name: (inputs / f"{name}.yaml").read_text() for name in ("recipe", "policy", "evaluation")}
        base = client.upload_folder(inputs / "model", ArtifactKind.MODEL)
        evaluation = client.upload_folder(inputs / "eval", ArtifactKind.DATASET)
        return ConversionRequest(Documents(**texts), base=base, evaluation=evaluation, **changes)

    return make


def states(events):
    return [event.body.state for event in events if isinstance(event.body, StateChanged)]


def watching(client, name, seen):
    thread = threading.Thread(target=lambda: seen.extend(client.watch(name)))
    thread.start()
    return thread


def wait_until(seen, count):
    for _ in range(600):
        if len(seen) >= count:
            return
        threading.Event().wait(0.05)
    raise AssertionError(f"{len(seen)} of {count} events arrived")


def test_what_was_asked_for_is_what_the_server_has(server, request_for):
    with Client(server.address) as client:
        request = request_for(client, labels={"owner": "ml"}, seed=5, priority=-7)
        made = client.create_conversion(request)
        read = client.get(made.name.removeprefix("conversions/"))
        assert read == made
        assert (read.state, read.verdict, read.output, read.failure) == (ConversionState.QUEUED, None, "", None)
        assert (read.inputs.base, read.inputs.evaluation) == (request.base, request.evaluation)
        assert (read.labels, read.seed, read.priority, read.requested_by) == ({"owner": "ml"}, 5, -7, "local")
        client.cancel(made.name)


def test_an_estimate_queues_nothing(server, request_for):
    with Client(server.address) as client:
        request = request_for(client, labels={"test": "estimate"})
        estimate = client.estimate(request)
        assert estimate.parameters > 1000
        assert estimate.memory_bytes > 0
        assert estimate.steps
        assert list(client.list(labels={"test": "estimate"})) == []


def test_a_watch_goes_on_after_its_connection_was_cut(server, proxy, patient, request_for):
    between, seen = proxy(server), []
    with Client(server.address) as client, Client(between.address, retry_policy=patient) as watcher:
        made = client.create_conversion(request_for(client))
        thread = watching(watcher, made.name, seen)
        wait_until(seen, 1)
        between.cut()
        client.cancel(made.name)
        thread.join(30)
        ended = client.wait(made.name)
    assert states(seen) == [ConversionState.QUEUED, ConversionState.CANCELLED]
    assert [event.sequence for event in seen] == sorted({event.sequence for event in seen})
    assert ended.state is ConversionState.CANCELLED


def test_a_watch_survives_the_server_s_sudden_death(start_server, proxy, patient, request_for, tmp_path):
    first, seen = start_server(tmp_path / "server"), []
    between = proxy(first)
    with Client(between.address, retry_policy=patient) as client:
        made = client.create_conversion(request_for(client))
        thread = watching(client, made.name, seen)
        wait_until(seen, 1)
        first.kill()
        between.target = start_server(tmp_path / "server").address
        assert client.get(made.name).state is ConversionState.QUEUED
        client.cancel(made.name)
        thread.join(60)
    assert states(seen) == [ConversionState.QUEUED, ConversionState.CANCELLED]


def test_a_wait_ends_when_its_time_is_over(server, request_for):
    with Client(server.address) as client:
        made = client.create_conversion(request_for(client))
        with pytest.raises(Unavailable, match="has not ended within") as caught:
            client.wait(made.name, timeout_s=0.2)
        assert caught.value.reason == "WAIT_TIMED_OUT"
        client.cancel(made.name)
        assert client.wait(made.name, timeout_s=30).state is ConversionState.CANCELLED


def test_the_same_request_id_is_the_same_conversion(server, request_for):
    with Client(server.address) as client:
        request = request_for(client)
        first = client.create_conversion(request, request_id="nightly-1")
        assert client.create_conversion(request, request_id="nightly-1").name == first.name
        with pytest.raises(AlreadyExists):
            client.create_conversion(request_for(client, seed=9), request_id="nightly-1")
        assert client.create_conversion(request).name != first.name


def test_an_answer_that_was_lost_is_asked_for_again_and_queues_once(server, proxy, patient, request_for):
    between = proxy(server)
    with Client(server.address) as client, Client(between.address, retry_policy=patient) as cut_off:
        request = request_for(client, labels={"test": "lost-answer"})
        cut_off.capabilities()
        between.cut_down_at = between.down_bytes + 1
        made = cut_off.create_conversion(request)
        assert between.cuts == 1
        assert [found.name for found in client.list(labels={"test": "lost-answer"})] == [made.name]


def test_cancel_and_retry_ask_for_the_state_that_was_seen(server, request_for):
    with Client(server.address) as client:
        made = client.create_conversion(request_for(client))
        with pytest.raises(Conflict):
            client.cancel(made.name, etag="another")
        cancelled = client.cancel(made.name, etag=made.etag)
        assert cancelled.state is ConversionState.CANCELLED
        with pytest.raises(Conflict):
            client.retry(made.name, etag=made.etag)
        again = client.retry(made.name, etag=cancelled.etag)
        assert again.state is ConversionState.QUEUED
        with pytest.raises(FailedPrecondition):
            client.retry(made.name)
        client.cancel(made.name)


def test_only_what_is_safe_is_tried_again_when_the_server_is_gone(server, proxy, request_for):
    between, pauses = proxy(server), []
    policy = RetryPolicy(call_patience_s=1.0, sleep=pauses.append)
    with Client(server.address) as client, Client(between.address, retry_policy=policy) as cut_off:
        made = client.create_conversion(request_for(client))
        cut_off.get(made.name)
        between.target = "127.0.0.1:1"
        between.cut()
        for call in (cut_off.cancel, cut_off.retry):
            with pytest.raises(Unavailable):
                call(made.name)
        assert pauses == []
        with pytest.raises(Unavailable):
            cut_off.get(made.name)
        assert pauses
        client.cancel(made.name)


def test_a_list_goes_over_its_pages_in_order(server, request_for, monkeypatch):
    monkeypatch.setattr("modelpress.client.PAGE_SIZE", 2)
    with Client(server.address) as client:
        request = request_for(client, labels={"test": "pages"})
        made = [client.create_conversion(request).name for _ in range(5)]
        found = list(client.list(labels={"test": "pages"}, states=(ConversionState.QUEUED,)))
        assert [conversion.name for conversion in found] == made[::-1]
        assert len(list(itertools.islice(client.list(labels={"test": "pages"}), 3))) == 3
        assert list(client.list(labels={"test": "pages"}, states=(ConversionState.FAILED,))) == []


def test_a_name_that_is_none_is_refused_before_it_is_sent(server):
    with Client(server.address) as client:
        with pytest.raises(InvalidRequest, match="not a conversion's name"):
            client.get("../conversions/a")
        with pytest.raises(InvalidRequest, match="not an artifact's name"):
            client.get_artifact("sha256:0")
        with pytest.raises(NotFound):
            client.get("conversions/none")


def test_there_is_no_report_before_the_verdict(server, request_for):
    with Client(server.address) as client:
        made = client.create_conversion(request_for(client))
        with pytest.raises(FailedPrecondition):
            client.report(made.name)
        client.cancel(made.name)
