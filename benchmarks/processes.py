"""One program in a process of its own: how long it lived, what it cost, and the most memory that it had.

    measured = measure("benchmarks.merge_floor", from_folder, to_folder)

The program's last line on stdout is JSON, from `say`. A process begins with the peak of the one that started it, also
over exec: this module runs as a small process in between, which starts the program and waits for it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
UNLIMITED = resource.RLIM_INFINITY


@dataclass(frozen=True)
class Measured:
    """`imports_s`: from the program's start until its work began. `work_s`: from then on until `say`; the interpreter's
    end is in `whole_s` only. `peak_bytes`: resident. `said`: what it printed.
    """

    whole_s: float
    imports_s: float
    work_s: float
    cpu_s: float
    peak_bytes: int
    said: Mapping[str, Any]

    @property
    def peak_mib(self) -> float:
        return self.peak_bytes / (1 << 20)


def measure(
    module: str, *arguments: str | Path, data_limit_bytes: int = UNLIMITED, python: str | Path = sys.executable
) -> Measured:
    """Run `python -m module arguments` to its end; SystemExit with what it printed where it failed.

    `data_limit_bytes` bounds its private writable memory, touched or not (RLIMIT_DATA). `python` is the interpreter of
    a peer's own environment.
    """
    program = [str(python), "-m", module, *map(str, arguments)]
    command = [sys.executable, "-S", "-m", "benchmarks.processes", str(data_limit_bytes), *program]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise SystemExit(f"{module} failed:\n{output}{errors}")
    *_, said, usage = (json.loads(line) for line in output.splitlines() if line.startswith("{"))
    return Measured(
        whole_s=usage["end"] - usage["start"],
        imports_s=said["begun"] - usage["start"],
        work_s=said["done"] - said["begun"],
        cpu_s=usage["cpu_s"],
        peak_bytes=usage["peak_bytes"],
        said=said,
    )


def clock() -> float:
    """Seconds by a clock that all processes share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def say(begun: float, **values: str | float) -> None:
    """What a measured program says when its work is done: by `clock`, when it had begun; and anything else."""
    print(json.dumps({"begun": begun, "done": clock(), **values}), flush=True)


def main(data_limit: int, program: list[str]) -> int:
    """Start the program, wait for it, print its cost; its exit status."""
    resource.setrlimit(resource.RLIMIT_DATA, (data_limit, data_limit))
    start = clock()
    process = os.posix_spawn(program[0], program, os.environ)
    _, status, usage = os.wait4(process, 0)
    end, cpu_s = clock(), usage.ru_utime + usage.ru_stime
    print(json.dumps({"start": start, "end": end, "cpu_s": cpu_s, "peak_bytes": usage.ru_maxrss << 10}), flush=True)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
