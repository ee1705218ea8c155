"""`python -m benchmarks [NAME]`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from benchmarks import demo, fourbit, fourbit_large, merge, service

BENCHMARKS: Mapping[str, Callable[[], None]] = {
    "service": service.run,
    "demo": demo.run,
    "merge": merge.run,
    "fourbit": fourbit.run,
    "fourbit_large": fourbit_large.run,
}


def main(names: list[str]) -> None:
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        raise SystemExit(f"unknown benchmark {unknown[0]!r}; known: {', '.join(BENCHMARKS)}")
    for name in names or BENCHMARKS:
        BENCHMARKS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
