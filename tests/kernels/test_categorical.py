"""The kernel of categories: exp(-[a != b] / l) column by column, positive definite, the same on the diagonal."""

import torch

from gpext.kernels import CategoricalKernel


def test_it_is_the_product_of_equal_correlations():
    x = torch.tensor([[0.0, 1.0], [0.0, 2.0], [3.0, 1.0], [3.0, 5.0]], dtype=torch.float64)
    kernel = CategoricalKernel(ard_num_dims=2, batch_shape=torch.Size([3])).double()
    kernel.lengthscale = torch.tensor([[[0.5, 2.0]], [[1.0, 1.0]], [[3.0, 0.1]]], dtype=torch.float64)
    expected = torch.ones(3, 4, 4, dtype=torch.float64)
    for b in range(3):
        for i in range(4):
            for j in range(4):
                for column in range(2):
                    if x[i, column] != x[j, column]:
                        expected[b, i, j] *= torch.exp(-1 / kernel.lengthscale[b, 0, column]).item()
    found = kernel(x).to_dense()
    assert torch.allclose(found, expected, rtol=1e-14)
    assert torch.allclose(kernel(x, diag=True), torch.ones(3, 4, dtype=torch.float64))
    flipped = kernel(x, x.flip(0), diag=True)
    assert torch.allclose(flipped, kernel(x, x.flip(0)).to_dense().diagonal(dim1=-2, dim2=-1))
    assert torch.linalg.eigvalsh(found).min() > -1e-12


def test_one_lengthscale_for_all_columns_counts_the_differences():
    kernel = CategoricalKernel()
    kernel.lengthscale = 2.0
    x = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 7.0]])
    assert torch.allclose(kernel(x).to_dense()[0, 1], torch.exp(torch.tensor(-1.0)))


def test_gradients_are_those_of_finite_differences():
    x = torch.randint(0, 3, (5, 2), generator=torch.Generator().manual_seed(0)).double()
    kernel = CategoricalKernel(ard_num_dims=2).double()

    def matrix(raw):
        return torch.func.functional_call(kernel, {"raw_lengthscale": raw}, (x, x)).to_dense()

    assert torch.autograd.gradcheck(matrix, kernel.raw_lengthscale.detach().clone().requires_grad_())
