"""Garbage: what is old and nobody's is deleted; what is known, fresh or being written stays."""

import os
from pathlib import Path

import google_crc32c
import pytest

from modelpress.digests import digest_bytes
from modelpress.errors import NotFound
from service.state.engine import open_database
from service.state.uploads import UploadRepository
from service.storage.garbage import STALE_S, Collected, GarbageCollector
from service.storage.store import ContentStore
from service.storage.uploads import UploadDesk, UploadLimits

EXPIRY_S = 100.0


class Clock:
    """Stands still until it is set."""

    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """The collector with a clock of its own, on a real database and store."""

    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        self.engine = open_database(f"sqlite:///{folder / 'state.sqlite'}")
        self.store = ContentStore(str(folder / "store"), scratch=folder)
        repository = UploadRepository(self.engine)
        self.desk = UploadDesk(self.store, repository, UploadLimits(1 << 20, EXPIRY_S), clock=self.clock)
        self.collector = GarbageCollector(self.store.staging, repository, self.desk, clock=self.clock)

    def begin(self, data: bytes) -> str:
        """The id of an upload of which the first byte has arrived."""
        upload, _ = self.desk.create("default", digest_bytes(data), len(data))
        with self.desk.write("default", upload.id) as writer:
            writer.append(0, data[:1], google_crc32c.value(data[:1]))
        return upload.id

    def age(self, name: str, seconds: float) -> None:
        file = self.store.staging / name
        file.touch()
        os.utime(file, (self.clock.now - seconds, self.clock.now - seconds))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path)
    yield bench
    bench.engine.dispose()


def staged(bench: Bench) -> list[str]:
    return sorted(file.name for file in bench.store.staging.iterdir())


def test_an_upload_lives_until_its_time_after_the_last_stream_is_over(bench: Bench) -> None:
    identifier = bench.begin(b"some bytes")
    bench.clock.now += EXPIRY_S - 1
    assert bench.collector.collect() == Collected(0, 0)
    with bench.desk.write("default", identifier):
        pass
    bench.clock.now += EXPIRY_S - 1
    assert bench.collector.collect() == Collected(0, 0)
    bench.clock.now += 1
    assert bench.collector.collect() == Collected(1, 0)
    assert staged(bench) == []
    with pytest.raises(NotFound):
        bench.desk.status("default", identifier)


def test_an_upload_that_is_being_written_is_never_deleted(bench: Bench) -> None:
    identifier = bench.begin(b"ab")
    with bench.desk.write("default", identifier) as writer:
        bench.clock.now += 10 * EXPIRY_S
        assert bench.collector.collect() == Collected(0, 0)
        writer.append(1, b"b", google_crc32c.value(b"b"))
        assert writer.finish().complete
    assert bench.store.read_bytes(digest_bytes(b"ab")) == b"ab"


def test_the_row_of_a_finished_upload_expires_and_its_blob_stays(bench: Bench) -> None:
    identifier = bench.begin(b"x")
    assert bench.desk.status("default", identifier)[0].complete
    bench.clock.now += EXPIRY_S
    assert bench.collector.collect() == Collected(1, 0)
    assert bench.store.has(digest_bytes(b"x"))


def test_staging_files_of_the_dead_are_deleted_and_others_are_not(bench: Bench) -> None:
    known = f"upload-{bench.begin(b'some bytes')}"
    for name, seconds in (
        ("put-dead", STALE_S),
        ("put-alive", STALE_S - 60),
        ("upload-unknown", STALE_S),
        (known, 1e6),
    ):
        bench.age(name, seconds)
    assert bench.collector.collect() == Collected(0, 2)
    assert staged(bench) == sorted(["put-alive", known])
