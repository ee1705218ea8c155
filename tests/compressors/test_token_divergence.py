"""The divergence that training lowers, against its definition and torch's own gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from compressors.token_divergence import ROWS, mean_divergence


def test_it_is_that_of_the_definition() -> None:
    wanted = torch.tensor([[0.0, 0.0], [1.0, -1.0]])
    found = torch.tensor([[1.0, 0.0], [1.0, -1.0]])
    p, q = wanted.softmax(-1), found.softmax(-1)
    assert mean_divergence(wanted, found).item() == pytest.approx(float((p * (p / q).log()).sum() / 2))


@pytest.mark.parametrize("tokens", [1, ROWS, 2 * ROWS + 3])
def test_its_gradients_are_those_of_kl_div(tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    wanted, start = (5 * torch.randn(tokens, 11, generator=generator) for _ in range(2))
    found, same = (start.clone().requires_grad_(True) for _ in range(2))
    logs = same.log_softmax(-1), wanted.log_softmax(-1)
    expected = functional.kl_div(*logs, reduction="batchmean", log_target=True)
    divergence = mean_divergence(wanted, found)
    (3 * expected).backward()
    (3 * divergence).backward()
    assert divergence.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(found.grad, same.grad, atol=1e-6)


def test_logits_in_bfloat16_are_compared_in_float32() -> None:
    wanted, start = torch.randn(4, 7), torch.randn(4, 7).bfloat16()
    found = start.clone().requires_grad_(True)
    divergence = mean_divergence(wanted, found)
    divergence.backward()
    assert divergence.dtype == torch.float32
    assert divergence.item() == pytest.approx(mean_divergence(wanted, start.float()).item())
    assert found.grad.dtype == torch.bfloat16
