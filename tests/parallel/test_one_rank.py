"""One rank that still communicates by torch.distributed: over gloo, and over NCCL if there is a GPU."""

import gpytorch
import pytest
import torch

from gpext.kernels import keops
from gpext.parallel import Ranks
from tests.members import F64
from tests.parallel.processes import run
from tests.parallel.test_site_updates import problem

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def numbers(device, ranks=None):
    """The results of an update, including derivatives, and a product of a lazy kernel, on the CPU."""
    model, likelihood, x, y = (each.to(device) for each in problem("student_t"))
    value = model.base.update(x, y, likelihood, 0.7, 43, gradient="exact", ranks=ranks)
    slopes = [p.grad for p in [*model.hyperparameters(), *likelihood.parameters()] if p.grad is not None]
    kernel = keops.RBFKernel(backend="tiles").to(x)
    keops.share_products(kernel, ranks)
    with torch.no_grad(), gpytorch.settings.max_cholesky_size(10):
        product = kernel(x).evaluate_kernel() @ y
    return [t.detach().cpu() for t in (*model.natural, value, *slopes, product)]


def _of_rank(rank, device):
    ranks = Ranks()
    ranks._talks = True  # though there is no other rank
    found = numbers(device, ranks)
    assert ranks.everyones(ranks.own([1, 2, 3])) == [1, 2, 3]
    ranks.broadcast_([torch.ones(3, dtype=F64, device=device)])
    return found, ranks.any(True), ranks.traffic.operations


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_the_numbers_are_those_without_a_group(device):
    expected = numbers("cpu")
    backend = "gloo" if device == "cpu" else "nccl"
    (((found, some, operations), error),) = run(_of_rank, 1, device, backend=backend)
    assert error is None
    assert some
    assert operations > 5
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
