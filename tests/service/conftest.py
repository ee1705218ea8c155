"""Servers and callers.

server          one running server that the whole session shares; tests use bytes of their own
start_server    start_server(data, toml="", **environment) -> RunningServer, for tests that stop or kill it
wire            a Caller of the shared server
call            call(server) -> Caller
"""

from collections.abc import Callable, Iterator

import grpc
import pytest

from tests.servers import RunningServer, launch, servers
from tests.service.wire import Caller


@pytest.fixture
def start_server() -> Iterator[Callable[..., RunningServer]]:
    with servers() as start:
        yield start


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = launch(tmp_path_factory.mktemp("server") / "data")
    yield running
    assert running.stop() == 0
    assert '"exception"' not in running.log.read_text()


@pytest.fixture
def wire(server: RunningServer) -> Iterator[Caller]:
    with grpc.insecure_channel(server.address) as channel:
        yield Caller(channel)


@pytest.fixture
def call() -> Iterator[Callable[[RunningServer], Caller]]:
    """call(server) -> Caller on a channel of its own."""
    channels: list[grpc.Channel] = []

    def connect(running: RunningServer) -> Caller:
        channels.append(grpc.insecure_channel(running.address))
        return Caller(channels[-1])

    yield connect
    for channel in channels:
        channel.close()
