"""The application: what the service is made of, in the order in which it starts; it stops in the reverse order.

await serve(config, announce=print, stop=event)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack

from modelpress.errors import ModelpressError
from service.config import Config
from service.dispatcher import Dispatcher, open_dispatcher
from service.edge.interceptors import EdgeInterceptor
from service.edge.server import EdgeServer
from service.edge.services import conversions_servicer, registrations
from service.foundation import Foundation, lay_foundation
from service.identity import Doorkeeper
from service.state.uploads import UploadRepository
from service.storage.garbage import GarbageCollector, collecting
from service.storage.uploads import UploadDesk, UploadLimits
from service.threads import Threads

DispatcherOf = Callable[..., Dispatcher]
"""With the parameters of `service.dispatcher.open_dispatcher`."""

_log = logging.getLogger(__name__)


async def serve(
    config: Config,
    *,
    announce: Callable[[str], None],
    stop: asyncio.Event,
    dispatch: DispatcherOf = open_dispatcher,
) -> None:
    """Start, tell `announce` the address, run until `stop` is set, drain. `dispatch` makes what runs conversions.

    Raises ModelpressError with one sentence where the service cannot start.
    """
    failure = _Failure(asyncio.get_running_loop(), stop)
    async with AsyncExitStack() as running:
        threads = Threads(config.server.threads)
        running.callback(threads.close)
        foundation = await threads.run(lay_foundation, config, threads)
        running.callback(foundation.journal.engine.dispose)
        uploads, garbage = _uploads(foundation)
        await running.enter_async_context(collecting(garbage, threads))
        dispatcher = _dispatcher(foundation, dispatch, failure.set)
        running.push_async_callback(threads.run, dispatcher.drain, config.server.grace_s)
        conversions = conversions_servicer(foundation, dispatcher)
        services = registrations(foundation, uploads, dispatcher, conversions)
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


class _Failure:
    """What ends the server from another thread: the first error, told to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
        self.error: ModelpressError | None = None
        self._loop = loop
        self._stop = stop

    def set(self, error: ModelpressError) -> None:
        self.error = self.error or error
        self._loop.call_soon_threadsafe(self._stop.set)


def _dispatcher(
    foundation: Foundation, dispatch: DispatcherOf, on_failure: Callable[[ModelpressError], None]
) -> Dispatcher:
    return dispatch(
        foundation.config,
        journal=foundation.journal,
        store=foundation.store,
        signer=foundation.signer,
        on_failure=on_failure,
    )


def _uploads(foundation: Foundation) -> tuple[UploadDesk, GarbageCollector]:
    limits = foundation.config.limits
    repository = UploadRepository(foundation.journal.engine)
    desk = UploadDesk(foundation.store, repository, UploadLimits(limits.max_blob_bytes, limits.upload_expiry_s))
    return desk, GarbageCollector(foundation.store.staging, repository, desk)
