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
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from modelpress.errors import InvalidRequest

MAX_DOCUMENT_BYTES = 256 * 1024


class Document(BaseModel):
    """Frozen, strict about unknown fields, never NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_fields(cls, value: Any) -> Any:
        unknown = [str(key) for key in value if key not in cls.model_fields] if isinstance(value, dict) else []
        if unknown:
            close = difflib.get_close_matches(unknown[0], cls.model_fields, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            sentence = f"unknown field; {hint}allowed here: {', '.join(cls.model_fields)}"
            raise PydanticCustomError("unknown_field", "{sentence}", {"sentence": sentence, "name": unknown[0]})
        return value


DocumentT = TypeVar("DocumentT", bound=Document)


def read_document(kind: type[DocumentT], text: str, error: type[InvalidRequest]) -> DocumentT:
    """Parse YAML (JSON is YAML) into `kind`; every fault becomes one `error` that names the field."""
    if len(text.encode()) > MAX_DOCUMENT_BYTES:
        raise error(f"the document has {len(text.encode())} bytes: at most {MAX_DOCUMENT_BYTES} are allowed")
    try:
        value = yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506 - a subclass of SafeLoader
    except (yaml.YAMLError, RecursionError) as fault:
        raise error(f"not valid YAML: {' '.join(str(fault).split())[:300]}") from None
    return read_value(kind, value, error)


def read_value(kind: type[DocumentT], value: Any, error: type[InvalidRequest]) -> DocumentT:
    """The same for a value that is parsed already."""
    if not isinstance(value, dict):
        raise error(f"expected a mapping with the fields {', '.join(kind.model_fields)}, found {type(value).__name__}")
    try:
        return kind.model_validate(value)
    except ValidationError as fault:
        field, sentence = _explain(fault)
        raise error(f"{field}: {sentence}" if field else sentence, field=field) from None


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, where plain YAML keeps the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, (str, int)) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key if isinstance(key, (str, int)) else id(key_node))
        return super().construct_mapping(node, deep)


def _explain(fault: ValidationError) -> tuple[str, str]:
    """The path and one sentence of the first error, e.g. `stages[1].prune.ratio`."""
    first = fault.errors(include_url=False)[0]
    parts = [*first["loc"], *([first["ctx"]["name"]] if first["type"] == "unknown_field" else [])]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")
    if first["type"] == "missing":
        return field, "this field is required"
    message = first["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    shows_value = first["type"] not in ("value_error", "unknown_field") and not isinstance(first["input"], (dict, list, BaseModel))
    return field, f"{message}, found {str(first['input'])[:80]!r}" if shows_value else message
