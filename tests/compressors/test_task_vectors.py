"""Combining task vectors: PEFT's numbers where PEFT has them, the papers' laws, and the same bits everywhere."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator

import pytest
import torch
from peft.utils import merge_utils
from torch import Tensor

from compressors.task_vectors import (
    BLOCK,
    Combination,
    arc,
    blend,
    combine,
    drop_and_rescale,
    elect_and_average,
    mask_seed,
    sign_conflicts,
    slerp,
    ties,
    trim,
    weighted_sum,
)

WEIGHTS = (0.7, -0.4, 1.3)
SEVERAL_BLOCKS = 2 * BLOCK + 100


def random_vectors(*shape: int, count: int = 3, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for _ in range(count)]


def clones(vectors: list[Tensor]) -> list[Tensor]:
    return [vector.clone() for vector in vectors]


@pytest.fixture
def _two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def test_the_weighted_sum_is_pefts_task_arithmetic() -> None:
    vectors = random_vectors(5, 300, 30)
    expected = merge_utils.task_arithmetic(vectors, torch.tensor(WEIGHTS))

    torch.testing.assert_close(weighted_sum(clones(vectors), WEIGHTS), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("majority_sign_method", ["total", "frequency"])
@pytest.mark.parametrize("density", [0.03, 0.5, 0.97])
def test_ties_is_pefts_where_no_magnitudes_are_equal(majority_sign_method, density: float) -> None:
    vectors = random_vectors(3, 150, 99)
    expected = merge_utils.ties(vectors, torch.tensor(WEIGHTS), density, majority_sign_method)

    merged = ties(clones(vectors), WEIGHTS, density=density, majority_sign_method=majority_sign_method)

    torch.testing.assert_close(merged, expected, rtol=0, atol=1e-6)


def test_ties_at_density_1_is_pefts_without_pruning() -> None:
    vectors = random_vectors(64, 65)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The density 1")
        expected = merge_utils.ties(vectors, torch.tensor(WEIGHTS), 1.0)

    torch.testing.assert_close(ties(clones(vectors), WEIGHTS, density=1.0), expected, rtol=0, atol=1e-6)


def test_ties_averages_what_agrees_with_the_elected_sign() -> None:
    vectors = [torch.tensor([3.0, 1.0, 0.0, 5.0]), torch.tensor([-1.0, 1.0, 0.0, -2.0]), torch.tensor([2.0, 4, 0, -2])]
    weights = (1.0, 2.0, 3.0)

    total = elect_and_average(clones(vectors), weights, majority_sign_method="total")
    frequency = elect_and_average(clones(vectors), weights, majority_sign_method="frequency")

    assert total.tolist() == [(3 + 6) / 2, (1 + 2 + 12) / 3, 0, 5]
    assert frequency.tolist() == [(3 + 6) / 2, (1 + 2 + 12) / 3, 0, (-4 - 6) / 2]


def test_an_even_vote_elects_plus() -> None:
    vectors = [torch.tensor([2.0]), torch.tensor([-2.0])]

    assert elect_and_average(vectors, (1.0, 1.0)).tolist() == [2.0]


@pytest.mark.parametrize(("density", "kept"), [(1e-9, 1), (0.25, 2), (0.5, 5), (0.99, 9), (1.0, 10)])
def test_trim_keeps_the_largest_magnitudes(density: float, kept: int) -> None:
    vector = torch.tensor([0.5, -9.0, 3.0, -4.0, 0.1, 7.0, -6.0, 2.0, 8.0, -1.0])
    largest = sorted(vector.tolist(), key=abs)[-kept:]

    assert [value for value in trim(vector, density).tolist() if value] == [
        value for value in vector.tolist() if value in largest
    ]


def test_of_equal_magnitudes_trim_keeps_the_first_in_every_block() -> None:
    vector = torch.ones(SEVERAL_BLOCKS)
    vector[::2] = -1
    vector[-1] = 5
    kept = BLOCK + 7

    trimmed = trim(vector.clone(), (kept + 0.5) / SEVERAL_BLOCKS)

    assert torch.equal(trimmed[: kept - 1], vector[: kept - 1])
    assert trimmed[-1] == 5
    assert not trimmed[kept - 1 : -1].any()


def test_trim_keeps_exactly_the_share_of_a_tensor_with_many_equal_values() -> None:
    vector = random_vectors(SEVERAL_BLOCKS, count=1)[0].mul_(4).round_()

    assert int((trim(vector, 0.1) != 0).sum()) == int(0.1 * SEVERAL_BLOCKS)


def test_trim_leaves_an_empty_tensor_and_one_of_zeros() -> None:
    assert trim(torch.zeros(0, 4), 0.5).shape == (0, 4)
    assert not trim(torch.zeros(8), 0.5).any()


def test_what_is_dropped_is_plus_zero() -> None:
    vector = -torch.ones(1000)
    trimmed, dropped = trim(vector.clone(), 0.5), drop_and_rescale(vector.clone(), 0.5, torch.Generator())

    for sparse in (trimmed, dropped):
        assert not torch.signbit(sparse[sparse == 0]).any()


def test_dare_keeps_the_density_and_the_expectation() -> None:
    n, density = 400_000, 0.3

    dropped = drop_and_rescale(torch.full((n,), 2.0), density, torch.Generator().manual_seed(0))

    assert set(dropped.tolist()) == {0.0, float(torch.tensor(2.0) / density)}
    assert abs(float((dropped != 0).float().mean()) - density) < 5 * math.sqrt(density * (1 - density) / n)
    assert abs(float(dropped.double().mean()) - 2.0) < 5 * 2.0 * math.sqrt((1 - density) / density / n)


def test_dare_is_pefts_formula_on_the_same_mask() -> None:
    vector, density = random_vectors(50, 60, count=1)[0], 0.4
    dropped = drop_and_rescale(vector.clone(), density, torch.Generator().manual_seed(3))
    mask = (dropped != 0).float()

    assert torch.equal(dropped, vector * mask / density)
    assert 0 < mask.mean() < 1


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_dare_then_sums_or_elects(method) -> None:
    vectors, seeds = random_vectors(40, 50), (11, 12, 13)
    dropped = [
        drop_and_rescale(vector.clone(), 0.6, torch.Generator().manual_seed(seed))
        for vector, seed in zip(vectors, seeds, strict=True)
    ]
    stacked, weights = torch.stack(dropped), torch.tensor(WEIGHTS).view(-1, 1, 1)
    mask = merge_utils.calculate_majority_sign_mask(stacked, method="frequency")
    expected = {
        "dare_linear": (stacked * weights).sum(0),
        "dare_ties": merge_utils.disjoint_merge(stacked * weights, mask),
    }[method]

    merged = combine(clones(vectors), WEIGHTS, Combination(method, 0.6, "frequency"), seeds=seeds)

    torch.testing.assert_close(merged, expected, rtol=0, atol=1e-6)


def test_combine_with_ties_is_ties() -> None:
    vectors = random_vectors(30, 40)
    expected = ties(clones(vectors), WEIGHTS, density=0.3, majority_sign_method="frequency")

    merged = combine(clones(vectors), WEIGHTS, Combination("ties", 0.3, "frequency"), seeds=(0, 0, 0))

    assert torch.equal(merged, expected)


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("method", ["ties", "dare_linear", "dare_ties"])
def test_the_bits_do_not_depend_on_the_number_of_threads(method) -> None:
    vectors, seeds = random_vectors(3, SEVERAL_BLOCKS), (1, 2, 3)
    vectors = [vector.mul_(8).round_() for vector in vectors]

    on_two = combine(clones(vectors), WEIGHTS, Combination(method, 0.3), seeds=seeds)
    arc_on_two = arc(vectors[0], vectors[1], 0.3)
    torch.set_num_threads(1)

    assert torch.equal(combine(clones(vectors), WEIGHTS, Combination(method, 0.3), seeds=seeds), on_two)
    assert arc(vectors[0], vectors[1], 0.3) == arc_on_two


def test_the_vectors_are_worked_on_in_place() -> None:
    vectors = random_vectors(SEVERAL_BLOCKS)

    merged = combine(vectors, WEIGHTS, Combination("ties", 0.5), seeds=(0, 0, 0))

    assert merged.data_ptr() == vectors[0].data_ptr()


def test_a_masks_seed_depends_on_the_request_the_model_and_the_tensor() -> None:
    named = {mask_seed(s, name=n, tensor=t) for s in (0, 1) for n in ("a", "ab") for t in ("w", "bw")}

    assert len(named) == 8
    assert mask_seed(0, name="a", tensor="w") == 3738123527789391693
    assert all(0 <= seed < 2**63 for seed in named)


def test_sign_conflicts_are_counted_among_changed_elements() -> None:
    vectors = [torch.tensor([1.0, 1.0, 0.0, 0.0, -2.0]), torch.tensor([-1.0, 1.0, 0.0, 3.0, -2.0])]

    assert sign_conflicts(vectors) == 1 / 4
    assert sign_conflicts([torch.zeros(3), torch.zeros(3)]) == 0.0


def test_slerp_ends_at_its_ends() -> None:
    start, end = random_vectors(SEVERAL_BLOCKS, count=2)
    start[0] = end[0] = -0.0

    for way, expected in ((0, start), (1, end)):
        assert torch.equal(slerp(start, end, way).view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("way", [0.1, 0.5, 0.8])
def test_slerp_divides_the_angle_and_keeps_the_norm(way: float) -> None:
    start, end = (vector / vector.norm() * 3 for vector in random_vectors(30, 40, count=2))
    whole = math.acos(float((start * end).sum() / 9))

    point = slerp(start, end, way)

    assert float(point.norm()) == pytest.approx(3, rel=1e-6)
    assert math.acos(float((start * point).sum() / 9)) == pytest.approx(way * whole, rel=1e-5)
    assert arc(start, end, way).angle_rad == pytest.approx(whole, rel=1e-6)


def test_slerp_of_perpendicular_tensors_of_other_norms() -> None:
    point = slerp(torch.tensor([2.0, 0.0]), torch.tensor([0.0, 6.0]), 1 / 3)

    torch.testing.assert_close(point, torch.tensor([2 * math.cos(math.pi / 6), 6 * math.sin(math.pi / 6)]))


@pytest.mark.parametrize(
    ("start", "end", "angle_rad"),
    [
        ([1.0, 2.0], [2.0, 4.0], 0.0),
        ([1.0, 2.0], [-2.0, -4.0], math.pi),
        ([1.0, 2.0], [0.0, 0.0], None),
        ([0.0, 0.0], [1.0, 2.0], None),
        ([], [], None),
    ],
)
def test_without_a_great_arc_slerp_is_linear(start, end, angle_rad: float | None) -> None:
    start, end = torch.tensor(start), torch.tensor(end)
    found = arc(start, end, 0.25).angle_rad

    assert found == angle_rad or found == pytest.approx(angle_rad, abs=1e-7)
    assert torch.equal(slerp(start, end, 0.25), 0.75 * start + 0.25 * end)


def test_slerp_is_continuous_where_it_turns_linear() -> None:
    start, step = (vector.double() for vector in random_vectors(1000, count=2))
    for size in (0.9e-4, 1.1e-4):
        end = start + size * step

        torch.testing.assert_close(slerp(start, end, 0.3), (0.7 * start + 0.3 * end).float(), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("weights", [(0.5, 0.5), (1 / 3,) * 3, (0.1, 0.2, 0.7)])
def test_an_element_that_all_tensors_share_stays_as_it_is(weights: tuple[float, ...]) -> None:
    shared = torch.cat([random_vectors(5000, count=1)[0], torch.tensor([-0.0, 1e-45, 3e38])])

    assert torch.equal(blend([shared] * len(weights), weights).view(torch.int32), shared.view(torch.int32))


def test_blend_reads_every_floating_dtype() -> None:
    halves = torch.tensor([0.1]).half(), torch.tensor([0.1]).bfloat16()

    assert float(blend(halves, (1.0, 1.0))) == float(halves[0].double() + halves[1].double())
    assert blend((torch.ones(2, 3, dtype=torch.float64),), (0.0,)).tolist() == [[0.0] * 3] * 2
