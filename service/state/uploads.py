"""Unfinished uploads: which blob, how large, until when. Their bytes lie in the store's staging folder."""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass

from sqlalchemy import Connection, Engine, RowMapping, delete, select, update

from modelpress.digests import Digest
from modelpress.errors import AlreadyExists, NotFound
from service.faults import fault_point
from service.state.artifacts import held, hold, insert_missing
from service.state.engine import reading
from service.state.tables import blobs, uploads


@dataclass(frozen=True)
class Upload:
    """One blob on its way. `expires` is UTC seconds."""

    id: str
    tenant: str
    digest: Digest
    size_bytes: int
    complete: bool
    expires: float

    @property
    def name(self) -> str:
        return f"uploads/{self.id}"


class UploadRepository:
    """All methods block: call them off the event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def create(self, tenant: str, digest: Digest, *, size_bytes: int, now: float, expires: float) -> Upload:
        """The tenant's unfinished upload of this digest; a new one where there is none.

        AlreadyExists where the tenant holds the blob, or is uploading it with another size.
        """
        fault_point("upload.create.before")
        with self._engine.begin() as connection:
            if held(connection, tenant, [digest]):
                raise AlreadyExists(f"blob {digest} is held already: there is nothing to upload", reason="BLOB_EXISTS")
            new = Upload(secrets.token_hex(16), tenant, digest, size_bytes, False, expires)
            upload = _find_or_insert(connection, new, now)
        fault_point("upload.create.after")
        if upload.size_bytes != size_bytes:
            raise AlreadyExists(
                f"this blob is being uploaded as {upload.size_bytes} bytes, not {size_bytes}: abort that upload first",
                reason="UPLOAD_EXISTS",
                field="size_bytes",
                metadata={"upload": upload.name},
            )
        return upload

    def forget(self, tenant: str, digest: Digest) -> None:
        """The tenant holds the blob no longer. Writes only where it does: most uploads are of new blobs."""
        with reading(self._engine) as connection:
            if not held(connection, tenant, [digest]):
                return
        which = (blobs.c.tenant == tenant, blobs.c.digest == str(digest))
        with self._engine.begin() as connection:
            connection.execute(delete(blobs).where(*which))

    def get(self, tenant: str, identifier: str) -> Upload:
        query = select(uploads).where(uploads.c.id == identifier, uploads.c.tenant == tenant)
        with reading(self._engine) as connection:
            row = connection.execute(query).mappings().one_or_none()
        if row is None:
            raise NotFound(
                f"no upload 'uploads/{identifier[:40]}': it expired, was aborted or was refused; create it again",
                reason="UPLOAD_NOT_FOUND",
            )
        return _upload(row)

    def extend(self, upload: Upload, expires: float) -> None:
        with self._engine.begin() as connection:
            connection.execute(update(uploads).where(uploads.c.id == upload.id).values(expires=expires))

    def complete(self, upload: Upload, now: float) -> None:
        """The blob, which is in the store by now, becomes visible to the tenant."""
        fault_point("upload.complete.before")
        with self._engine.begin() as connection:
            connection.execute(update(uploads).where(uploads.c.id == upload.id).values(complete=True))
            hold(connection, upload.tenant, {upload.digest: upload.size_bytes}, now)
        fault_point("upload.complete.after")

    def delete(self, upload: Upload) -> None:
        with self._engine.begin() as connection:
            connection.execute(delete(uploads).where(uploads.c.id == upload.id))

    def expired(self, now: float) -> list[Upload]:
        """Of all tenants, finished ones too: their rows only answer a client that lost the last reply."""
        with reading(self._engine) as connection:
            rows = connection.execute(select(uploads).where(uploads.c.expires <= now)).mappings()
            return [_upload(row) for row in rows]

    def is_known(self, identifier: str) -> bool:
        with reading(self._engine) as connection:
            return connection.scalar(select(uploads.c.id).where(uploads.c.id == identifier)) is not None


def _find_or_insert(connection: Connection, new: Upload, now: float) -> Upload:
    """The row of this tenant and digest. A finished one whose blob is gone again gives way to a new upload."""
    same = (uploads.c.tenant == new.tenant) & (uploads.c.digest == str(new.digest))
    connection.execute(delete(uploads).where(same & uploads.c.complete))
    insert_missing(connection, uploads, [asdict(new) | {"digest": str(new.digest), "created": now}])
    return _upload(connection.execute(select(uploads).where(same)).mappings().one())


def _upload(row: RowMapping) -> Upload:
    values = {name: row[name] for name in ("id", "tenant", "size_bytes", "complete", "expires")}
    return Upload(digest=Digest(row["digest"]), **values)
