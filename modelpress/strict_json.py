"""JSON from people and programs that are not trusted: one object, read without surprises.

    >>> read_object(b'{"a": 1}')
    {'a': 1}
    >>> read_object(b'{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ...
    modelpress.strict_json.JsonError: gives the key 'a' twice

Refused are keys given twice, NaN and infinity, numbers of more than 64 digits, half surrogates, and nesting so deep
that the parser, or a reader that follows the value down, would give up.
"""

from __future__ import annotations

import json
import math
import re
from itertools import chain
from typing import Any, NoReturn

MAX_DIGITS = 64
MAX_DEPTH = 64
"""Objects and lists inside one another, the outermost counted."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class JsonError(ValueError):
    """What is wrong, as the rest of a sentence that starts with the file's name."""


def read_object(data: bytes) -> dict[str, Any]:
    """Parse one JSON object; JsonError for everything else."""
    try:
        text = data.decode()
        value = json.loads(
            text, object_pairs_hook=_unique, parse_int=_integer, parse_float=_number, parse_constant=_refuse_constant
        )
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except JsonError:
        raise
    except UnicodeDecodeError as fault:
        raise JsonError(f"is not UTF-8 (byte {fault.start})") from None
    except UnicodeEncodeError:
        raise JsonError("holds half a surrogate pair, which no UTF-8 text can hold") from None
    except json.JSONDecodeError as fault:
        raise JsonError(f"is not valid JSON ({fault.msg}, line {fault.lineno}, column {fault.colno})") from None
    except RecursionError:
        raise JsonError("is nested too deeply") from None
    if not isinstance(value, dict):
        raise JsonError(f"holds a {type(value).__name__}, where an object is expected")
    _check_depth(value)
    return value


def _check_depth(value: dict[str, Any]) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inside = chain.from_iterable(each.values() if isinstance(each, dict) else each for each in level)
        level = [each for each in inside if isinstance(each, dict | list)]
        if not level:
            return
    raise JsonError(f"is nested too deeply: at most {MAX_DEPTH} objects and lists inside one another are read")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise JsonError(f"gives the key {twice[:80]!r} twice")
    return result


def _integer(text: str) -> int:
    if len(text.lstrip("-")) > MAX_DIGITS:
        raise JsonError(f"holds a number of {len(text)} digits")
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise JsonError(f"holds the number {text[:40]}, which is too large")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise JsonError(f"holds {text}, which is not JSON")
