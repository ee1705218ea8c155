"""The journal: what happened to a conversion, numbered 1, 2, 3, ... without gaps, written with the change itself.

    with journal.change() as change:
        ...                                                  # the change, on change.connection
        change.append(conversion, "warning", {"message": ...})

Progress is written in place while nothing else happens: between two other events only the newest one is kept, and a
watcher gets it again under its number whenever it moves on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Engine, and_, insert, or_, select, update

from service.state.bell import Bell
from service.state.engine import reading
from service.state.tables import conversions, events

PROGRESS = "progress"


@dataclass(frozen=True)
class Event:
    """`kind` and `body` are named like the wire's: state_changed, step_started, progress, step_finished, warning."""

    sequence: int
    time: float
    kind: str
    body: Mapping[str, Any]


@dataclass
class Change:
    """One transaction. What it appends to is made known when it has been committed."""

    connection: Connection
    now: float
    touched: set[str] = field(default_factory=set)

    def append(self, conversion: str, kind: str, body: Mapping[str, Any]) -> int:
        """Write the conversion's next event and return its number."""
        sequence = self._advance(conversion)
        values = {"conversion": conversion, "sequence": sequence, "time": self.now, "kind": kind, "body": dict(body)}
        self.connection.execute(insert(events).values(values))
        return sequence

    def progress(self, conversion: str, body: Mapping[str, Any]) -> None:
        """Replace the newest event where that is a progress event, append one otherwise."""
        newest = select(conversions.c.last_sequence).where(conversions.c.id == conversion).scalar_subquery()
        where = and_(events.c.conversion == conversion, events.c.sequence == newest, events.c.kind == PROGRESS)
        replaced = self.connection.execute(update(events).where(where).values(time=self.now, body=dict(body)))
        if replaced.rowcount == 0:
            self.append(conversion, PROGRESS, body)
        self.touched.add(conversion)

    def _advance(self, conversion: str) -> int:
        self.touched.add(conversion)
        statement = (
            update(conversions)
            .where(conversions.c.id == conversion)
            .values(last_sequence=conversions.c.last_sequence + 1)
            .returning(conversions.c.last_sequence)
        )
        return int(self.connection.execute(statement).scalar_one())


class Journal:
    """The database with a clock, and a bell that rings when a conversion has changed."""

    def __init__(self, engine: Engine, *, clock: Callable[[], float] = time.time) -> None:
        self.engine = engine
        self.clock = clock
        self.bell = Bell()

    @contextmanager
    def change(self) -> Iterator[Change]:
        """A transaction: all of it is committed, or on an exception nothing."""
        with self.engine.begin() as connection:
            change = Change(connection, self.clock())
            yield change
        for conversion in change.touched:
            self.bell.ring(conversion)

    def reading(self) -> AbstractContextManager[Connection]:
        return reading(self.engine)

    def events_after(self, conversion: str, sequence: int, *, seen: float) -> list[Event]:
        """Events with a greater number, and the one of that number itself where it moved on after `seen`."""
        moved_on = and_(events.c.sequence == sequence, events.c.kind == PROGRESS, events.c.time > seen)
        statement = (
            select(events.c.sequence, events.c.time, events.c.kind, events.c.body)
            .where(events.c.conversion == conversion, or_(events.c.sequence > sequence, moved_on))
            .order_by(events.c.sequence)
        )
        with self.reading() as connection:
            return [Event(*row) for row in connection.execute(statement)]
