"""Small real operations for tests of the machinery: they write files, take time, crash and run out of memory."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from compressors.stages import Progress
from modelpress.digests import Digest
from modelpress.errors import InvalidModel
from modelpress.manifests import FileEntry
from modelpress.stored_folders import Sink, Source
from service.workers.protocol import Operation, Task, TaskResult


def write(task: Task) -> TaskResult:
    """Write a file that follows from arguments, seed and inputs, and say who ran."""
    text = "|".join([str(task.step.arguments), str(task.step.seed), *_contents(task)])
    (task.output / "result.txt").write_text(hashlib.sha256(text.encode()).hexdigest())
    (task.evidence / "proof.txt").write_text("proof of " + task.step.name)
    return TaskResult({"length": len(text), "threads": task.threads})


def measure(task: Task) -> TaskResult:
    """Figures only, and another one at every run: the process and the time."""
    return TaskResult({"process": os.getpid(), "time": time.time()})


def train(task: Task) -> TaskResult:
    """Count to `steps` with a checkpoint at each, from the newest checkpoint on; `crash_at` ends the process there."""
    arguments = task.step.arguments
    folder = task.monitor.checkpoint()
    start = int((folder / "state.txt").read_text()) if folder else 0
    state = start
    while state < arguments["steps"]:
        state += 1
        task.monitor.save_checkpoint(state, partial(_write_state, state))
        task.monitor.progress(Progress(state, arguments["steps"], loss=1.0 / state))
        if state == arguments.get("crash_at") and start == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    (task.output / "state.txt").write_text(f"{state}")
    return TaskResult({"started_from": start})


def stream(task: Task) -> TaskResult:
    """Write `parts` files of the input's bytes from the store to the store, with a checkpoint after each."""
    source, folder = task.stored["model"], task.monitor.checkpoint()
    for path, size_bytes, digest in json.loads((folder / "parts.json").read_text()) if folder else ():
        task.sink.keep(FileEntry(path, size_bytes, Digest(digest)))
    kept = len(task.sink.entries)
    for number in range(kept, task.step.arguments["parts"]):
        with task.sink.write(f"part-{number}") as write:
            write(f"{number}".encode())
            for path in source.files:
                write(_streamed(source, path))
        task.monitor.save_checkpoint(number, partial(_write_entries, task.sink))
    return TaskResult({"kept": kept, "fetched": (Path.cwd() / "inputs").exists()})


def litter(task: Task) -> TaskResult:
    """Write into both, the output folder and the sink."""
    (task.output / "result.txt").write_text("a")
    with task.sink.write("result.txt") as write:
        write(b"b")
    return TaskResult({})


def wait(task: Task) -> TaskResult:
    """Take `seconds`; with `deaf`, ignore SIGTERM."""
    if task.step.arguments.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end = time.monotonic() + task.step.arguments["seconds"]
    while time.monotonic() < end:
        task.monitor.progress(Progress(0, 1))
        time.sleep(0.05)
    return TaskResult({})


def crash(task: Task) -> TaskResult:
    os.kill(os.getpid(), task.step.arguments["signal"])
    return TaskResult({})


def leave(task: Task) -> TaskResult:
    os._exit(3)


def refuse(task: Task) -> TaskResult:
    raise InvalidModel("tensor 'w' holds NaN: upload weights that are finite", field="w")


def stumble(task: Task) -> TaskResult:
    raise ZeroDivisionError("secret of /srv/keys")


def allocate(task: Task) -> TaskResult:
    """Hold `megabytes` of memory."""
    held = [bytearray(1 << 20) for _ in range(task.step.arguments["megabytes"])]
    return TaskResult({"held": len(held)})


def blame(task: Task) -> TaskResult:
    """Hold `megabytes` of memory, and take it for the model's fault where there are not so many."""
    try:
        return allocate(task)
    except MemoryError:
        raise InvalidModel("the model fails on 4 x 512 tokens: its config.json and its weights disagree") from None


def look(task: Task) -> TaskResult:
    """What the process sees of its surroundings."""
    return TaskResult(
        {
            "environment": sorted(os.environ),
            "folder": str(Path.cwd()),
            "session": os.getsid(0) == os.getpid(),
            "group": os.getpgid(0) == os.getpid(),
        }
    )


def spawn(task: Task) -> TaskResult:
    """Start a child process and wait for it."""
    subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"], check=True)
    return TaskResult({})


def operations() -> Mapping[str, Operation]:
    functions = (
        write,
        measure,
        train,
        stream,
        litter,
        wait,
        crash,
        leave,
        refuse,
        stumble,
        allocate,
        blame,
        look,
        spawn,
    )
    return {function.__name__: Operation(function, 1) for function in functions}


def _contents(task: Task) -> list[str]:
    files = [(role, file) for role, folder in sorted(task.inputs.items()) for file in sorted(folder.iterdir())]
    return [f"{role}/{file.name}:{file.read_text()}" for role, file in files]


def _streamed(source: Source, path: str) -> memoryview:
    buffer = memoryview(bytearray(source.files[path].size_bytes))
    with source.stream(path) as file:
        file.read_into(buffer)
        file.finish()
    return buffer


def _write_entries(sink: Sink, folder: Path) -> None:
    entries = [(entry.path, entry.size_bytes, str(entry.digest)) for entry in sink.entries.values()]
    (folder / "parts.json").write_text(json.dumps(entries))


def _write_state(state: int, folder: Path) -> None:
    (folder / "state.txt").write_text(f"{state}")
    (folder / "constant.txt").write_text("the same in every checkpoint")
