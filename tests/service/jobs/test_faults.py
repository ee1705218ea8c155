"""Killed at any point of the path, worker or server, a conversion ends as if nothing had happened."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from modelpress.client import Client
from modelpress.errors import Unavailable
from modelpress.retries import RetryPolicy
from modelpress.views import ConversionState, StepFinished
from service.faults import MARK_VARIABLE, POINTS, VARIABLE, fault_point
from tests.service.jobs.served import TinyServer, request

IMPATIENT = RetryPolicy(call_patience_s=0.3, stream_patience_s=0.3, max_delay_s=0.1)
NOT_ON_THE_TINY_PATH = ("publication.store.before", "publication.store.after")
"""Passed by the real pipeline only: tests/end_to_end visits them."""
TINY_POINTS = tuple(point for point in POINTS if point not in NOT_ON_THE_TINY_PATH)
SAMPLE = 2
"""Points of the everyday suite; another choice each time that the list of points changes."""


@dataclass(frozen=True)
class Ending:
    """What must not depend on who was killed: the output, and each step finished once."""

    output: str
    finished: tuple[str, ...]
    conversions: int


def survive(server: TinyServer, folder: Path) -> Ending:
    """Upload, submit and wait like a client that tries again, starting the server anew whenever it has died."""
    while True:
        address = f"127.0.0.1:{server.port}" if server.alive else server.start()
        try:
            with Client(address, retry_policy=IMPATIENT) as client:
                made = client.create_conversion(request(client, folder), request_id="the-one")
                done = client.wait(made.name, timeout_s=60)
                assert done.state is ConversionState.SUCCEEDED, done.failure
                bodies = [event.body for event in client.watch(made.name)]
                finished = tuple(body.step for body in bodies if isinstance(body, StepFinished))
                return Ending(done.output, finished, len(list(client.list())))
        except Unavailable:
            assert not server.alive or server.process.wait(5.0) == -9, server.log.read_text()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Ending:
    folder = tmp_path_factory.mktemp("undisturbed")
    server = TinyServer(folder / "data")
    server.start()
    try:
        return survive(server, folder)
    finally:
        server.kill()


def check(point: str, folder: Path, undisturbed: Ending) -> None:
    """Kill at the point, once, and compare the ending."""
    mark, server = folder / "killed", TinyServer(folder / "data")
    server.start(**{VARIABLE: point, MARK_VARIABLE: str(mark)})
    try:
        assert survive(server, folder) == undisturbed
        assert mark.exists(), f"no process passed {point}"
        assert server.end() == 0
        assert not any((server.data / "scratch" / "workers").glob("*"))
    finally:
        server.kill()


def test_the_undisturbed_run_finishes_every_step_once(undisturbed):
    assert (undisturbed.finished, undisturbed.conversions) == (("first", "second", "third"), 1)


@pytest.mark.parametrize("point", random.Random(len(POINTS)).sample(TINY_POINTS, SAMPLE))
def test_killed_at_a_point_it_ends_as_undisturbed(point, tmp_path, undisturbed):
    check(point, tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("point", [p for p in TINY_POINTS if p.startswith(("store.put", "sink.", "desk.", "worker."))])
def test_killed_at_a_point_for_the_second_time_it_ends_as_undisturbed(point, tmp_path, undisturbed):
    check(f"{point}:2", tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("point", TINY_POINTS)
def test_killed_at_every_point_it_ends_as_undisturbed(point, tmp_path, undisturbed):
    check(point, tmp_path, undisturbed)


@pytest.mark.slow
def test_a_server_that_is_killed_again_and_again_loses_nothing(tmp_path, undisturbed):
    server = TinyServer(tmp_path / "data")
    for point in ("conversion.create.after", "dispatcher.claim.after", "desk.checkpoint.after", "desk.step.before"):
        server.start(**{VARIABLE: point, MARK_VARIABLE: str(tmp_path / point)})
        try:
            with Client(f"127.0.0.1:{server.port}", retry_policy=IMPATIENT) as client:
                client.wait(client.create_conversion(request(client, tmp_path), request_id="the-one").name)
        except Unavailable:
            server.process.wait(5.0)
    assert survive(server, tmp_path) == undisturbed
    server.kill()


def test_a_point_that_is_not_listed_is_refused():
    with pytest.raises(LookupError, match="not listed"):
        fault_point("nowhere")
