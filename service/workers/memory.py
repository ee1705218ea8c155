"""Peak memory of this process as the kernel counts it (Linux); the mark can be set back, for one peak per step."""

from __future__ import annotations

from pathlib import Path

_CLEAR_PEAK = "5"


def reset_peak_memory() -> None:
    """Start counting anew. Where the kernel does not allow it, peaks are those of the whole process so far."""
    try:
        Path("/proc/self/clear_refs").write_text(_CLEAR_PEAK)
    except OSError:
        return


def peak_memory_bytes() -> int:
    """Largest resident set since the last reset, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("the kernel reports no VmHWM")
