"""The configuration: one frozen value, read from TOML and from the environment, with a default for every field.

    [server]                                 MODELPRESS_SERVER_PORT=9000 stands above the file;
    port = 9000                              lists are written there as JSON

    >>> load_config(None, {"MODELPRESS_SERVER_PORT": "9000"}).server.port
    9000

Every field with its default stands in docs/configuration.md. An unknown field or a value that cannot be is one
InvalidRequest naming the field; secrets are never repeated in its message.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import platformdirs
import tomllib
from pydantic import Field, field_validator, model_validator

from modelpress.documents import Document, read_value
from modelpress.errors import InvalidRequest
from service.machine import usable_cores, usable_memory_bytes

PREFIX = "MODELPRESS_"
MEMORY_SHARE = 0.8
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"
_ONLY_HASHES = (
    "a token never stands here in plain text: give the 64 lower-case hex digits of its SHA-256 as 'sha256' "
    '(printf %s "$TOKEN" | sha256sum)'
)


class Server(Document):
    address: str = "127.0.0.1"
    """Address to listen on. Any other than loopback needs TLS and tokens."""
    port: int = Field(default=8471, ge=0, le=65535)
    """TCP port; 0: any free one, which is printed."""
    tls_certificate: Path | None = None
    """PEM file with the certificate chain."""
    tls_key: Path | None = None
    """PEM file with its private key."""
    grace_s: float = Field(default=10.0, ge=0, le=3600)
    """Seconds that calls in progress are given when the server stops."""
    threads: int = Field(default=8, ge=1, le=256)
    """Threads for disk, hashing and database; the event loop does none of it."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is logged."""

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.address).is_loopback
        except ValueError:
            return self.address == "localhost"


class Token(Document):
    """A bearer token, known by its hash only."""

    name: str = Field(pattern=_NAME)
    tenant: str = Field(default="default", pattern=_NAME)
    sha256: str

    @field_validator("sha256")
    @classmethod
    def _is_a_hash(cls, value: str) -> str:
        if not _SHA256.fullmatch(value):
            raise ValueError(_ONLY_HASHES)
        return value


class Identity(Document):
    tokens: tuple[Token, ...] = ()
    """Bearer tokens, each with `name`, `tenant` and `sha256`. Empty: every caller is `local` of tenant `default`."""

    @field_validator("tokens", mode="before")
    @classmethod
    def _are_not_plain(cls, value: Any) -> Any:
        """Before anything else looks, because the message of another check would repeat the secret."""
        for entry in value if isinstance(value, (list, tuple)) else [value]:
            if not (isinstance(entry, Token) or (isinstance(entry, dict) and "sha256" in entry)):
                raise ValueError(_ONLY_HASHES)
        return value

    @model_validator(mode="after")
    def _is_unambiguous(self) -> Identity:
        for what, values in (("name", [t.name for t in self.tokens]), ("sha256", [t.sha256 for t in self.tokens])):
            if len(set(values)) != len(values):
                raise ValueError(f"two tokens have the same {what}: each caller has a name and a token of its own")
        return self


class Storage(Document):
    data: Path = Field(default_factory=lambda: platformdirs.user_data_path("modelpress"))
    """Folder of everything that the server keeps, unless a URL below says otherwise."""
    database_url: str = ""
    """SQLAlchemy URL of the database. Empty: SQLite in `data`."""
    store_url: str = ""
    """Folder or object store URL (`s3://bucket/prefix`) of the blobs. Empty: `store` in `data`."""


class Workers(Document):
    slots: int = Field(default=1, ge=0, le=64)
    """Conversions that run at once, each in a process of its own; 0: this server only queues, others compute."""
    threads: int = Field(default=0, ge=0, le=1024)
    """Compute threads of each worker, part of what makes a result reproducible; 0: usable cores / `slots`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: CUDA where there is a device, else the CPU; every report says which."""
    lease_s: float = Field(default=30.0, ge=1, le=3600)
    """Seconds after which a conversion of a server that went silent is taken over."""
    max_attempts: int = Field(default=3, ge=1, le=100)
    """Times that a conversion is tried when its worker dies."""


