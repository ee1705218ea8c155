"""Two claimers never take the same conversion, on SQLite and on PostgreSQL; PostgreSQL needs only its URL."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine

from modelpress.digests import digest_bytes
from service.state.conversions import Conversions
from service.state.engine import open_database
from service.state.events import Journal
from service.state.leases import Leases
from service.state.states import LostLease, State
from service.state.steps import StepKey, Steps
from service.state.tables import metadata
from service.steps import StepResult
from tests.service.jobs.served import free_port

CONVERSIONS, CLAIMERS = 60, 6


def postgresql_binaries() -> Path | None:
    """Where initdb and postgres are."""
    found = shutil.which("initdb")
    candidates = [Path(found).parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return candidates[-1] if candidates else None


@pytest.fixture(scope="module")
def postgresql_url() -> Iterator[str]:
    """A PostgreSQL of its own on a loopback port, run as user postgres where this is root."""
    binaries = postgresql_binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL binaries on this machine")
    if importlib.util.find_spec("psycopg") is None:
        pytest.skip("the driver psycopg is not installed")
    data = Path("/tmp") / f"modelpress-postgresql-{os.getpid()}"  # noqa: S108 - a socket's path must be short
    data.mkdir(mode=0o700)
    as_user: list[str] = []
    if os.geteuid() == 0:
        user = pwd.getpwnam("postgres")
        os.chown(data, user.pw_uid, user.pw_gid)
        as_user = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    port = free_port()
    options = f"-p {port} -c listen_addresses=127.0.0.1 -k {data}"
    control = [*as_user, str(binaries / "pg_ctl"), "-D", str(data / "db"), "-l", str(data / "log"), "-w"]
    initdb = [*as_user, str(binaries / "initdb"), "-D", str(data / "db"), "-U", "modelpress", "--auth=trust"]
    subprocess.run(initdb, check=True, capture_output=True, cwd=data)
    subprocess.run([*control, "-o", options, "start"], check=True, stdout=subprocess.DEVNULL, cwd=data)
    yield f"postgresql+psycopg://modelpress@127.0.0.1:{port}/postgres"
    subprocess.run([*control, "-m", "immediate", "stop"], check=True, stdout=subprocess.DEVNULL, cwd=data)
    shutil.rmtree(data)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    url = f"sqlite:///{tmp_path}/state.sqlite"
    engine = open_database(url if request.param == "sqlite" else request.getfixturevalue("postgresql_url"))
    with engine.begin() as connection:
        for table in reversed(metadata.sorted_tables):
            connection.execute(table.delete())
    yield engine
    engine.dispose()


def test_many_claimers_take_every_conversion_exactly_once(database, new):
    journal = Journal(database)
    made = {Conversions(journal).create(new(seed=seed)).id for seed in range(CONVERSIONS)}
    taken: list[str] = []

    def claim(name: str) -> None:
        leases = Leases(journal, holder=name, lease_s=30.0)
        while claimed := leases.claim():
            taken.append(claimed[0].conversion)

    claimers = [threading.Thread(target=claim, args=(f"server-{n}",)) for n in range(CLAIMERS)]
    for thread in claimers:
        thread.start()
    for thread in claimers:
        thread.join()
    assert (len(taken), set(taken)) == (CONVERSIONS, made)


def test_both_databases_keep_steps_fences_events_and_request_ids_alike(database, new):
    journal = Journal(database)
    conversions, steps = Conversions(journal), Steps(journal)
    made = conversions.create(new(request_id="r", labels={"a": "b"}))
    assert conversions.create(new(request_id="r", labels={"a": "b"})).id == made.id
    leases = Leases(journal, holder="one", lease_s=30.0)
    lease, _ = leases.claim()
    key, result = StepKey("first", digest_bytes(b"k")), StepResult(digest_bytes(b"x"), {"n": 1.5}, 2.0, made.id)
    steps.start(lease, {"step": "first"})
    for done in (1, 2):
        steps.progress(lease, {"step": "first", "done": done})
    assert steps.save_checkpoint(lease, key, digest_bytes(b"c1")) is None
    assert steps.save_checkpoint(lease, key, digest_bytes(b"c2")) == digest_bytes(b"c1")
    steps.finish(lease, key, result)
    assert (steps.finished(made.id, key), steps.checkpoint(made.id, key)) == (result, None)
    assert steps.cached("default", key.key).record == {"n": 1.5}
    other = Leases(journal, holder="two", lease_s=30.0)
    assert other.release_dead(only_server=True) == 1
    with pytest.raises(LostLease):
        steps.warn(lease, "too late")
    kinds = [(e.sequence, e.kind) for e in journal.events_after(made.id, 0, seen=0)]
    assert kinds[2:5] == [(3, "step_started"), (4, "progress"), (5, "step_finished")]
    assert [n for n, _ in kinds] == list(range(1, len(kinds) + 1))
    assert conversions.get("default", made.id).state is State.QUEUED


@pytest.mark.slow
def test_migrations_make_exactly_the_tables_on_postgresql(postgresql_url):
    engine = open_database(postgresql_url)
    with engine.begin() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    engine.dispose()
