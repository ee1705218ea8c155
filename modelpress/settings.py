"""Where the client finds its server and its token: flag, then environment, then file.

    address      --address      MODELPRESS_ADDRESS      address = "https://modelpress.example:8471"
    tls_ca       --tls-ca       MODELPRESS_TLS_CA       tls_ca = "/etc/ssl/modelpress-ca.pem"
    token_file   --token-file   MODELPRESS_TOKEN_FILE   token_file = "/run/secrets/modelpress"
    token        (no flag)      MODELPRESS_TOKEN        token = "..."

The file is `config.toml` in the user's configuration folder for modelpress, or the one that MODELPRESS_CONFIG names.
There is no flag for the token itself, because other users of a machine can read the arguments of a process.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import platformdirs
from pydantic import Field, field_validator

from modelpress.connection import DEFAULT_ADDRESS, Endpoint
from modelpress.documents import Document, read_value
from modelpress.errors import InvalidRequest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIX = "MODELPRESS_"
FILE_VARIABLE = "MODELPRESS_CONFIG"


class Settings(Document):
    """One layer of settings. None: not set here."""

    address: str | None = None
    tls_ca: Path | None = None
    token_file: Path | None = None
    token: str | None = Field(default=None, repr=False)

    @field_validator("token", mode="before")
    @classmethod
    def _is_text(cls, value: object) -> object:
        """Checked before pydantic does, whose message would repeat the value."""
        if value is not None and not isinstance(value, str):
            raise ValueError("must be text")
        return value


def find_endpoint(flags: Settings, environment: Mapping[str, str]) -> Endpoint:
    """The first layer that sets a value decides; of `token` and `token_file` one layer may set only one."""
    layers = (flags, _from_environment(environment), _from_file(environment))
    addresses = (layer.address for layer in layers)
    authorities = (layer.tls_ca for layer in layers)
    return Endpoint(
        address=next((address for address in addresses if address), DEFAULT_ADDRESS),
        token=next((token for token in map(_token, layers) if token), None),
        tls_ca=next((tls_ca for tls_ca in authorities if tls_ca), None),
    )


def _token(layer: Settings) -> str | None:
    if layer.token and layer.token_file:
        raise InvalidRequest("both token and token_file are set: set one of them", field="token_file")
    if layer.token_file is None:
        return layer.token
    try:
        text = layer.token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise InvalidRequest(f"cannot read the token file {str(layer.token_file)!r}", field="token_file") from None
    if not text:
        raise InvalidRequest(f"the token file {str(layer.token_file)!r} is empty", field="token_file")
    return text


def _from_environment(environment: Mapping[str, str]) -> Settings:
    """An empty variable is one that is not set."""
    found = {name: environment.get(PREFIX + name.upper()) for name in Settings.model_fields}
    return read_value(Settings, {name: value for name, value in found.items() if value}, InvalidRequest)


def _from_file(environment: Mapping[str, str]) -> Settings:
    """The named file must be there; the default one need not."""
    named = environment.get(FILE_VARIABLE)
    file = Path(named) if named else platformdirs.user_config_path("modelpress") / "config.toml"
    try:
        return read_value(Settings, tomllib.loads(file.read_text(encoding="utf-8")), InvalidRequest)
    except FileNotFoundError:
        if named:
            raise InvalidRequest(f"{FILE_VARIABLE} names {named!r}, which is not there", field="config") from None
        return Settings()
    except OSError as error:
        raise InvalidRequest(f"cannot read the settings file {str(file)!r}: {error.strerror}", field="config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise InvalidRequest(f"the settings file {str(file)!r} is not TOML", field="config") from None
    except InvalidRequest as fault:
        raise InvalidRequest(f"the settings file {str(file)!r}: {fault.message}", field="config") from None
