"""Around every call: who calls, and what an exception becomes.

Health answers without a token, as load balancers expect; everything else, reflection too, is for known callers.
Methods are coroutines (one response) or async generators (a stream of responses).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from service.edge.context import Context, Handler
from service.edge.errors import abort, to_modelpress_error
from service.identity import Doorkeeper, set_caller

OPEN_PREFIX = "/grpc.health.v1.Health/"

Behavior = Callable[[Any, Context], Any]

_CONSTRUCTORS: Mapping[tuple[bool, bool], Callable[..., Handler]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
"""By (request streaming, response streaming)."""


class EdgeInterceptor(grpc.aio.ServerInterceptor):
    def __init__(self, doorkeeper: Doorkeeper) -> None:
        self._doorkeeper = doorkeeper
        self._calls: set[asyncio.Task[Any]] = set()

    async def settled(self, within_s: float) -> None:
        """Return when every call has put away what it held: gRPC waits for none that it has cancelled."""
        if self._calls:
            await asyncio.wait(self._calls, timeout=within_s)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(details)
        method = str(details.method)
        if handler is None or method.startswith(OPEN_PREFIX):
            return handler
        headers = dict(details.invocation_metadata or ())
        call = _Call(self._doorkeeper, method, str(headers.get("authorization", "")), self._calls)
        return _wrapped(handler, call)


@dataclass(frozen=True)
class _Call:
    doorkeeper: Doorkeeper
    method: str
    authorization: str
    running: set[asyncio.Task[Any]]

    @asynccontextmanager
    async def guard(self, context: Context) -> AsyncIterator[None]:
        if task := asyncio.current_task():
            self.running.add(task)
            task.add_done_callback(self.running.discard)
        try:
            set_caller(self.doorkeeper.identify(self.authorization))
            yield
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - every exception ends here as a status
            await abort(context, to_modelpress_error(error, self.method))


def _wrapped(handler: Handler, call: _Call) -> Handler:
    streams = (bool(handler.request_streaming), bool(handler.response_streaming))
    behavior: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    wrapped = _guarded_stream(behavior, call) if streams[1] else _guarded(behavior, call)
    return _CONSTRUCTORS[streams](
        wrapped,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def _guarded(behavior: Behavior, call: _Call) -> Behavior:
    async def guarded(request: Any, context: Context) -> Any:
        async with call.guard(context):
            return await behavior(request, context)

    return guarded


def _guarded_stream(behavior: Behavior, call: _Call) -> Behavior:
    async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
        async with call.guard(context):
            async for response in behavior(request, context):
                yield response

    return guarded
