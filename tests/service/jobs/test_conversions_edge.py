"""Conversions over the wire: a real server in a process of its own, the public client, raw calls for raw statuses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from modelpress.client import Client
from modelpress.errors import AlreadyExists, Conflict, FailedPrecondition, InvalidRequest, NotFound
from modelpress.reports import Verdict
from modelpress.requests import ConversionRequest
from modelpress.retries import RetryPolicy
from modelpress.v1 import conversions_pb2 as pb
from modelpress.v1 import conversions_pb2_grpc as rpc
from modelpress.views import ConversionState, StateChanged, StepFinished
from tests.service.jobs.served import TinyServer, request

AN_HOUR_S = 3600
"""Longer than any test may take: what ends before it was ended."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = TinyServer(tmp_path_factory.mktemp("edge") / "data")
    yield server.start()
    assert server.end() == 0


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[Client]:
    with Client(address) as client:
        yield client


@pytest.fixture(scope="module")
def make(client: Client, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ConversionRequest]:
    """A request of uploaded inputs; `slow=seconds` makes it run for so long."""
    folder = tmp_path_factory.mktemp("inputs")

    def make(slow: float = 0, **fields: object) -> ConversionRequest:
        return request(client, folder, **{"labels": {"slow": str(slow)}, **fields})

    return make


def call(address: str, method: str, message: object) -> grpc.RpcError:
    """The raw error of a call that must fail."""
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
        result = getattr(rpc.ConversionsStub(channel), method)(message)
        list(result)
    return caught.value


def test_a_conversion_goes_from_submission_to_its_output(client, make, tmp_path):
    done = client.wait(client.create_conversion(make(seed=7, priority=3)).name)
    assert (done.state, done.verdict, done.attempt) == (ConversionState.SUCCEEDED, Verdict.APPROVED, 1)
    assert done.create_time <= done.start_time <= done.end_time
    client.download(done.output, tmp_path / "output")
    assert (tmp_path / "output" / "report.json").exists()


def test_what_was_sent_comes_back_as_it_was(client, address, make):
    name = client.create_conversion(make(seed=7, priority=-3)).name
    with grpc.insecure_channel(address) as channel:
        found = rpc.ConversionsStub(channel).GetConversion(pb.GetConversionRequest(name=name))
    sent = make()
    assert (found.recipe.yaml, found.policy.yaml) == (sent.documents.recipe, sent.documents.policy)
    assert (found.inputs.base, found.inputs.evaluation, found.inputs.train) == (sent.base, sent.evaluation, "")
    assert (found.seed, found.priority, found.requested_by) == (7, -3, "local")
    assert dict(found.labels) == {"slow": "0"}


def test_watch_tells_everything_in_order_and_ends(client, make):
    events = list(client.watch(client.create_conversion(make()).name))
    numbers = [event.sequence for event in events]
    assert numbers == sorted(numbers) and set(numbers) == set(range(1, numbers[-1] + 1))
    states = [event.body.state.value for event in events if isinstance(event.body, StateChanged)]
    assert states == ["QUEUED", "RUNNING", "SUCCEEDED"]
    assert [e.body.step for e in events if isinstance(e.body, StepFinished)] == ["first", "second", "third"]


def test_watch_attached_again_goes_on_after_the_last_number_seen(client, make):
    name = client.create_conversion(make()).name
    client.wait(name)
    events = list(client.watch(name))
    for after in range(len(events) + 1):
        assert [event.sequence for event in client.watch(name, after=after)] == list(range(after + 1, len(events) + 1))


def test_many_watchers_see_the_same_and_one_that_leaves_disturbs_nobody(client, address, make):
    made = client.create_conversion(make(slow=1.5))
    with Client(address) as leaving:
        next(iter(leaving.watch(made.name)))
    seen: list[list[str]] = []

    def watch() -> None:
        with Client(address) as watcher:
            bodies = [event.body for event in watcher.watch(made.name)]
            seen.append([body.state.value for body in bodies if isinstance(body, StateChanged)])

    watchers = [threading.Thread(target=watch) for _ in range(5)]
    for thread in watchers:
        thread.start()
    for thread in watchers:
        thread.join(30)
    assert seen == [["QUEUED", "RUNNING", "SUCCEEDED"]] * 5


def test_cancel_over_the_wire_ends_it_long_before_it_would_end(client, make):
    made = client.create_conversion(make(slow=AN_HOUR_S))
    while client.get(made.name).progress is None:
        time.sleep(0.05)
    assert client.cancel(made.name).state is ConversionState.CANCELLING
    assert client.wait(made.name).state is ConversionState.CANCELLED
    assert client.get(made.name).progress is None


