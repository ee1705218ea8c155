"""YAML and JSON documents that people write, read into frozen types with one clear sentence on failure.

>>> class Point(Document):
...     x: int
>>> read_document(Point, "x: 3", InvalidRequest).x
3
>>> read_document(Point, "z: 3", InvalidRequest)
Traceback (most recent call last):
...
modelpress.errors.InvalidRequest: z: unknown field; allowed here: x
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from modelpress.errors import InvalidRequest

MAX_DOCUMENT_BYTES = 256 * 1024
MAX_NODES = 5_000
"""Values, lists and mappings in one document: the YAML parser takes about 20,000 a second."""
MAX_DEPTH = 20
MAX_NUMBER_CHARACTERS = 64
"""Of a plain number: Python does not print very long integers, and YAML's base 60 (`1:30`) takes quadratic time."""

_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,80}")


class Document(BaseModel):
    """Frozen, strict about unknown fields, never NaN or infinity, and never a truth value where a number is meant."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_surprises(cls, value: Any) -> Any:
        for key in value if isinstance(value, dict) else ():
            if key not in cls.model_fields:
                hint = did_you_mean(str(key), cls.model_fields)
                raise _fault(key, f"unknown field; {hint}allowed here: {', '.join(cls.model_fields)}")
            if isinstance(value[key], bool) and cls.model_fields[key].annotation in (int, float):
                raise _fault(key, f"must be a number, found {str(value[key]).lower()}")
        return value


DocumentT = TypeVar("DocumentT", bound=Document)


def read_document(kind: type[DocumentT], text: str, error: type[InvalidRequest]) -> DocumentT:
    """Parse YAML (JSON is YAML) into `kind`; every fault becomes one `error` that names the field."""
    return read_value(kind, parse_yaml(text, error), error)


def parse_yaml(text: str, error: type[InvalidRequest]) -> Any:
    """The value of a YAML text, of bounded size and cost; `error` says where it is none."""
    size = len(text.encode("utf-8", errors="replace"))
    if size > MAX_DOCUMENT_BYTES:
        raise error(f"the document has {size} bytes: at most {MAX_DOCUMENT_BYTES} are allowed")
    try:
        return yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506 - a subclass of SafeLoader
    except yaml.MarkedYAMLError as fault:
        mark = fault.problem_mark or fault.context_mark
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise error(f"not valid YAML{place}: {(fault.problem or fault.context or 'unreadable')[:200]}") from None
    except (yaml.YAMLError, ValueError, ArithmeticError, RecursionError) as fault:
        raise error(f"unreadable YAML: {' '.join(str(fault).split())[:200]}") from None


def read_value(kind: type[DocumentT], value: Any, error: type[InvalidRequest]) -> DocumentT:
    """The same for a value that is parsed already."""
    if not isinstance(value, dict):
        found = "nothing" if value is None else type(value).__name__
        raise error(f"expected a mapping with the fields {', '.join(kind.model_fields)}, found {found}")
    try:
        return kind.model_validate(value)
    except ValidationError as fault:
        field, sentence = _explain(fault)
        raise error(f"{field}: {sentence}" if field else sentence, field=field) from None


def did_you_mean(found: str, known: Iterable[str]) -> str:
    """`did you mean 'ratio'? ` where one of `known` is close to `found`, else nothing."""
    close = difflib.get_close_matches(found[:80], list(known), n=1)
    return f"did you mean {close[0]!r}? " if close else ""


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, where plain YAML keeps the last one silently, and what never ends."""

    nodes = 0
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.nodes += 1
        self.depth += 1
        if self.nodes > MAX_NODES or self.depth > MAX_DEPTH:
            raise yaml.YAMLError(f"more than {MAX_NODES} values, or nested deeper than {MAX_DEPTH}")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        if node.tag in _NUMBERS and len(str(node.value)) > MAX_NUMBER_CHARACTERS:
            problem = f"a number has {len(str(node.value))} characters: at most {MAX_NUMBER_CHARACTERS} are allowed"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_scalar(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, (str, int)) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {str(key)[:80]!r} is given twice", key_node.start_mark
                )
            seen.add(key if isinstance(key, (str, int)) else id(key_node))
        return super().construct_mapping(node, deep)


def _fault(key: Any, sentence: str) -> PydanticCustomError:
    """A fault of one field, seen from the mapping that holds it."""
    return PydanticCustomError("field_fault", "{sentence}", {"sentence": sentence, "name": str(key)[:80]})


def _explain(fault: ValidationError) -> tuple[str, str]:
    """The path and one sentence of the first error, e.g. `stages[1].prune.ratio`."""
    first = fault.errors(include_url=False)[0]
    kind, context, found = first["type"], first.get("ctx", {}), first["input"]
    parts = [*first["loc"], *([context["name"]] if kind == "field_fault" else [])]
    if kind.startswith("union_tag"):
        parts.append(context["discriminator"].strip("'"))
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{_shown(part)}" for part in parts).lstrip(".")
    return field, _sentence(first["msg"], kind, context, found)


def _sentence(message: str, kind: str, context: dict[str, Any], found: Any) -> str:
    if kind in ("missing", "union_tag_not_found"):
        return "this field is required"
    if kind == "union_tag_invalid":
        known = context["expected_tags"].replace("'", "")
        name, tag = context["discriminator"].strip("'"), str(context["tag"])
        return f"unknown {name} {tag[:80]!r}; {did_you_mean(tag, known.split(', '))}known: {known}"
    if kind in ("model_type", "model_attributes_type", "tuple_type"):
        wanted = "list" if kind == "tuple_type" else "mapping"
        return f"expected a {wanted}, found {'nothing' if found is None else type(found).__name__}"
    if kind in ("too_short", "too_long"):
        bound = f"{context['min_length']} or more" if kind == "too_short" else f"at most {context['max_length']}"
        return f"needs {bound} entries, found {context['actual_length']}"
    message = message.removeprefix("Value error, ").replace("Input should be", "must be")
    message = message[:1].lower() + message[1:]
    if kind in ("value_error", "field_fault") or isinstance(found, (dict, list, tuple, set, BaseModel)):
        return message
    return f"{message}, found {str(found)[:80]!r}"


def _shown(key: Any) -> str:
    """A key as it may stand in a message: plain names as they are, anything else quoted and short."""
    text = str(key)[:80]
    return text if _PLAIN_NAME.fullmatch(text) else repr(text)
