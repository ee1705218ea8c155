"""A command is a function `run(options, output) -> Exit`, its options a frozen dataclass: one field, one option.

    @dataclass(frozen=True, kw_only=True)
    class GetOptions(ServerOptions):
        name: Annotated[str, typer.Argument(help="conversions/<id>, or the id.")]

    def get(options: GetOptions, output: Output) -> Exit:
        "Show one conversion."

`add_command` makes typer see the fields as the function's parameters.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from modelpress.cli.exits import Exit
from modelpress.cli.output import JsonOutput, Output, TextOutput
from modelpress.errors import ModelpressError

if TYPE_CHECKING:
    from modelpress.client import Client

_CONNECTION = "Connection (flag, then environment, then settings file)"


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")] = (
        False
    )


@dataclass(frozen=True, kw_only=True)
class ServerOptions(CommonOptions):
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="HOST:PORT",
            rich_help_panel=_CONNECTION,
            help="The server; https://HOST:PORT for TLS. MODELPRESS_ADDRESS; default 127.0.0.1:8471.",
        ),
    ] = None
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            "--tls-ca",
            metavar="FILE",
            rich_help_panel=_CONNECTION,
            help="CA certificate (PEM) that the server's certificate must come from; means TLS. MODELPRESS_TLS_CA.",
        ),
    ] = None
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="FILE",
            rich_help_panel=_CONNECTION,
            help="File that holds the bearer token. MODELPRESS_TOKEN_FILE, or the token itself in MODELPRESS_TOKEN.",
        ),
    ] = None


OptionsT = TypeVar("OptionsT", bound=CommonOptions)


def open_client(options: ServerOptions) -> Client:
    """The client for the settings that flags, environment and file give together."""
    from modelpress.client import Client
    from modelpress.settings import Settings, find_endpoint

    flags = Settings(address=options.address, tls_ca=options.tls_ca, token_file=options.token_file)
    endpoint = find_endpoint(flags, os.environ)
    return Client(endpoint.address, token=endpoint.token, tls_ca=endpoint.tls_ca)


def add_command(app: typer.Typer, name: str, run: Callable[[OptionsT, Output], Exit]) -> None:
    """Give `app` the command `name`; its help is `run`'s docstring."""
    hints = get_type_hints(run)
    options_type: type[OptionsT] = hints["options"]

    def command(**values: Any) -> int:
        options = options_type(**values)
        output: Output = JsonOutput() if options.json else TextOutput()
        try:
            return run(options, output)
        except ModelpressError as error:
            return output.error(error)

    command.__signature__ = _signature(options_type)  # type: ignore[attr-defined]
    command.__doc__ = run.__doc__
    app.command(name)(command)


def _signature(options_type: type[CommonOptions]) -> inspect.Signature:
    """A command's own options first, then those that it shares with others."""
    hints = get_type_hints(options_type, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(options_type)}
    names = [name for kind in options_type.__mro__ for name in inspect.get_annotations(kind) if name in fields]
    return inspect.Signature([_parameter(fields[name], hints[name]) for name in names])


def _parameter(field: dataclasses.Field[Any], annotation: Any) -> inspect.Parameter:
    default: Any = inspect.Parameter.empty
    if field.default is not dataclasses.MISSING:
        default = field.default
    elif field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
