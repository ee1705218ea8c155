"""The application: what the service is made of, in the order in which it starts; it stops in the reverse order.

await serve(config, announce=print, stop=event)
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

from compressors.families import FAMILIES
from modelpress.errors import ModelpressError
from modelpress.v1 import artifacts_pb2_grpc, capabilities_pb2_grpc, conversions_pb2_grpc, reports_pb2_grpc
from service.config import Config
from service.dispatcher import Dispatcher, open_dispatcher
from service.edge.artifacts import ArtifactParts, ArtifactsServicer
from service.edge.capabilities import CapabilitiesServicer, Equipment, describe
from service.edge.conversions import ConversionParts, ConversionsServicer
from service.edge.interceptors import EdgeInterceptor
from service.edge.reports import ReportsServicer
from service.edge.server import EdgeServer, Registration
from service.garbage import GarbageCollector
from service.identity import Doorkeeper
from service.intake import inspect_artifact
from service.signing import Signer, load_or_create_signer
from service.state.artifacts import ArtifactRepository
from service.state.conversions import Conversions
from service.state.engine import open_database
from service.state.events import Journal
from service.state.uploads import UploadRepository
from service.store import ContentStore
from service.threads import Threads
from service.uploads import UploadDesk, UploadLimits

COLLECT_EVERY_S = 600.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Foundation:
    """What everything else stands on."""

    config: Config
    store: ContentStore
    journal: Journal
    signer: Signer
    threads: Threads


async def serve(config: Config, *, announce: Callable[[str], None], stop: asyncio.Event) -> None:
    """Start, tell `announce` the address, run until `stop` is set, drain.

    Raises ModelpressError with one sentence where the service cannot start.
    """
    async with AsyncExitStack() as running:
        threads = Threads(config.server.threads)
        running.callback(threads.close)
        foundation = await threads.run(lay_foundation, config, threads)
        running.callback(foundation.journal.engine.dispose)
        uploads = UploadRepository(foundation.journal.engine)
        desk = UploadDesk(foundation.store, uploads, _upload_limits(config))
        await _keep_collecting(running, GarbageCollector(foundation.store.staging, uploads, desk), threads)
        failure = _Failure(asyncio.get_running_loop(), stop)
        dispatcher = _dispatcher(foundation, failure.set)
        running.push_async_callback(threads.run, dispatcher.drain, config.server.grace_s)
        conversions = _conversions(foundation, dispatcher)
        services = _services(foundation, desk) | {
            "modelpress.v1.Conversions": functools.partial(
                conversions_pb2_grpc.add_ConversionsServicer_to_server, conversions
            )
        }
        server = EdgeServer(config.server, EdgeInterceptor(Doorkeeper(config.identity.tokens)), services)
        address = await server.start()
        running.push_async_callback(server.drain)
        running.callback(conversions.stop)
        dispatcher.start()
        announce(address)
        _log.info("serving", extra={"fields": {"address": address, "development_key": foundation.signer.development}})
        await stop.wait()
        _log.info("draining", extra={"fields": {"grace_s": config.server.grace_s}})
    _log.info("stopped")
    if failure.error:
        raise failure.error


def lay_foundation(config: Config, threads: Threads) -> Foundation:
    """Open what outlives the process. Blocks."""
    config.storage.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    engine = open_database(config.database_url)
    store = ContentStore(config.store_url, scratch=config.scratch)
    signer = load_or_create_signer(config.storage.data, config.signing.key_file)
    return Foundation(config, store, Journal(engine), signer, threads)


class _Failure:
    """What ends the server from another thread: the first error, told to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
        self.error: ModelpressError | None = None
        self._loop = loop
        self._stop = stop

    def set(self, error: ModelpressError) -> None:
        self.error = self.error or error
        self._loop.call_soon_threadsafe(self._stop.set)


def _dispatcher(foundation: Foundation, on_failure: Callable[[ModelpressError], None]) -> Dispatcher:
    return open_dispatcher(
        foundation.config,
        journal=foundation.journal,
        store=foundation.store,
        signer=foundation.signer,
        on_failure=on_failure,
    )


def _conversions(foundation: Foundation, dispatcher: Dispatcher) -> ConversionsServicer:
    artifacts = ArtifactRepository(foundation.journal.engine)
    capabilities = describe(foundation.config, _equipment(foundation.signer))
    return ConversionsServicer(
        ConversionParts(foundation.journal, dispatcher, artifacts, capabilities, foundation.threads)
    )


def _services(foundation: Foundation, desk: UploadDesk) -> dict[str, Registration]:
    """Every service of the wire by its full name."""
    config, store, threads = foundation.config, foundation.store, foundation.threads
    repository = ArtifactRepository(foundation.journal.engine)
    artifacts = ArtifactsServicer(ArtifactParts(store, repository, desk, inspect_artifact, threads))
    reports = ReportsServicer(Conversions(foundation.journal), store, threads)
    capabilities = CapabilitiesServicer(config, _equipment(foundation.signer))
    register = functools.partial
    return {
        "modelpress.v1.Artifacts": register(artifacts_pb2_grpc.add_ArtifactsServicer_to_server, artifacts),
        "modelpress.v1.Reports": register(reports_pb2_grpc.add_ReportsServicer_to_server, reports),
        "modelpress.v1.Capabilities": register(capabilities_pb2_grpc.add_CapabilitiesServicer_to_server, capabilities),
    }


def _equipment(signer: Signer) -> Equipment:
    return Equipment(
        families=tuple(FAMILIES),
        runtimes=(f"onnxruntime {importlib.metadata.version('onnxruntime')}",),
        devices=("cpu",),
        public_key_pem=signer.public_key_pem,
        development_key=signer.development,
    )


def _upload_limits(config: Config) -> UploadLimits:
    return UploadLimits(config.limits.max_blob_bytes, config.limits.upload_expiry_s)


async def _keep_collecting(running: AsyncExitStack, collector: GarbageCollector, threads: Threads) -> None:
    """Collect once before anybody is served, then again and again until the stack is left."""
    await threads.run(collector.collect)

    async def again() -> None:
        while True:
            await asyncio.sleep(COLLECT_EVERY_S)
            try:
                await threads.run(collector.collect)
            except Exception:  # noqa: BLE001 - whatever it was, the next round may succeed
                _log.exception("garbage collection failed; it is tried again")

    task = asyncio.create_task(again())

    async def end() -> None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    running.push_async_callback(end)
