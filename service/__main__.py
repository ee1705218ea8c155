"""`python -m service`: the service until SIGTERM or Ctrl-C, then a graceful end.

Prints one line with the address on standard output once it can be called; everything else is JSON lines on standard
error. Exit codes: 0 after a graceful end, 2 where it cannot start, with one sentence that says why.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from modelpress.errors import ModelpressError
from service.app import serve
from service.config import Config, load_config
from service.logs import configure_logging

CANNOT_START = 2


def main() -> int:
    arguments = _parser().parse_args()
    try:
        config = load_config(arguments.config, os.environ, _overrides(arguments))
        configure_logging(config.server.log_level)
        _delete(arguments.ready_file)
        asyncio.run(_serve(config, arguments.ready_file))
    except ModelpressError as error:
        print(f"modelpress: {error.message}", file=sys.stderr)
        return CANNOT_START
    finally:
        _delete(arguments.ready_file)
    return 0


async def _serve(config: Config, ready_file: Path | None) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    def announce(address: str) -> None:
        print(f"modelpress serves at {address}", flush=True)
        if ready_file:
            _write_atomically(ready_file, address)

    await serve(config, announce=announce, stop=stop)


def _delete(file: Path | None) -> None:
    """The ready file is there exactly while the server can be called."""
    if file:
        file.unlink(missing_ok=True)


def _write_atomically(file: Path, text: str) -> None:
    """A reader finds no file or the whole text."""
    draft = file.with_name(f".{file.name}.draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(file)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m service", description="The modelpress service.")
    parser.add_argument("--config", type=Path, help="TOML file; docs/configuration.md lists every field")
    parser.add_argument("--data", type=Path, help="folder of everything that the server keeps (storage.data)")
    parser.add_argument("--port", type=int, help="TCP port, 0 for any free one (server.port)")
    parser.add_argument("--ready-file", type=Path, help="written with host:port once the server can be called")
    return parser


def _overrides(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    given = {("storage", "data"): arguments.data, ("server", "port"): arguments.port}
    overrides: dict[str, dict[str, Any]] = {}
    for (section, field), value in given.items():
        if value is not None:
            overrides.setdefault(section, {})[field] = value
    return overrides


if __name__ == "__main__":
    sys.exit(main())
