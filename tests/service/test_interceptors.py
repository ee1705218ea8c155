"""A drained server waits for what its calls hold, also where gRPC has cut them."""

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc

from service.edge.interceptors import EdgeInterceptor
from service.identity import Doorkeeper


def test_a_call_that_was_cut_has_put_away_what_it_held_once_the_edge_is_settled() -> None:
    assert asyncio.run(_cut()) == ["began", "put away"]


async def _cut() -> list[str]:
    told, running, interceptor = [], asyncio.Event(), EdgeInterceptor(Doorkeeper(()))

    async def behavior(request: Any, context: Any) -> None:
        told.append("began")
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(100):
                await asyncio.sleep(0)
            told.append("put away")

    async def continuation(details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(behavior)

    details: Any = SimpleNamespace(method="/modelpress.v1.Artifacts/GetUpload", invocation_metadata=())
    handler: Any = await interceptor.intercept_service(continuation, details)
    call = asyncio.create_task(handler.unary_unary(None, None))
    await running.wait()
    call.cancel()
    await interceptor.settled(30.0)
    return told
