"""Products in the device's fastest type: what they read, what they give, and that nothing of it stays behind."""

from __future__ import annotations

import pytest
import torch

from compressors.compute_types import fastest_products, products_dtype
from compressors.hessians import HessianSum

CPU = torch.device("cpu")


def test_a_hessian_summed_inside_is_that_of_the_inputs_as_products_read_them() -> None:
    x_NI = torch.randn(300, 256, generator=torch.Generator().manual_seed(0))
    inside = HessianSum(256, device=CPU)
    with fastest_products(CPU):
        inside.add(x_NI)
    read_NI = x_NI.to(products_dtype(CPU)).double()
    expected_II = read_NI.t() @ read_NI / len(read_NI)
    torch.testing.assert_close(inside.mean().double(), expected_II, rtol=1e-5, atol=1e-5)


def test_a_linear_layer_inside_gives_its_products_type() -> None:
    with fastest_products(CPU):
        assert torch.nn.Linear(8, 8)(torch.ones(1, 8)).dtype == products_dtype(CPU)


def test_outside_everything_is_as_before_also_after_an_error() -> None:
    x_NI = torch.randn(300, 256, generator=torch.Generator().manual_seed(0))
    before, precision = x_NI.t() @ x_NI, torch.backends.mkldnn.matmul.fp32_precision
    with pytest.raises(ValueError, match="inside"), fastest_products(CPU), fastest_products(CPU):
        raise ValueError("inside")
    assert torch.backends.mkldnn.matmul.fp32_precision == precision
    assert torch.equal(x_NI.t() @ x_NI, before)
