"""Servers, a TCP proxy that cuts connections where a test says so, and the inputs of a tiny conversion.

server          one running server that the whole session shares; it has no workers, so what is queued stays queued
start_server    start_server(data) -> RunningServer, for tests that stop or kill it
proxy           proxy(server) -> CuttingProxy in front of it
patient         a RetryPolicy that reconnects quickly
inputs          the folders and files of one tiny conversion
merge_inputs    those of a merge
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from modelpress.retries import RetryPolicy
from tests.client.proxy import CuttingProxy
from tests.client.tiny import EVALUATION, POLICY, RECIPE, write_adapter, write_llama, write_model, write_rows
from tests.servers import ROOT, RunningServer, launch, servers


@pytest.fixture
def start_server() -> Iterator[Callable[..., RunningServer]]:
    with servers() as start:
        yield start


@pytest.fixture(scope="module")
def launch_server() -> Iterator[Callable[..., RunningServer]]:
    """The same for a server that a whole module shares."""
    with servers() as start:
        yield start


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = launch(tmp_path_factory.mktemp("client") / "data")
    yield running
    assert running.stop() == 0


@pytest.fixture
def proxy() -> Iterator[Callable[[RunningServer], CuttingProxy]]:
    started: list[CuttingProxy] = []

    def start(running: RunningServer) -> CuttingProxy:
        started.append(CuttingProxy(running.address))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def patient() -> RetryPolicy:
    return RetryPolicy(call_patience_s=30.0, stream_patience_s=90.0, first_delay_s=0.05, max_delay_s=0.5)


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/, eval/, train/, recipe.yaml, policy.yaml, evaluation.yaml: what `submit` needs. Read only."""
    root = tmp_path_factory.mktemp("inputs")
    write_model(root / "model")
    write_rows(root / "eval", rows=200, seed=1)
    write_rows(root / "train", rows=64, seed=2)
    for name, text in (("recipe", RECIPE), ("policy", POLICY), ("evaluation", EVALUATION)):
        (root / f"{name}.yaml").write_text(text)
    return root


@pytest.fixture(scope="session")
def merge_inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base/, other/, lora-a/, lora-b/; recipe.yaml, policy.yaml; models.yaml, change.yaml. Read only."""
    root = tmp_path_factory.mktemp("merge")
    for seed, name in enumerate(("base", "other")):
        write_llama(root / name, seed)
    for seed, name in enumerate(("lora-a", "lora-b")):
        write_adapter(root / name, seed)
    for name in ("recipe", "policy"):
        (root / f"{name}.yaml").write_text((ROOT / f"examples/merge/{name}.yaml").read_text())
    (root / "models.yaml").write_text("stages: [{method: merge_models}, {method: export, format: safetensors}]")
    (root / "change.yaml").write_text("gates: {merge_change: {max: 5}}")
    return root
