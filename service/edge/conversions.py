"""The Conversions servicer: queue, look, watch, cancel, retry."""

# ruff: noqa: N802 - the methods' names are the wire's

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from modelpress.digests import Digest
from modelpress.errors import InvalidRequest, NotFound, Unavailable
from modelpress.request_rules import check_label_count
from modelpress.v1 import conversions_pb2 as pb
from modelpress.v1 import conversions_pb2_grpc as rpc
from service.cache_look import CacheLook
from service.dispatcher import Dispatcher
from service.edge.context import Context
from service.edge.conversion_messages import (
    conversion_message,
    estimate_message,
    event_message,
    state_of,
    verdict_of,
)
from service.edge.conversion_requests import request_from_proto
from service.edge.names import resource_id
from service.edge.paging import make_token, page_size, read_token
from service.fit import Facts
from service.identity import Caller, current_caller
from service.intake import INSPECTION, INSPECTORS, inspect_artifact
from service.preflight import Capabilities, check_scratch, preflight
from service.requests import ConversionRequest
from service.state.artifacts import ArtifactRepository
from service.state.conversions import Conversion, Conversions, Filter, NewConversion
from service.state.events import Journal
from service.storage.store import ContentStore
from service.threads import Threads

MAX_PAGE_BYTES = 3 << 20
"""A page ends before a message of 4 MiB would be refused."""
LOOK_EVERY_S = 1.0
"""Between two looks of a watcher where no bell rang: another server may have changed the conversion."""

T = TypeVar("T")
V = TypeVar("V")


@dataclass(frozen=True)
class ConversionParts:
    """What the servicer stands on. `capabilities`: this server's, e.g. its answer to GetCapabilities."""

    journal: Journal
    dispatcher: Dispatcher
    artifacts: ArtifactRepository
    store: ContentStore
    capabilities: Capabilities
    threads: Threads
    free_bytes: Callable[[], int]
    """Of the disk on which this server's workers compute."""


