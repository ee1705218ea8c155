"""What this process may use of its machine, containers' limits included."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Cores of the affinity mask, fewer where a cgroup's CPU quota says so; at least 1."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def usable_memory_bytes() -> int:
    """Physical memory, or the cgroup's limit where that is smaller."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        return min(physical, int((_CGROUP / "memory.max").read_text()))
    return physical
