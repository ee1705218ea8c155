"""The database: one URL, migrated when it is opened.

    open_database("sqlite:////var/lib/modelpress/state.sqlite")     one server, one machine
    open_database("postgresql+psycopg://user@host/modelpress")      several servers

SQLite runs in WAL mode with `synchronous=FULL`: what was committed survives a power failure. Only one process may
have a SQLite database open, because leases of a dead server are taken over at once there.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, Table, create_engine, event
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.engine import URL, make_url

from modelpress.errors import FailedPrecondition

MIGRATIONS = Path(__file__).parent / "migrations"
BUSY_TIMEOUT_S = 30.0
READ_ONLY = {"modelpress_read_only": True}


def open_database(url: str) -> Engine:
    """Open the database, run the migrations that it lacks, return the engine; `dispose()` closes it.

    Raises FailedPrecondition where another process has the same SQLite file open, or where the database was written
    by a newer server.
    """
    parsed = make_url(url)
    engine = _open_sqlite(parsed) if is_sqlite(parsed) else create_engine(parsed, pool_pre_ping=True)
    try:
        _migrate(engine)
    except BaseException:
        engine.dispose()
        raise
    return engine


def is_sqlite(url: URL) -> bool:
    return url.get_backend_name() == "sqlite"


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """A connection for reads: one consistent snapshot, and on SQLite no wait for writers."""
    with engine.connect() as connection:
        yield connection.execution_options(**READ_ONLY)


def upsert(connection: Connection, table: Table, key: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Write the row of this primary key, in place of the one that is there; safe against others who do the same."""
    insert = postgresql_insert if connection.dialect.name == "postgresql" else sqlite_insert
    statement = insert(table).values({**key, **values})
    connection.execute(statement.on_conflict_do_update(index_elements=list(key), set_=dict(values)))


def _open_sqlite(url: URL) -> Engine:
    if not url.database or url.database == ":memory:":
        raise FailedPrecondition(
            "an SQLite database in memory would lose every conversion: name a file in storage.database_url"
        )
    file = Path(url.database)
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = _take_lock(file.with_name(file.name + ".lock"))
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S})
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    event.listen(engine, "engine_disposed", lambda _: _release_lock(lock))
    return engine


def _take_lock(file: Path) -> list[int]:
    """The file descriptor that holds the lock, in a list that is emptied on release."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise FailedPrecondition(
            f"another server has the database {file.stem!r} open: stop it, or use PostgreSQL for several servers"
        ) from None
    return [descriptor]


def _release_lock(lock: list[int]) -> None:
    while lock:
        os.close(lock.pop())


def _configure_sqlite(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # transactions begin in _begin_sqlite, not where sqlite3 guesses
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    """A writer takes the write lock at once: one that first read would fail with SQLITE_BUSY instead of waiting."""
    reads = connection.get_execution_options().get("modelpress_read_only")
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")


def _migrate(engine: Engine) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
