"""Errors from Gram matrices are those of the outputs themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compressors.decoder_families import LinearGroup
from compressors.layer_errors import gram_matrices, relative_error

GENERATOR = torch.Generator().manual_seed(0)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def test_an_error_is_that_of_the_outputs():
    x_NI, w_OI = random(50, 8), random(6, 8)
    changed_OI = w_OI + 0.1 * random(6, 8)
    expected = float((x_NI @ (w_OI - changed_OI).T).norm() / (x_NI @ w_OI.T).norm())
    assert relative_error(w_OI, changed_OI, gram_II=x_NI.T @ x_NI) == pytest.approx(expected, rel=1e-5)


def test_equal_weights_have_no_error_and_a_layer_without_output_none():
    w_OI = random(6, 8)
    assert relative_error(w_OI, w_OI, gram_II=torch.eye(8)) == 0
    assert relative_error(w_OI, 2 * w_OI, gram_II=torch.zeros(8, 8)) is None


def test_gram_matrices_are_summed_over_batches_and_shared_in_a_group():
    module = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 2), "c": nn.Linear(3, 2)})
    groups = (LinearGroup(("a", "b"), None), LinearGroup(("c",), None))
    batches = [random(2, 5, 4), random(1, 5, 4)]
    grams = gram_matrices(module, groups, batches=batches, run=lambda x: module["c"](module["a"](x)))
    x_NI = torch.cat([batch.reshape(-1, 4) for batch in batches])
    torch.testing.assert_close(grams["a"], x_NI.T @ x_NI)
    assert grams["b"] is grams["a"]
    torch.testing.assert_close(grams["c"], module["a"](x_NI).T @ module["a"](x_NI))


def test_no_hook_stays_on_the_module():
    module = nn.ModuleDict({"a": nn.Linear(4, 3)})
    gram_matrices(module, (LinearGroup(("a",), None),), batches=[random(1, 2, 4)], run=module["a"])
    assert not module["a"]._forward_pre_hooks
