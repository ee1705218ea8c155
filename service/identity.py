"""Who calls: a bearer token's name and tenant, or `local` where the server listens on loopback without tokens."""

from __future__ import annotations

import hashlib
import hmac
from contextvars import ContextVar
from dataclasses import dataclass

from modelpress.errors import InternalError, Unauthenticated
from service.config import Token


@dataclass(frozen=True)
class Caller:
    """`name` stands in every record of what the caller did; `tenant` bounds what the caller sees."""

    name: str
    tenant: str


LOCAL = Caller("local", "default")

_caller: ContextVar[Caller] = ContextVar("caller")


def set_caller(caller: Caller) -> None:
    """For the rest of this call: every gRPC call runs in a context of its own."""
    _caller.set(caller)


def current_caller() -> Caller:
    """Who makes the call that is being served."""
    caller = _caller.get(None)
    if caller is None:
        raise InternalError("a call was served without its caller being identified")
    return caller


class Doorkeeper:
    """Turns an `authorization` header into a Caller."""

    def __init__(self, tokens: tuple[Token, ...]) -> None:
        self._tokens = tokens

    def identify(self, authorization: str) -> Caller:
        """The token's caller; Unauthenticated for no or another token. Every hash is compared, in constant time."""
        if not self._tokens:
            return LOCAL
        scheme, _, secret = authorization.partition(" ")
        if scheme.lower() != "bearer" or not secret:
            raise Unauthenticated("this server wants a token: send the header 'authorization: Bearer <token>'")
        given = hashlib.sha256(secret.encode()).hexdigest()
        matches = [token for token in self._tokens if hmac.compare_digest(token.sha256, given)]
        if not matches:
            raise Unauthenticated("the token is not known to this server: ask its operator for a valid one")
        return Caller(matches[0].name, matches[0].tenant)
