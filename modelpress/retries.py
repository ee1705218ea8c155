"""What may be repeated after which answer, and how long.

A call is in the table when the server does the same once or twice for it: reads, and writes that carry their own
name (a digest, a request id). `CancelConversion` and `RetryConversion` are not repeated: between the two tries
somebody else may have changed the conversion.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import grpc

_LOST = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
_NEVER: frozenset[grpc.StatusCode] = frozenset()

RETRYABLE: Mapping[str, frozenset[grpc.StatusCode]] = {
    "FindMissing": _LOST,
    "CreateUpload": _LOST,
    "WriteUpload": _LOST | {grpc.StatusCode.ABORTED},  # resumed at GetUpload.received_bytes, never replayed
    "GetUpload": _LOST,
    "AbortUpload": _NEVER,
    "CreateArtifact": _LOST,
    "GetArtifact": _LOST,
    "ListArtifacts": _LOST,
    "Download": _LOST,  # resumed at the bytes that are on disk
    "CreateConversion": _LOST,  # the client always sends a request id
    "GetConversion": _LOST,
    "ListConversions": _LOST,
    "WatchConversion": _LOST,  # resumed after the last sequence number
    "CancelConversion": _NEVER,
    "RetryConversion": _NEVER,
    "GetReport": _LOST,
    "GetCapabilities": _LOST,
}


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with full jitter (Brooker, AWS Architecture Blog, 2015), bounded in time.

    `call_patience_s` bounds one call; `stream_patience_s` bounds a transfer or a watch, counted from the last byte or
    event that arrived: long enough for a server to restart.
    """

    call_patience_s: float = 5.0
    stream_patience_s: float = 120.0
    first_delay_s: float = 0.1
    max_delay_s: float = 5.0
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)

    def patience(self, limit_s: float) -> Patience:
        return Patience(self, limit_s)


class Patience:
    """One series of tries. `allows(method, code)` waits and says True, or says False at once."""

    def __init__(self, policy: RetryPolicy, limit_s: float) -> None:
        self._policy = policy
        self._limit_s = limit_s
        self._random = random.Random()
        self.renew()

    def renew(self) -> None:
        """Something arrived: start counting anew."""
        self._deadline = self._policy.clock() + self._limit_s
        self._delay_s = self._policy.first_delay_s

    def allows(self, method: str, code: grpc.StatusCode) -> bool:
        if code not in RETRYABLE[method]:
            return False
        wait_s = self._delay_s * self._random.uniform(0.5, 1.0)
        if self._policy.clock() + wait_s > self._deadline:
            return False
        self._policy.sleep(wait_s)
        self._delay_s = min(self._delay_s * 2, self._policy.max_delay_s)
        return True
