"""The `modelpress` command. See docs/cli.md."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line and exit with its code."""
    from modelpress.cli.app import run

    sys.exit(run(sys.argv[1:]))
