"""A database of its own for every test, and conversions in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from modelpress.digests import digest_bytes
from service.desk import Desk
from service.publication import Publication
from service.requests import ConversionRequest
from service.state.conversions import Conversion, Conversions, NewConversion
from service.state.engine import open_database
from service.state.events import Journal
from service.state.leases import Leases
from service.workers.pool import PoolSettings, WorkerPool
from service.workers.probe import WorkerFacts, probe
from tests.service.jobs.tiny_operations import operations
from tests.service.jobs.workshop import Workshop

RECIPE = "stages: [{method: export}]"
POLICY = "gates: {size: {max_ratio: 1.0}}"


class Clock:
    """A clock that a test moves by hand; every look at it takes a millisecond."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = open_database(f"sqlite:///{tmp_path}/database/state.sqlite")
    yield engine
    engine.dispose()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def journal(engine: Engine, clock: Clock) -> Journal:
    return Journal(engine, clock=clock)


@pytest.fixture
def conversions(journal: Journal) -> Conversions:
    return Conversions(journal)


@pytest.fixture
def leases(journal: Journal) -> Leases:
    return Leases(journal, holder="server-1", lease_s=30.0)


@pytest.fixture
def new() -> Callable[..., NewConversion]:
    """Make a request; keyword arguments are fields of ConversionRequest, `request_id` and `tenant`."""

    def make(*, request_id: str = "", tenant: str = "default", **fields: Any) -> NewConversion:
        digests = {"base": digest_bytes(b"base"), "evaluation_dataset": digest_bytes(b"rows")}
        request = ConversionRequest(**{**digests, "recipe_yaml": RECIPE, "policy_yaml": POLICY, **fields})
        return NewConversion(tenant, "ada", request.to_json(), request_id)

    return make


@pytest.fixture
def queued(conversions: Conversions, new: Callable[..., NewConversion]) -> Conversion:
    return conversions.create(new())


@pytest.fixture(scope="session")
def facts(tmp_path_factory: pytest.TempPathFactory) -> WorkerFacts:
    """What a probe child of the real forkserver says; it imports torch and all the rest once per test session."""
    folder = tmp_path_factory.mktemp("probe")
    return probe(WorkerPool(PoolSettings(str(folder / "store"), folder / "scratch", 1, "cpu", operations)))


@pytest.fixture
def workshop(tmp_path: Path, facts: WorkerFacts) -> Iterator[Callable[..., Workshop]]:
    """Open a Workshop for a pipeline; again on the same data after `close`, as a restarted server would."""
    opened: list[Workshop] = []

    def start(pipeline: Callable[[Desk], Publication], **settings: Any) -> Workshop:
        opened.append(Workshop(tmp_path / "data", facts, pipeline, **settings))
        return opened[-1]

    yield start
    for each in opened:
        each.close()
