"""The adapters or models that a stage merges: which ones, in which order, and whose a fault is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from compressors.stages import NamedSource
from modelpress.errors import InvalidModel, InvalidRecipe

Kind = Literal["adapter", "model"]
NEEDED = {"adapter": "merge_lora needs an adapter", "model": "merge_models needs a model beside the base"}


def chosen(names: Sequence[str], given: Sequence[NamedSource], *, kind: Kind) -> list[NamedSource]:
    """Those that the stage names, in its order; all of the request's where it names none. InvalidRecipe for others."""
    known = {source.name: source for source in given}
    if not known:
        raise InvalidRecipe(
            f"{NEEDED[kind]}: add one to the request, or leave the stage out",
            field=f"{kind}s",
        )
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise InvalidRecipe(f"{kind} {unknown!r} is not in the request; known: {', '.join(known)}", field=f"{kind}s")
    return [known[name] for name in names or known]


@contextmanager
def named(kind: Kind, name: str) -> Iterator[None]:
    """An InvalidModel raised inside says which adapter or model it is about."""
    try:
        yield
    except InvalidModel as fault:
        message = f"{kind} {name!r}: {fault.message}"
        raise InvalidModel(message, reason=fault.reason, field=fault.field) from None