def test_retry_queues_it_again_and_only_what_has_ended(client, make):
    made = client.create_conversion(make(slow=0.5))
    with pytest.raises(FailedPrecondition):
        client.retry(made.name)
    client.cancel(made.name)
    cancelled = client.wait(made.name)
    with pytest.raises(Conflict):
        client.retry(made.name, etag="0")
    client.retry(made.name, etag=cancelled.etag)
    assert client.wait(made.name).state is ConversionState.SUCCEEDED
    with pytest.raises(FailedPrecondition):
        client.cancel(made.name)


def test_a_request_id_makes_the_call_safe_to_repeat(client, make):
    first = client.create_conversion(make(seed=1), request_id="same")
    assert client.create_conversion(make(seed=1), request_id="same").name == first.name
    with pytest.raises(AlreadyExists, match="request_id 'same'"):
        client.create_conversion(make(seed=2), request_id="same")


def test_an_estimate_queues_nothing_and_names_the_steps(client, make):
    before = len(list(client.list()))
    estimate = client.estimate(make(seed=99))
    assert estimate.steps[:2] == ("export/baseline", "export/candidate")
    assert estimate.memory_bytes > 0 and estimate.parameters > 0
    assert len(list(client.list())) == before


def test_listing_pages_through_everything_and_filters(client, address, make):
    label = {"page": "yes"}
    made = [client.create_conversion(make(labels=label, seed=seed)).name for seed in range(5)]
    with grpc.insecure_channel(address) as channel:
        stub, names, token = rpc.ConversionsStub(channel), [], ""
        while True:
            page = stub.ListConversions(pb.ListConversionsRequest(page_size=2, page_token=token, labels=label))
            names += [conversion.name for conversion in page.conversions]
            if not (token := page.next_page_token):
                break
    assert names == made[::-1]
    assert [c.name for c in client.list(labels={"page": "no"})] == []
    for name in made:
        client.wait(name)
    approved = client.list(labels=label, verdicts=(Verdict.APPROVED,), states=(ConversionState.SUCCEEDED,))
    assert {c.name for c in approved} == set(made)


def test_faults_of_a_request_have_the_right_code_and_name_the_field(address):
    code = grpc.StatusCode
    cases = [
        ("GetConversion", pb.GetConversionRequest(name="conversions/none"), code.NOT_FOUND),
        ("GetConversion", pb.GetConversionRequest(name="jobs/x"), code.INVALID_ARGUMENT),
        ("CreateConversion", pb.CreateConversionRequest(), code.INVALID_ARGUMENT),
        ("WatchConversion", pb.WatchConversionRequest(name="conversions/none"), code.NOT_FOUND),
        ("WatchConversion", pb.WatchConversionRequest(name="conversions/x", after_sequence=-1), code.INVALID_ARGUMENT),
        ("ListConversions", pb.ListConversionsRequest(page_token="x"), code.INVALID_ARGUMENT),
        ("ListConversions", pb.ListConversionsRequest(page_size=-1), code.INVALID_ARGUMENT),
        ("ListConversions", pb.ListConversionsRequest(states=[0]), code.INVALID_ARGUMENT),
        ("ListConversions", pb.ListConversionsRequest(states=[99]), code.INVALID_ARGUMENT),
        ("ListConversions", pb.ListConversionsRequest(labels={f"k{n}": "" for n in range(65)}), code.INVALID_ARGUMENT),
        ("CancelConversion", pb.CancelConversionRequest(name="conversions/none"), code.NOT_FOUND),
        ("RetryConversion", pb.RetryConversionRequest(name="conversions/none"), code.NOT_FOUND),
    ]
    assert [call(address, method, message).code() for method, message, _ in cases] == [code for *_, code in cases]


def test_artifacts_that_do_not_exist_or_are_of_another_kind_are_refused(client, make):
    sent = make()
    missing = "artifacts/sha256:" + "0" * 64
    with pytest.raises(NotFound, match=r"inputs\.base is"):
        client.create_conversion(ConversionRequest(sent.documents, base=missing, evaluation=sent.evaluation))
    with pytest.raises(InvalidRequest, match="kind DATASET"):
        client.create_conversion(ConversionRequest(sent.documents, base=sent.base, evaluation=sent.base))


def test_a_server_that_stops_ends_watches_and_the_next_one_finishes_the_conversion(tmp_path: Path):
    server = TinyServer(tmp_path / "data")
    try:
        with Client(server.start(), retry_policy=RetryPolicy(max_delay_s=0.2)) as client:
            made = client.create_conversion(request(client, tmp_path, labels={"slow": "1"}))
            events = iter(client.watch(made.name))
            next(events)
            assert server.end() == 0
            server.start()
            states = [event.body.state.value for event in events if isinstance(event.body, StateChanged)]
            assert states[-3:] == ["QUEUED", "RUNNING", "SUCCEEDED"]
    finally:
        server.kill()
