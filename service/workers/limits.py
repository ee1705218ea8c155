"""The memory limit of a worker process: a ceiling that it cannot pass, and a look from outside at what it uses.

RLIMIT_DATA bounds what the process allocates. The look from outside also sees child processes. RLIMIT_AS is never
set: CUDA reserves address space far beyond what it uses.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator

import psutil

NEAR = 0.9
"""A process that is killed or aborts when it uses this share of its limit is taken to have died of it."""

_SENTENCES = (
    "can't allocate memory",
    "not enough memory",
    "Cannot allocate memory",
    "bad_alloc",
    "bad allocation",
    "Failed to allocate memory",
    "could not create a primitive",
    "could not create a memory",
    "CUDA out of memory",
    "OutOfMemory",
)
"""How torch, the C++ library, ONNX Runtime, oneDNN and CUDA say it when they raise something that is no MemoryError."""


def limit_memory(limit_bytes: int) -> None:
    """Let this process, and each of its children, hold at most `limit_bytes` of private memory; write no core file."""
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def memory_bytes(pid: int) -> int:
    """Private memory in use by the process and its descendants; 0 where it is gone. Cached files do not count."""
    try:
        process = psutil.Process(pid)
        return sum(_private_bytes(each) for each in (process, *process.children(recursive=True)))
    except psutil.NoSuchProcess:
        return 0


def is_out_of_memory(error: BaseException) -> bool:
    """True for every way in which the libraries of a worker say that an allocation failed, also where that was taken
    for another fault and `error` raised because of it: whoever asks a library to run a model cannot tell them apart.
    """
    return any(map(_tells_so, _causes(error)))


def _tells_so(error: BaseException) -> bool:
    text = f"{type(error).__name__}: {error}"
    return isinstance(error, MemoryError) or any(sentence in text for sentence in _SENTENCES)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and what was being handled when it was raised, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _private_bytes(process: psutil.Process) -> int:
    try:
        used = process.memory_info()
    except psutil.NoSuchProcess:
        return 0
    return int(used.rss - used.shared)
