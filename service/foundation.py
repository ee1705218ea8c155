"""The foundation: what outlives the process, opened once, and what everything else stands on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy.exc import SQLAlchemyError

from modelpress.errors import FailedPrecondition
from service.config import Config
from service.signing import Signer, load_or_create_signer
from service.state.engine import open_database
from service.state.events import Journal
from service.storage.store import ContentStore
from service.threads import Threads


@dataclass(frozen=True)
class Foundation:
    config: Config
    store: ContentStore
    journal: Journal
    signer: Signer
    threads: Threads


def lay_foundation(config: Config, threads: Threads) -> Foundation:
    """Open database, store and signing key, each made where there is none. Blocks.

    Raises ModelpressError with one sentence where one of them cannot be used.
    """
    with _usable("storage.data", OSError):
        config.storage.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _usable("storage.database_url", SQLAlchemyError, ImportError, OSError):
        engine = open_database(config.database_url)
    with _usable("storage.store_url", OSError):
        store = ContentStore(config.store_url, scratch=config.scratch)
    signer = load_or_create_signer(config.storage.data, config.signing.key_file)
    return Foundation(config, store, Journal(engine), signer, threads)


@contextmanager
def _usable(field: str, *faults: type[Exception]) -> Iterator[None]:
    """One sentence for the operator, who alone reads it; SQLAlchemy leaves passwords out of its messages."""
    try:
        yield
    except faults as fault:
        why = (str(fault).splitlines() or [type(fault).__name__])[0]
        raise FailedPrecondition(f"{field} cannot be used: {why}", field=field) from fault
