"""Named points before and after every durable write, where a test can end the process.

    MODELPRESS_KILL_AT=store.put.before:2    SIGKILL at the second time that a process passes this point
    MODELPRESS_KILL_MARK=/tmp/killed         only once, whatever processes follow: the file is made at the kill

Without the first variable a point does nothing. `POINTS` lists them all, so that a test can visit every one; a name
that is not in it raises at once.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

VARIABLE = "MODELPRESS_KILL_AT"
MARK_VARIABLE = "MODELPRESS_KILL_MARK"

POINTS: tuple[str, ...] = (
    "store.put.unsynced",
    "store.put.before",
    "store.put.after",
    "upload.create.before",
    "upload.create.after",
    "upload.write.unsynced",
    "upload.write.after",
    "upload.complete.before",
    "upload.complete.after",
    "artifact.create.before",
    "artifact.create.after",
    "signing.key.before",
    "signing.key.after",
    "publication.store.before",
    "publication.store.after",
    "conversion.create.before",
    "conversion.create.after",
    "dispatcher.claim.before",
    "dispatcher.claim.after",
    "sink.file.before",
    "sink.file.after",
    "worker.output.before",
    "worker.output.after",
    "worker.checkpoint.before",
    "worker.checkpoint.after",
    "desk.checkpoint.before",
    "desk.checkpoint.after",
    "desk.step.before",
    "desk.step.after",
    "attempt.finish.before",
    "attempt.finish.after",
)
"""Filled in by the modules' own order on the main path."""

_passed: Counter[str] = Counter()


def fault_point(name: str) -> None:
    """Pass a point: SIGKILL to this process where the environment asks for it, else nothing."""
    if name not in POINTS:
        raise LookupError(f"fault point {name!r} is not listed in service.faults.POINTS")
    wanted, _, count = os.environ.get(VARIABLE, "").partition(":")
    if name == wanted:
        _passed[name] += 1
        if _passed[name] == int(count or 1) and _is_first():
            os.kill(os.getpid(), signal.SIGKILL)


def _is_first() -> bool:
    """Whether no process was killed under this mark yet."""
    mark = os.environ.get(MARK_VARIABLE)
    try:
        if mark:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
