"""The states' table, the migrations and the lock of the database."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import select

from modelpress.errors import FailedPrecondition
from service.state.engine import open_database, reading
from service.state.events import Journal
from service.state.states import FINAL, MOVES, State, move
from service.state.tables import conversions, metadata

ARCHITECTURE = Path(__file__).parents[3] / "docs" / "architecture.md"


def test_migrations_make_exactly_the_tables(engine):
    with engine.begin() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


def test_an_open_database_can_be_opened_again_after_it_was_closed(tmp_path):
    url = f"sqlite:///{tmp_path}/state.sqlite"
    open_database(url).dispose()
    open_database(url).dispose()


def test_a_second_server_on_one_sqlite_file_is_refused(tmp_path):
    url = f"sqlite:///{tmp_path}/state.sqlite"
    first = open_database(url)
    with pytest.raises(FailedPrecondition, match="another server has the database"):
        open_database(url)
    first.dispose()


def test_a_database_in_memory_is_refused():
    with pytest.raises(FailedPrecondition, match="name a file"):
        open_database("sqlite://")


def test_sqlite_keeps_what_was_committed_through_a_power_failure(engine):
    with reading(engine) as connection:
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 30_000}


def test_every_state_is_reached_from_queued_and_leaves_only_as_the_table_says():
    reached = {State.QUEUED}
    for _ in State:
        reached |= {target for state in reached for target in MOVES[state]}
    assert reached == set(State)
    assert MOVES[State.SUCCEEDED] == frozenset()
    assert all(MOVES[state] <= {State.QUEUED} for state in FINAL)


def test_the_architecture_page_lists_exactly_the_moves_of_the_table():
    rows = re.findall(r"^\| ([A-Z]+) \| ([A-Z]+) \|", ARCHITECTURE.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted((start.value, target.value) for start in State for target in MOVES[start])


@pytest.mark.parametrize(("start", "target"), list(itertools.product(State, State)))
def test_move_makes_exactly_the_moves_of_the_table(journal, queued, start, target):
    which = conversions.c.id == queued.id
    with journal.change() as change:
        change.connection.execute(conversions.update().where(which).values(state=start.value))
        moved = move(change.connection, which, target, {})
        state = change.connection.execute(select(conversions.c.state).where(which)).scalar_one()
    allowed = target in MOVES[start]
    assert (moved is not None, state) == (allowed, target.value if allowed else start.value)


def test_a_change_that_fails_leaves_nothing(journal: Journal, queued):
    with pytest.raises(RuntimeError), journal.change() as change:
        change.append(queued.id, "warning", {"message": "lost"})
        raise RuntimeError
    assert [event.kind for event in journal.events_after(queued.id, 0, seen=0)] == ["state_changed"]
