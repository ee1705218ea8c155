"""Watching a conversion across lost connections and server restarts."""

from __future__ import annotations

from collections.abc import Iterator

import grpc

from modelpress import wire
from modelpress.connection import Connection
from modelpress.errors import Unavailable
from modelpress.v1 import conversions_pb2
from modelpress.views import Event

METHOD = "WatchConversion"


def watch_events(connection: Connection, name: str, *, after: int, timeout_s: float | None) -> Iterator[Event]:
    """Events with a sequence number greater than `after`, in order, until the final one. Progress that is renewed
    comes again under its number; nothing else is repeated.

    A lost stream is attached again after the last event seen. Raises Unavailable: with reason WAIT_TIMED_OUT where
    `timeout_s` have passed, and without it where the server stays away.
    """
    clock = connection.policy.clock
    deadline = None if timeout_s is None else clock() + timeout_s
    patience = connection.policy.patience(connection.policy.stream_patience_s)
    request = conversions_pb2.WatchConversionRequest(name=name, after_sequence=after)
    while True:
        left_s = None if deadline is None else deadline - clock()
        if left_s is not None and left_s <= 0:
            raise Unavailable(f"{name} has not ended within {timeout_s:g} s: it goes on", reason="WAIT_TIMED_OUT")
        try:
            for message in connection.stream_once(METHOD, request, timeout_s=left_s):
                patience.renew()
                request.after_sequence = message.sequence
                yield wire.event_from_wire(message)
        except grpc.RpcError as error:
            if not patience.allows(METHOD, error.code()):
                raise connection.translate(error) from None
        else:
            return
