"""The configuration: documented, layered, and refused where it would be unsafe."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from modelpress.errors import InvalidRequest
from service.config import Config, load_config

SHA256 = hashlib.sha256(b"token").hexdigest()
DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"


def rows() -> list[str]:
    """One table row per field, as docs/configuration.md must have it."""
    shown = {Path: "the platform's user data folder"}
    found = []
    for section, field in Config.model_fields.items():
        kind: Any = field.annotation
        for name, item in kind.model_fields.items():
            default = shown[Path] if item.default_factory else item.default
            text = {None: "none", "": "empty", (): "empty"}.get(default, str(default))
            found.append(f"| `{section}.{name}` | {text} | {' '.join((item.description or '').split())} |")
    return found


def test_every_field_stands_in_the_documentation_with_its_default() -> None:
    assert [row for row in rows() if row not in DOCUMENT.read_text()] == []
    assert DOCUMENT.read_text().count("\n| `") == len(rows())


def test_the_later_source_wins(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[server]\nport = 1\ngrace_s = 1\nthreads = 1\n")
    environment = {
        "MODELPRESS_SERVER_PORT": "2",
        "MODELPRESS_SERVER_GRACE_S": "2",
        "MODELPRESS_KILL_AT": "x",
        "PATH": "",
    }
    server = load_config(tmp_path / "c.toml", environment, {"server": {"port": 3}}).server
    assert (server.port, server.grace_s, server.threads) == (3, 2.0, 1)


def test_everything_lies_in_the_data_folder_by_default(tmp_path: Path) -> None:
    config = load_config(None, {"MODELPRESS_STORAGE_DATA": str(tmp_path)})
    assert config.database_url == f"sqlite:///{tmp_path}/modelpress.sqlite"
    assert (config.store_url, config.scratch) == (f"{tmp_path}/store", tmp_path / "scratch")
    relative = load_config(None, {"MODELPRESS_STORAGE_STORE_URL": "blobs", "MODELPRESS_STORAGE_DATA": "data"})
    assert Path(relative.store_url).is_absolute() and relative.scratch.is_absolute()
    assert load_config(None, {"MODELPRESS_STORAGE_STORE_URL": "s3://b/p"}).store_url == "s3://b/p"
    assert config.worker_threads >= 1 and config.worker_memory_bytes > 1 << 30


def test_slots_share_cores_and_memory() -> None:
    one, two = (load_config(None, {"MODELPRESS_WORKERS_SLOTS": slots}) for slots in ("1", "2"))
    assert two.worker_threads == max(1, one.worker_threads // 2)
    assert two.worker_memory_bytes == one.worker_memory_bytes // 2


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.0.2.1", "example.org"])  # noqa: S104
def test_an_address_beyond_loopback_needs_tls_and_tokens(address: str) -> None:
    tls = {"MODELPRESS_SERVER_TLS_CERTIFICATE": "c.pem", "MODELPRESS_SERVER_TLS_KEY": "k.pem"}
    tokens = {"MODELPRESS_IDENTITY_TOKENS": f'[{{"name": "ci", "sha256": "{SHA256}"}}]'}
    place = {"MODELPRESS_SERVER_ADDRESS": address}
    for part in ({}, tls, tokens):
        with pytest.raises(InvalidRequest, match="reachable from other machines"):
            load_config(None, place | part)
    assert load_config(None, place | tls | tokens).identity.tokens[0].tenant == "default"


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_nothing(address: str) -> None:
    assert load_config(None, {"MODELPRESS_SERVER_ADDRESS": address}).server.is_loopback


@pytest.mark.parametrize(
    "tokens",
    [
        'tokens = ["s3cret"]',
        'tokens = "s3cret"',
        'tokens = [{name = "ci", token = "s3cret"}]',
        'tokens = [{name = "ci", sha256 = "s3cret"}]',
        f'tokens = [{{name = "ci", sha256 = "{SHA256}", token = "s3cret"}}]',
    ],
)
def test_a_plain_token_is_refused_and_never_repeated(tmp_path: Path, tokens: str) -> None:
    (tmp_path / "c.toml").write_text(f"[identity]\n{tokens}\n")
    with pytest.raises(InvalidRequest, match=r"plain text|token: unknown field") as caught:
        load_config(tmp_path / "c.toml", {})
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "mentions"),
    [
        ("[server]\nprot = 1", "did you mean 'port'"),
        ("[sever]\nport = 1", "did you mean 'server'"),
        ("[server]\nport = 70000", "server.port"),
        ("server = 3", "server"),
        ("[server", "not TOML"),
        ('[server]\ntls_key = "k.pem"', "set both or neither"),
        (f'identity.tokens = [{{name="a", sha256="{SHA256}"}}, {{name="b", sha256="{SHA256}"}}]', "same sha256"),
    ],
)
def test_a_mistake_is_one_sentence_naming_the_field(tmp_path: Path, text: str, mentions: str) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(InvalidRequest) as caught:
        load_config(tmp_path / "c.toml", {"MODELPRESS_SERVER_PORT": "1"} if text == "server = 3" else {})
    assert mentions in str(caught.value)


def test_a_missing_file_is_named_without_its_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"'none\.toml': No such file") as caught:
        load_config(tmp_path / "none.toml", {})
    assert str(tmp_path) not in str(caught.value)
