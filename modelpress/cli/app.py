"""All commands, and what becomes of whatever they raise."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from modelpress import __version__
from modelpress.cli import evidence, jobs, submit
from modelpress.cli.commands import add_command
from modelpress.cli.exits import Exit

TRACEBACK_VARIABLE = "MODELPRESS_TRACEBACK"

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""click's UsageError, from the click that this typer runs on: newer ones bring their own."""


def build_app() -> typer.Typer:
    """A new application with every command."""
    app = typer.Typer(
        name="modelpress",
        help="Compress or merge a trained model, prove what that cost, and get it back signed. Docs: docs/cli.md.",
        add_completion=False,
        invoke_without_command=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    add_command(app, "submit", submit.submit)
    add_command(app, "estimate", submit.estimate)
    add_command(app, "watch", jobs.watch)
    add_command(app, "get", jobs.get)
    add_command(app, "list", jobs.list_conversions)
    add_command(app, "cancel", jobs.cancel)
    add_command(app, "retry", jobs.retry)
    add_command(app, "download", jobs.download)
    add_command(app, "report", evidence.report)
    add_command(app, "verify", evidence.verify)
    add_command(app, "inspect", evidence.inspect)
    add_command(app, "key", evidence.key)
    return app


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns its exit code and raises nothing."""
    try:
        return int(build_app()(args=list(arguments), prog_name="modelpress", standalone_mode=False) or Exit.OK)
    except UsageError as fault:
        return _fail(Exit.INVALID_REQUEST, f"error: {fault.format_message()}")  # type: ignore[attr-defined]
    except (KeyboardInterrupt, typer.Abort):
        return _fail(Exit.INTERRUPTED, "interrupted")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.INTERNAL
    except Exception as fault:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        what = f"{type(fault).__name__}: {fault}"
        return _fail(Exit.INTERNAL, f"error: modelpress itself failed ({what}): {TRACEBACK_VARIABLE}=1 shows where")


def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"modelpress {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(Exit.INVALID_REQUEST)


def _fail(code: Exit, sentence: str) -> Exit:
    print(" ".join(sentence.split()), file=sys.stderr)
    return code
