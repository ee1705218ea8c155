"""Which linear layers of a decoder a recipe quantizes: `targets` without `ignore`. Free of torch: preflight asks too.

A name is a whole module name, `re:` and a regular expression that matches from the name's start, as in
compressed-tensors, or, among `targets`, `Linear`: every linear layer of the decoder layers.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

import regex

from compressors.decoder_families import DecoderFamily
from modelpress.errors import InvalidRecipe
from modelpress.quantization_recipes import QuantizeWeights

LINEAR = "Linear"
HEAD = "lm_head"
"""The one name that `ignore` may hold in vain: a model whose head has another name, or none."""
REGEX_PREFIX = "re:"
MATCH_TIMEOUT_S = 2.0
"""For all names together: preflight runs in the service, and some expressions backtrack for years."""


@dataclass(frozen=True)
class Targets:
    """Linear layers by their full names, in the model's order."""

    quantized: tuple[str, ...]


def choose_targets(arguments: QuantizeWeights, family: DecoderFamily, *, layers: int) -> Targets:
    """InvalidRecipe for a name that matches nothing, for a target outside the decoder layers, and where none is left.

    `layers` is the number of decoder layers.
    """
    modules = _Modules(family, layers, deadline=monotonic() + MATCH_TIMEOUT_S)
    ignored = {name for place, pattern in enumerate(arguments.ignore) for name in modules.ignored(pattern, place)}
    targeted = {name for place, pattern in enumerate(arguments.targets) for name in modules.targeted(pattern, place)}
    wanted = targeted - ignored
    outside = sorted(wanted.difference(modules.linears))
    if outside:
        raise InvalidRecipe(
            f"targets: {outside[0]!r} is no linear layer of the decoder layers: head, embeddings and norms stay as "
            "they are; add it to ignore",
            field="targets",
        )
    quantized = tuple(name for name in modules.linears if name in wanted)
    if not quantized:
        raise InvalidRecipe("targets: ignore leaves none of them: nothing would be quantized", field="ignore")
    return Targets(quantized)


def fits(shape: Sequence[int], arguments: QuantizeWeights) -> bool:
    """Whether the groups divide the inputs of a weight [O, I]."""
    return shape[1] % (arguments.group_size or shape[1]) == 0


def misfits(arguments: QuantizeWeights, targets: Targets, shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """The targets whose inputs no group divides, each with why it stays float; `shapes` [O, I] are by tensor.

    InvalidRecipe where they are more than the recipe allows, or all.
    """
    inputs = {
        name: shapes[f"{name}.weight"][1] for name in targets.quantized if not fits(shapes[f"{name}.weight"], arguments)
    }
    size = arguments.group_size
    reasons = {
        name: f"its {count} inputs are not divided by group_size {size}, so it stays float"
        for name, count in inputs.items()
    }
    check_fallbacks(arguments, targets, reasons)
    if len(reasons) == len(targets.quantized):
        raise InvalidRecipe(
            f"group_size: {size} divides the inputs of no target, e.g. the {inputs[targets.quantized[0]]} of "
            f"{targets.quantized[0]}: choose another group_size",
            field="group_size",
        )
    return reasons


def check_fallbacks(arguments: QuantizeWeights, targets: Targets, reasons: Mapping[str, str]) -> None:
    """InvalidRecipe where more targets than the recipe allows are not quantized as it says; `reasons` by target."""
    total, limit = len(targets.quantized), arguments.max_fallback_share
    if len(reasons) > limit * total:
        name, reason = next(iter(reasons.items()))
        raise InvalidRecipe(
            f"max_fallback_share: {len(reasons)} of {total} targets cannot be quantized as the recipe says, where a "
            f"share of {limit:g} may, e.g. {name}: {reason}; ignore them, or raise max_fallback_share",
            field="max_fallback_share",
        )


class _Modules:
    """The modules of a decoder that have weights. Past `deadline`, of the monotonic clock, no expression is tried."""

    def __init__(self, family: DecoderFamily, layers: int, *, deadline: float) -> None:
        inside = [family.layer(number) for number in range(layers)]
        self.linears = tuple(f"{layer}.{linear}" for layer in inside for linear in family.linears)
        norms = (f"{layer}.{norm}" for layer in inside for norm in family.norms)
        self.names = (*self.linears, *norms, family.embeddings, family.norm, family.head)
        self._deadline = deadline

    def targeted(self, pattern: str, place: int) -> Sequence[str]:
        return self.linears if pattern == LINEAR else self._matching(pattern, f"targets[{place}]")

    def ignored(self, pattern: str, place: int) -> Sequence[str]:
        return [] if pattern == HEAD and HEAD not in self.names else self._matching(pattern, f"ignore[{place}]")

    def _matching(self, pattern: str, field: str) -> Sequence[str]:
        if pattern.startswith(REGEX_PREFIX):
            matched = self._expressed(pattern, field)
        else:
            matched = [name for name in self.names if name == pattern]
        if not matched:
            nearest = ", ".join(self._nearest(pattern.removeprefix(REGEX_PREFIX)))
            list_name = field.partition("[")[0]
            raise InvalidRecipe(
                f"{list_name}: {pattern!r} matches no module of the model; the nearest names are {nearest}", field=field
            )
        return matched

    def _expressed(self, pattern: str, field: str) -> Sequence[str]:
        """The names that a regular expression matches from their starts."""
        try:
            expression = regex.compile(pattern.removeprefix(REGEX_PREFIX))
            return [name for name in self.names if expression.match(name, timeout=self._seconds_left())]
        except (regex.error, TimeoutError) as fault:
            what = "takes too long" if isinstance(fault, TimeoutError) else f"is no regular expression: {fault}"
            raise InvalidRecipe(
                f"{field.partition('[')[0]}: {pattern[:80]!r} {what}: write a simpler one, or the modules' names",
                field=field,
            ) from None

    def _seconds_left(self) -> float:
        if (seconds := self._deadline - monotonic()) <= 0:
            raise TimeoutError
        return seconds

    def _nearest(self, name: str) -> Sequence[str]:
        return difflib.get_close_matches(name[:200], self.names, n=3, cutoff=0.0)
