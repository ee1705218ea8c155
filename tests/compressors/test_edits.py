"""Each edit is its formula, on the whole tensor and on any rows of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compressors.edits import (
    Additive,
    Chain,
    Dora,
    Edit,
    Experts,
    Load,
    LowRank,
    OneExpert,
    Replacement,
    Shift,
    TokenRows,
    TransposedLowRank,
    delta_rows,
    lora_factors,
    result_rows,
)
from compressors.weighted_sum import WeightedSum

O, I, R, E, K = 7, 5, 3, 4, 2  # noqa: E741 - outputs, inputs, rank, experts, kernel


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def given(tensor: Tensor) -> Load:
    return lambda: tensor


A, B, MAGNITUDE = draw(R, I), draw(O, R), draw(O).abs()
W, W_T, BIAS, TOKENS = draw(O, I), draw(I, O), draw(O), draw(3, I)
KERNEL, A_K, B_1 = draw(O, I, K, K), draw(R, I, K, K), draw(O, R, 1, 1)
EXPERTS, A_E, B_E = draw(E, O, I), draw(R * E, I), draw(O, R * E)
PER_EXPERT = torch.stack([B_E.reshape(O, R, E)[:, :, e] @ A_E.reshape(E, R, I)[e] for e in range(E)])

LOW_RANK = LowRank(given(A), given(B), 0.5, R)
TRANSPOSED = TransposedLowRank(given(A), given(B), 0.5, R)
CONVOLUTION = LowRank(given(A_K), given(B_1), 0.5, R)
FUSED = Experts(given(A_E), given(B_E), 0.5, R)


def normed(direction: Tensor, *, dims: tuple[int, ...], magnitude: Tensor) -> Tensor:
    return magnitude * direction / direction.square().sum(dims, keepdim=True).sqrt()


CONVOLVED = 0.5 * torch.einsum("or,rikl->oikl", B_1[:, :, 0, 0], A_K)
CASES: dict[str, tuple[Edit, Tensor, Tensor]] = {
    "low rank": (LOW_RANK, W, W + 0.5 * B @ A),
    "transposed": (TRANSPOSED, W_T, W_T + (0.5 * B @ A).T),
    "convolution": (CONVOLUTION, KERNEL, KERNEL + CONVOLVED),
    "experts": (FUSED, EXPERTS, EXPERTS + 0.5 * PER_EXPERT),
    "transposed experts": (
        Experts(given(A_E), given(B_E), 0.5, R, transposed=True),
        EXPERTS.mT.contiguous(),
        EXPERTS.mT + 0.5 * PER_EXPERT.mT,
    ),
    "one expert": (OneExpert(FUSED, 2, 1, 6), EXPERTS[2, 1:6], EXPERTS[2, 1:6] + 0.5 * PER_EXPERT[2, 1:6]),
    "shift": (Shift(given(BIAS), 0.5), BIAS, 1.5 * BIAS),
    "replacement": (Replacement(given(TOKENS)), draw(3, I) + 1, TOKENS),
    "token rows": (
        TokenRows(given(TOKENS), (6, 0, 2)),
        W,
        torch.stack([TOKENS[1], W[1], TOKENS[2], *W[3:6], TOKENS[0]]),
    ),
    "dora": (
        Dora(LOW_RANK, given(MAGNITUDE)),
        W,
        normed(W + 0.5 * B @ A, dims=(1,), magnitude=MAGNITUDE[:, None]),
    ),
    "transposed dora": (
        Dora(TRANSPOSED, given(MAGNITUDE), output_dim=1),
        W_T,
        normed(W_T + (0.5 * B @ A).T, dims=(0,), magnitude=MAGNITUDE),
    ),
    "convolved dora": (
        Dora(CONVOLUTION, given(MAGNITUDE.reshape(1, O, 1, 1))),
        KERNEL,
        normed(KERNEL + CONVOLVED, dims=(1, 2, 3), magnitude=MAGNITUDE[:, None, None, None]),
    ),
    "chain": (Chain(Replacement(given(BIAS)), Shift(given(BIAS), 2.0)), draw(O) + 3, 3 * BIAS),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[Edit, Tensor, Tensor]:
    return CASES[request.param]


def by_rows(rows, base: Tensor, step: int) -> Tensor:
    blocks = [(start, min(start + step, len(base))) for start in range(0, len(base), step)]
    return torch.cat([rows(start, stop, base[start:stop]).clone() for start, stop in blocks])


@pytest.mark.parametrize("step", [1, 2, 100])
def test_an_edit_is_its_formula_on_any_rows(step: int, case: tuple[Edit, Tensor, Tensor]) -> None:
    edit, base, expected = case
    before = base.clone()

    result, change = (by_rows(of(edit, base), base, step) for of in (result_rows, delta_rows))

    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(change, expected - base, rtol=1e-5, atol=1e-6)
    assert torch.equal(base, before)


def test_an_edit_leaves_what_it_was_given_alone(case: tuple[Edit, Tensor, Tensor]) -> None:
    """Rows belong to whoever asked for them: changing them in place changes no later answer."""
    edit, base, expected = case

    for of in (result_rows, delta_rows):
        of(edit, base)(0, len(base), base).mul_(0)

    torch.testing.assert_close(result_rows(edit, base)(0, len(base), base), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_factors_of_any_dtype_are_widened_first(dtype: torch.dtype) -> None:
    a, b = A.to(dtype), B.to(dtype)
    edit = LowRank(given(a), given(b), 0.5, R)

    expected = (b.to(torch.float64) @ a.to(torch.float64)) * 0.5

    torch.testing.assert_close(delta_rows(edit, W)(0, O, W).double(), expected, rtol=1e-6, atol=1e-6)


def test_edits_add_up_with_their_weights() -> None:
    edits: list[tuple[Edit, float]] = [(LOW_RANK, 2.0), (Dora(LOW_RANK, given(MAGNITUDE)), -0.5)]

    merged = WeightedSum(edits).begin(W)(0, O)

    dora = normed(W + 0.5 * B @ A, dims=(1,), magnitude=MAGNITUDE[:, None])
    torch.testing.assert_close(merged, W + 2.0 * (0.5 * B @ A) - 0.5 * (dora - W), rtol=1e-5, atol=1e-6)


def test_one_edit_of_weight_one_is_itself_bit_for_bit() -> None:
    new = draw(O, I) * 1e8

    assert torch.equal(WeightedSum([(Replacement(given(new)), 1.0)]).begin(W)(0, O), new)
    assert torch.equal(WeightedSum([(LOW_RANK, 1.0)]).begin(W)(0, O), (B @ A) * 0.5 + W)


@pytest.mark.parametrize("name", CASES)
def test_the_factors_of_an_edit_are_found_in_it(name: str) -> None:
    edit = CASES[name][0]

    expected = {
        "one expert": (FUSED,),
        "dora": (LOW_RANK,),
        "transposed dora": (TRANSPOSED,),
        "convolved dora": (CONVOLUTION,),
    }.get(name, (edit,) if isinstance(edit, Additive) and name != "shift" else ())
    assert lora_factors(edit) == expected
