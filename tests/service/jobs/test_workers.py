"""Worker processes: what they begin with, what they see, and that nothing of them is left."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from compressors.compute_types import products_dtype
from modelpress.errors import FailedPrecondition, InternalError
from service.steps import Step
from service.workers.limits import is_out_of_memory
from service.workers.pool import Listener, PoolSettings, WorkerDied, WorkerPool
from service.workers.probe import cpu_capability, probe
from service.workers.protocol import receive, send, step_from_json, step_to_json
from tests.service.jobs.served import ROOT
from tests.service.jobs.tiny_operations import operations

LISTENER = Listener(progress=lambda body: None, checkpoint=lambda digest: None)
LIMIT_BYTES = 2 << 30


@pytest.fixture
def pool(tmp_path: Path, facts) -> WorkerPool:
    return WorkerPool(PoolSettings(str(tmp_path / "store"), tmp_path / "scratch", 1, "cpu", operations))


def open_worker(pool: WorkerPool, attempt: int = 1):
    worker = pool.open("c", attempt=attempt, device="cpu", memory_limit_bytes=LIMIT_BYTES)
    return worker, worker.receive()


def test_a_worker_begins_with_everything_imported_and_one_thread(pool):
    worker, (kind, body) = open_worker(pool)
    try:
        assert (kind, body) == ("ready", {"preloaded": True})
        assert psutil.Process(worker.pid).num_threads() == 1
    finally:
        worker.close()


def test_the_probe_tells_versions_device_and_what_isolates_a_worker(facts):
    environment = facts.environment
    assert environment.versions["torch"].startswith("2.")
    assert (environment.device, facts.device, environment.threads) == ("cpu", "cpu", 1)
    assert environment.cpu_capability
    assert "not isolated" in environment.isolation
    assert facts.operations["train"] == 1


def test_every_part_of_the_environment_is_in_the_cache_key(facts):
    step = Step("a", "write", {}, {}, 1)
    assert set(facts.key_environment(step)) == {"operation_version", "versions", "device", "cpu_capability", "threads"}
    with pytest.raises(InternalError, match="known are"):
        facts.key_environment(Step("a", "nothing", {}, {}, 1))


def test_cpus_that_train_in_other_types_have_other_cache_keys(facts):
    """SignRound and quantization-aware training compute bfloat16 products where there are units for them."""
    assert cpu_capability("AVX512", features={"amx_bf16": True}) == "AVX512 amx_bf16"
    assert cpu_capability("AVX512", features={"amx_bf16": False}) == cpu_capability("AVX512", features={}) == "AVX512"
    trains_in_bfloat16 = products_dtype(torch.device("cpu")) == torch.bfloat16
    assert facts.environment.cpu_capability.endswith("amx_bf16") == trains_in_bfloat16


def test_a_device_that_is_not_there_is_refused_at_the_start(pool):
    settings = PoolSettings(pool.settings.store_url, pool.settings.scratch, 1, "cuda", operations)
    with pytest.raises(FailedPrecondition, match=r"workers\.device is 'cuda'"):
        probe(WorkerPool(settings))


def test_a_misspelt_preload_is_found_at_the_start(tmp_path):
    """In a process of its own: a process has one forkserver."""
    program = f"""
from pathlib import Path
from service.workers.pool import PoolSettings, WorkerPool
from service.workers.probe import cpu_capability, probe
from tests.service.jobs.tiny_operations import operations
folder = Path({str(tmp_path)!r})
try:
    probe(WorkerPool(PoolSettings(str(folder / "store"), folder, 1, "cpu", operations, "service.workers.prelaod")))
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("FailedPrecondition the forkserver did not import its preload")
    assert "No module named 'service.workers.prelaod'" in done.stdout


def test_a_worker_that_cannot_be_forked_died_and_the_next_one_starts(tmp_path):
    """The process that forks workers is killed; in a process of its own, because there is one for each."""
    program = f"""
import os, signal
from multiprocessing import forkserver
from pathlib import Path
from service.workers.pool import PoolSettings, WorkerDied, WorkerPool
from tests.service.jobs.tiny_operations import operations
folder = Path({str(tmp_path)!r})
pool = WorkerPool(PoolSettings(str(folder / "store"), folder, 1, "cpu", operations))
first = pool.open("one", attempt=1, device="cpu", memory_limit_bytes=1 << 32)
first.receive()
os.kill(forkserver._forkserver._forkserver_pid, signal.SIGSTOP)
os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
for attempt in range(2, 9):
    try:
        pool.open("one", attempt=attempt, device="cpu", memory_limit_bytes=1 << 32).receive()
        break
    except WorkerDied as error:
        print(error.message)
print("started")
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("started\n"), done.stderr


def test_a_worker_takes_its_children_with_it_and_leaves_no_folder(pool):
    worker, _ = open_worker(pool)
    thread = threading.Thread(target=pytest.raises, args=(WorkerDied, worker.run, sleeper(), None, LISTENER))
    thread.start()
    process = psutil.Process(worker.pid)
    while not (children := process.children()):
        pass
    worker.stop()
    thread.join()
    psutil.wait_procs(children, timeout=5)
    assert not any(child.is_running() for child in children)
    worker.close()
    assert list(pool.scratch.iterdir()) == []


def sleeper() -> Step:
    return Step("first", "spawn", {}, {}, 1)


def test_a_worker_dies_with_the_service(tmp_path):
    """The service is killed without a chance to clean up; its worker must not compute on."""
    program = f"""
import os, signal
from pathlib import Path
from service.workers.pool import PoolSettings, WorkerPool
from tests.service.jobs.tiny_operations import operations
folder = Path({str(tmp_path)!r})
pool = WorkerPool(PoolSettings(str(folder / "store"), folder, 1, "cpu", operations, "service.workers.process"))
worker = pool.open("c", attempt=1, device="cpu", memory_limit_bytes={LIMIT_BYTES})
worker.receive()
print(worker.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(killed.stdout)).wait(timeout=10)


def test_messages_are_json_and_survive_the_pipe():
    ours, theirs = multiprocessing.Pipe()
    step = Step("a", "write", {"x": [1, 2.5, None]}, {}, 3)
    send(ours, "run", {"step": step_to_json(step)})
    kind, body = receive(theirs)
    assert (kind, step_from_json(body["step"])) == ("run", step)
    ours.send_bytes(json.dumps(["no object"]).encode())
    with pytest.raises(InternalError, match="one JSON object"):
        receive(theirs)
    with pytest.raises(ValueError, match="not JSON compliant"):
        send(ours, "done", {"accuracy": float("nan")})
    ours.close()
    with pytest.raises(EOFError):
        receive(theirs)
    theirs.close()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("could not create a primitive"),
    ],
)
def test_every_library_s_way_to_say_out_of_memory_is_understood(error):
    assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
