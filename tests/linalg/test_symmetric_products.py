"""Symmetric products by their lower blocks, against full products."""

import pytest
import torch

from gpext.linalg.symmetric_products import subtract_product, symmetric_product
from gpext.posteriors import lower_blocks, symmetric_matrix
from tests.members import F64

SIZES = [1, 127, 128, 129, 300]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_a_product_by_blocks_is_the_product(batch, size):
    A = torch.randn(*batch, size, 7, generator=torch.Generator().manual_seed(0), dtype=F64)
    tau = torch.linspace(-1, 2, 7, dtype=F64)
    torch.testing.assert_close(symmetric_product(A * tau, A), A @ torch.diag(tau) @ A.mT, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_products_are_subtracted_by_blocks(batch, size):
    generator = torch.Generator().manual_seed(0)
    A, B = (torch.randn(*batch, size, 7, generator=generator, dtype=F64) for _ in range(2))
    left = A @ A.mT
    blocks = lower_blocks(left.clone())
    subtract_product(blocks, B)
    torch.testing.assert_close(symmetric_matrix(blocks), left - B @ B.mT, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("size", SIZES)
def test_blocks_are_not_much_more_than_a_triangle(size):
    triangle = torch.randn(size, size, generator=torch.Generator().manual_seed(0), dtype=F64).tril()
    whole = triangle + triangle.tril(-1).mT
    blocks = lower_blocks(whole)
    assert torch.equal(symmetric_matrix(blocks), whole)
    assert sum(block.numel() for block in blocks) <= size * (size + 128) / 2 + 64 * 128
