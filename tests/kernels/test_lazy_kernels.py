"""Lazy kernels below the size from which gpytorch's own are stored no more."""

import gpytorch
import pytest
import torch

from gpext.kernels import keops
from gpext.operators import KernelOperator

F64 = torch.float64


@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_backend_that_was_asked_for_serves_small_matrices_too(batch):
    options = {"nu": 1.5, "ard_num_dims": 2, "batch_shape": torch.Size(batch)}
    lazy, stock = (
        kernels.MaternKernel(**options, **own).double()
        for kernels, own in ((keops, {"backend": "tiles"}), (gpytorch.kernels, {}))
    )
    x, z = torch.rand(*batch, 9, 2, dtype=F64), torch.rand(*batch, 4, 2, dtype=F64)
    v = torch.rand(*batch, 9, 3, dtype=F64)
    assert isinstance(lazy(x).evaluate_kernel(), KernelOperator)
    torch.testing.assert_close(lazy(z, x) @ v, stock(z, x).to_dense() @ v)
    noisy, dense = lazy(x).add_jitter(0.1), stock(x).to_dense() + 0.1 * torch.eye(9, dtype=F64)
    torch.testing.assert_close(noisy.solve(v), torch.linalg.solve(dense, v))
    slopes = [
        torch.autograd.grad(value.sum(), kernel.raw_lengthscale)[0]
        for value, kernel in ((noisy.logdet(), lazy), (torch.logdet(dense), stock))
    ]
    torch.testing.assert_close(*slopes)
    for backend in ("auto", "dense"):
        assert not isinstance(keops.RBFKernel(backend=backend)(x).evaluate_kernel(), KernelOperator)


def test_an_input_that_is_no_number_is_told():
    x, z = torch.rand(9, 2, dtype=F64), torch.rand(4, 2, dtype=F64)
    bad = x.index_put((torch.tensor(3), torch.tensor(1)), torch.tensor(torch.nan, dtype=F64))
    kernel = keops.RBFKernel(backend="tiles").double()
    for pair in ((bad,), (z, bad), (bad, z)):
        with pytest.raises(ValueError, match=r"inputs must be finite; got nan at index \(3, 1\)"):
            kernel(*pair).evaluate_kernel()