class ConversionsServicer(rpc.ConversionsServicer):
    def __init__(self, parts: ConversionParts) -> None:
        self._parts = parts
        self._conversions = Conversions(parts.journal)
        self._stopping = asyncio.Event()

    async def CreateConversion(self, request: pb.CreateConversionRequest, context: Context) -> pb.Conversion:
        return await self._parts.threads.run(self._create, current_caller(), request)

    async def GetConversion(self, request: pb.GetConversionRequest, context: Context) -> pb.Conversion:
        found = await self._parts.threads.run(self._conversions.get, current_caller().tenant, _id(request.name))
        return conversion_message(found)

    async def ListConversions(self, request: pb.ListConversionsRequest, context: Context) -> pb.ListConversionsResponse:
        return await self._parts.threads.run(self._list, current_caller().tenant, request)

    async def CancelConversion(self, request: pb.CancelConversionRequest, context: Context) -> pb.Conversion:
        return await self._parts.threads.run(self._cancel, current_caller().tenant, request)

    async def RetryConversion(self, request: pb.RetryConversionRequest, context: Context) -> pb.Conversion:
        return await self._parts.threads.run(self._retry, current_caller().tenant, request)

    async def WatchConversion(
        self, request: pb.WatchConversionRequest, context: Context
    ) -> AsyncIterator[pb.WatchConversionResponse]:
        tenant, identifier, sequence = current_caller().tenant, _id(request.name), request.after_sequence
        if sequence < 0:
            raise InvalidRequest(f"after_sequence is {sequence}: use 0 or the last number seen", field="after_sequence")
        journal, threads = self._parts.journal, self._parts.threads
        seen = journal.clock()
        with journal.bell.listen(identifier) as bell:
            while True:
                bell.clear()
                conversion = await threads.run(self._conversions.get, tenant, identifier)
                for event in await threads.run(journal.events_after, identifier, sequence, seen=seen):
                    yield event_message(event)
                    sequence, seen = event.sequence, event.time
                if conversion.ended_for_now and sequence >= conversion.last_sequence:
                    return
                await self._rung(bell)

    def stop(self) -> None:
        """End every watch: clients attach again where the service goes on."""
        self._stopping.set()

    async def _rung(self, bell: asyncio.Event) -> None:
        """Wait for the bell, or the time to look anyway; Unavailable where the server stops."""
        waits = [asyncio.ensure_future(bell.wait()), asyncio.ensure_future(self._stopping.wait())]
        try:
            await asyncio.wait(waits, timeout=LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._stopping.is_set():
            raise Unavailable("the server is stopping: watch again after the last sequence number, in a moment")

    def _create(self, caller: Caller, message: pb.CreateConversionRequest) -> pb.Conversion:
        request = request_from_proto(message)
        facts = self._facts(caller.tenant, request)
        estimate = preflight(request, facts, self._parts.capabilities)
        check_scratch(request, facts[request.base], free_bytes=self._parts.free_bytes())
        if message.validate_only:
            return estimate_message(replace(estimate, cached_steps=self._cached_steps(caller.tenant, request)))
        new = NewConversion(caller.tenant, caller.name, request.to_json(), message.request_id)
        return self._woken(self._conversions.create(new))

    def _cached_steps(self, tenant: str, request: ConversionRequest) -> tuple[str, ...]:
        """None where this server has no workers: what is in the cache for others cannot be told."""
        tools = self._parts.dispatcher.tools()
        if tools is None:
            return ()
        limit = request.limits.memory_limit_bytes or self._parts.capabilities.default_memory_limit_bytes
        look = CacheLook(tenant, steps=tools.steps, store=tools.store, facts=tools.facts, memory_limit_bytes=limit)
        return look.walk(request)

    def _facts(self, tenant: str, request: ConversionRequest) -> dict[Digest, Facts]:
        """Facts of those artifacts of the request that the tenant has."""
        facts: dict[Digest, Facts] = {}
        for digest in request.artifacts:
            try:
                facts[digest] = self._current_facts(tenant, digest)
            except NotFound:
                continue  # the preflight says which field names it
        return facts

    def _current_facts(self, tenant: str, digest: Digest) -> Facts:
        """Read anew where an older release read them; raises what CreateArtifact would, if it refuses them now."""
        artifact = self._parts.artifacts.get(tenant, digest)
        if artifact.kind not in INSPECTORS or artifact.facts.get("inspection") == INSPECTION:
            return artifact.facts
        facts = inspect_artifact(artifact.kind, artifact.manifest, self._parts.store)
        self._parts.artifacts.replace_facts(tenant, digest, facts)
        return facts

    def _list(self, tenant: str, request: pb.ListConversionsRequest) -> pb.ListConversionsResponse:
        only = _filter(request)
        listing = (tenant, only.states, only.verdicts, sorted(only.labels.items()))
        after = read_token(request.page_token, listing)
        size = page_size(request.page_size)
        found = self._conversions.page(tenant, only=only, after=after, limit=size + 1)
        shown = _fitting([conversion_message(conversion) for conversion in found[:size]])
        last = found[len(shown) - 1] if len(shown) < len(found) else None
        token = make_token(last.created, last.id, listing) if last else ""
        return pb.ListConversionsResponse(conversions=shown, next_page_token=token)

    def _cancel(self, tenant: str, request: pb.CancelConversionRequest) -> pb.Conversion:
        return self._woken(self._conversions.cancel(tenant, _id(request.name), etag=request.etag))

    def _retry(self, tenant: str, request: pb.RetryConversionRequest) -> pb.Conversion:
        return self._woken(self._conversions.retry(tenant, _id(request.name), etag=request.etag))

    def _woken(self, conversion: Conversion) -> pb.Conversion:
        self._parts.dispatcher.wake()
        return conversion_message(conversion)


def _id(name: str) -> str:
    return resource_id(name, "conversions")


def _filter(request: pb.ListConversionsRequest) -> Filter:
    check_label_count(len(request.labels))
    return Filter(
        states=_known(state_of, request.states, "states"),
        verdicts=_known(verdict_of, request.verdicts, "verdicts"),
        labels=dict(request.labels),
    )


def _known(read: Callable[[V], T], values: Sequence[V], field: str) -> tuple[T, ...]:
    try:
        return tuple(sorted({read(value) for value in values}, key=str))
    except ValueError:
        raise InvalidRequest(f"{field} holds a value that no conversion can have: leave it out", field=field) from None


def _fitting(messages: list[pb.Conversion]) -> list[pb.Conversion]:
    """The first of them, at least one, that fit into one message together."""
    total, count = 0, 0
    for message in messages:
        total += message.ByteSize()
        if count and total > MAX_PAGE_BYTES:
            break
        count += 1
    return messages[:count]
