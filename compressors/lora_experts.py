"""LoRA on parameters (PEFT's target_parameters): the fused experts of a mixture, as edits of what the files hold.

Shapes: E experts, O outputs, I inputs, R rank. PEFT nests the factors of several parameters of one module without their
names (`experts.lora_A`, `experts.base_layer.lora_A`): each pair belongs to the one parameter that its shapes fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from compressors.adapter_fit import Fit
from compressors.edits import Edit, Experts, OneExpert
from compressors.weight_files import StoredTensor

_FACTOR = re.compile(r"((base_layer\.)*)lora_[AB]\.weight")


def parameters_of(fit: Fit, module: str) -> list[str]:
    """The module's own parameters that target_parameters names, which may be by their last name alone. A plain
    `weight` is its layer's, as for any LoRA.
    """
    ends = {name.rpartition(".")[2] for name in fit.settings.target_parameters or ()} - {"weight"}
    return sorted(
        name for name in (f"{module}.{end}" for end in ends) if fit.is_target_parameter(name) and fit.has(name)
    )


def expert_edits(
    fit: Fit, module: str, parts: Mapping[str, StoredTensor], parameters: Sequence[str]
) -> Iterator[tuple[str, str, Edit]]:
    """(parameter, tensor of the files, edit) of every pair of factors on the module."""
    for level in sorted({match[1] for match in map(_FACTOR.fullmatch, parts) if match}):
        halves = {half: parts.get(f"{level}lora_{half}.weight") for half in "AB"}
        a, b = halves["A"], halves["B"]
        if a is None or b is None:
            missing = "A" if a is None else "B"
            fit.fail(f"{fit.tensors.key(module)}.{level}lora_{missing}.weight", "is missing: save the adapter again")
        parameter = _owner(fit, parameters, a, b)
        for tensor, edit in _edits(fit, parameter, a, b):
            yield parameter, tensor, edit


def _owner(fit: Fit, parameters: Sequence[str], a: StoredTensor, b: StoredTensor) -> str:
    shapes = {name: fit.shape_of(name, asked_by=a) for name in parameters}
    fitting = [name for name, shape in shapes.items() if _fits(shape, fit.settings.rank_of(name), a.shape, b.shape)]
    if len(fitting) != 1:
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        fit.fail(
            a.name,
            f"{list(a.shape)} and its lora_B {list(b.shape)} fit {len(fitting) or 'none'} of the target_parameters "
            f"{listed}: the adapter was trained on another base, or its rank is another one",
        )
    return fitting[0]


def _fits(shape: tuple[int, ...], rank: int, a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether factors [R * E, I] and [O, R * E] belong to a parameter [E, O, I] or [E, I, O]."""
    if len(shape) != 3 or a[0] != rank * shape[0] or b[1:] != (rank * shape[0],):
        return False
    return (b[0], a[1]) in (shape[1:], shape[:0:-1])


def _edits(fit: Fit, parameter: str, a: StoredTensor, b: StoredTensor) -> Iterator[tuple[str, Edit]]:
    """One edit of the fused parameter, or one of each part where the files hold every expert alone."""
    _, rows, columns = fit.shape_of(parameter, asked_by=a)
    transposed = fit.base.has_transposed_experts if rows == columns else (b.shape[0], a.shape[1]) != (rows, columns)
    rank, scaling = fit.settings.rank_of(parameter), fit.settings.scaling_of(parameter)
    edit = Experts(fit.load(a), fit.load(b), scaling, rank, transposed)
    fused = None if fit.base.find(parameter) else fit.base.find_fused(parameter)
    if fused is None:
        yield parameter, edit
        return
    for expert, stored in enumerate(fused.parts):
        first = 0
        for part in stored:
            yield part.name, OneExpert(edit, expert, first, first + part.shape[0])
            first += part.shape[0]
