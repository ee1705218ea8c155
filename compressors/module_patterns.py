"""`ignore` lists: which modules a recipe leaves as they are."""

from __future__ import annotations

import re
from collections.abc import Iterable

from modelpress.errors import InvalidRecipe

REGEX_PREFIX = "re:"


def without_ignored(names: Iterable[str], patterns: Iterable[str]) -> tuple[str, ...]:
    """`names` that no pattern matches, in their order.

    A pattern is a whole name, or `re:` and a regular expression that matches from the name's start, as in
    compressed-tensors. InvalidRecipe for one that matches nothing: a typo there would quantize what should stay float.
    """
    names = tuple(names)
    ignored: set[str] = set()
    for index, pattern in enumerate(patterns):
        matched = _matches(names, pattern, field=f"ignore[{index}]")
        if not matched:
            raise InvalidRecipe(
                f"ignore: {pattern!r} matches no linear layer or embedding; there are {len(names)}, "
                f"e.g. {', '.join((*names[:2], *names[-1:]))}",
                field=f"ignore[{index}]",
            )
        ignored |= matched
    return tuple(name for name in names if name not in ignored)


def _matches(names: tuple[str, ...], pattern: str, *, field: str) -> set[str]:
    if not pattern.startswith(REGEX_PREFIX):
        return {name for name in names if name == pattern}
    try:
        expression = re.compile(pattern.removeprefix(REGEX_PREFIX))
    except re.error as error:
        raise InvalidRecipe(f"ignore: {pattern!r} is not a regular expression: {error}", field=field) from None
    return {name for name in names if expression.match(name)}
