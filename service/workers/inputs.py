"""A step's inputs, each made when the operation asks for it: what streams its inputs needs no copy of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from modelpress.digests import Digest

InputT = TypeVar("InputT")


class Inputs(Mapping[str, InputT]):
    """Role -> what `make` makes of the input's manifest digest, at each access; asking for a role makes nothing."""

    def __init__(self, digests: Mapping[str, Digest], make: Callable[[Digest], InputT]) -> None:
        self._digests = digests
        self._make = make

    def __getitem__(self, role: str) -> InputT:
        return self._make(self._digests[role])

    def __contains__(self, role: object) -> bool:
        return role in self._digests

    def __iter__(self) -> Iterator[str]:
        return iter(self._digests)

    def __len__(self) -> int:
        return len(self._digests)
