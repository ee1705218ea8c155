"""Where a conversion keeps its checkpoints: a content store of its own, so that deleting one can never touch another.

They lie below the server's store, under `checkpoints/<conversion>`; the database knows which one is the newest.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

import obstore
from obstore.store import from_url

from modelpress.digests import Digest
from modelpress.errors import NotFound
from service.storage.store import ContentStore


def checkpoints_url(store_url: str, conversion: str) -> str:
    """The URL of the conversion's own store."""
    return f"{store_url.rstrip('/')}/checkpoints/{conversion}"


class Checkpoints:
    """The checkpoints of one conversion, as the service sees them."""

    def __init__(self, store_url: str, conversion: str, *, scratch: Path) -> None:
        self._url = checkpoints_url(store_url, conversion)
        self._scratch = scratch

    def has(self, digest: Digest) -> bool:
        """Whether a checkpoint is complete."""
        return is_whole(ContentStore(self._url, scratch=self._scratch), digest)

    def replace(self, former: Digest, newest: Digest) -> None:
        """Delete the blobs of `former` that `newest` does not share."""
        if former == newest:
            return
        store = ContentStore(self._url, scratch=self._scratch)
        kept = {newest, *(entry.digest for entry in store.manifest(newest).files)}
        with suppress(NotFound):
            for entry in store.manifest(former).files:
                if entry.digest not in kept:
                    store.delete(entry.digest)
        store.delete(former)

    def clear(self) -> None:
        """Delete all of them, also what a killed worker left half written."""
        parts = urlsplit(self._url)
        if parts.scheme in ("", "file"):
            shutil.rmtree(unquote(parts.path) if parts.scheme else self._url, ignore_errors=True)
            return
        store = from_url(self._url)
        for found in obstore.list(store):
            obstore.delete(store, [entry["path"] for entry in found])


def is_whole(store: ContentStore, manifest: Digest) -> bool:
    """Whether the store has the manifest and every file that it names. Bytes are verified when they are fetched."""
    try:
        return all(store.has(entry.digest) for entry in store.manifest(manifest).files)
    except NotFound:
        return False