class Signing(Document):
    key_file: Path | None = None
    """PEM file with an EC P-256 private key. Empty: a development key is made in `data` at the first start."""


class Limits(Document):
    max_blob_bytes: int = Field(default=64 << 30, ge=1)
    """Largest file that can be uploaded, bytes."""
    upload_expiry_s: float = Field(default=86_400.0, gt=0)
    """Seconds after its last byte at which an unfinished upload is deleted."""
    run_timeout_s: float = Field(default=21_600.0, gt=0)
    """Longest time that a conversion runs, where its request sets no limit."""
    memory_limit_bytes: int = Field(default=0, ge=0)
    """Largest memory of a worker where a request sets no limit; 0: 80 % of the usable memory / `workers.slots`."""


class Config(Document):
    server: Server = Server()
    identity: Identity = Identity()
    storage: Storage = Field(default_factory=Storage)
    workers: Workers = Workers()
    signing: Signing = Signing()
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _is_safe(self) -> Config:
        server = self.server
        if (server.tls_certificate is None) != (server.tls_key is None):
            raise ValueError("server.tls_certificate and server.tls_key go together: set both or neither")
        if not server.is_loopback and not (server.tls_key and self.identity.tokens):
            raise ValueError(
                f"server.address {server.address!r} is reachable from other machines: set server.tls_certificate, "
                "server.tls_key and identity.tokens, or listen on 127.0.0.1"
            )
        return self

    @property
    def database_url(self) -> str:
        return self.storage.database_url or f"sqlite:///{self.storage.data.absolute() / 'modelpress.sqlite'}"

    @property
    def store_url(self) -> str:
        """Absolute, because workers have working folders of their own."""
        url = self.storage.store_url or str(self.storage.data / "store")
        return url if "://" in url else str(Path(url).absolute())

    @property
    def scratch(self) -> Path:
        """Local folder for working copies and for files on their way to an object store."""
        return self.storage.data.absolute() / "scratch"

    @property
    def worker_threads(self) -> int:
        return self.workers.threads or max(1, usable_cores() // max(1, self.workers.slots))

    @property
    def worker_memory_bytes(self) -> int:
        return self.limits.memory_limit_bytes or int(usable_memory_bytes() * MEMORY_SHARE) // max(1, self.workers.slots)


def load_config(
    file: Path | None, environment: Mapping[str, str], overrides: Mapping[str, Mapping[str, Any]] | None = None
) -> Config:
    """Defaults, then the file, then the environment, then `overrides` (the command line): the later one wins."""
    value = _read_toml(file) if file else {}
    for layer in (_from_environment(environment), overrides or {}):
        for section, fields in layer.items():
            present = value.get(section, {})
            value[section] = {**present, **fields} if isinstance(present, dict) else present
    return read_value(Config, value, InvalidRequest)


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(f"cannot read the configuration file {file.name!r}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the configuration file {file.name!r} is not TOML: {error}") from None


def _from_environment(environment: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """`MODELPRESS_<SECTION>_<FIELD>`: text, which the field's type converts; `[` or `{` begins JSON."""
    found: dict[str, dict[str, Any]] = {}
    for name, text in environment.items():
        for section in Config.model_fields:
            if name.startswith(prefix := f"{PREFIX}{section.upper()}_"):
                found.setdefault(section, {})[name.removeprefix(prefix).lower()] = _environment_value(name, text)
    return found


def _environment_value(name: str, text: str) -> Any:
    if not text.startswith(("[", "{")):
        return text
    try:
        return json.loads(text)
    except ValueError:
        raise InvalidRequest(f"environment variable {name} begins like JSON but is none", field=name) from None
