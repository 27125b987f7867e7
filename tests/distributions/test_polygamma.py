import pytest
import torch
from scipy import special

from gpext.distributions.polygamma import log_gamma, polygamma


def test_log_gamma_and_its_derivatives_are_scipys():
    x = torch.logspace(-3, 5, 33, dtype=torch.float64).requires_grad_()
    value, points = log_gamma(x), x.detach().numpy()
    assert value.tolist() == pytest.approx(list(special.gammaln(points)), rel=1e-12, abs=1e-14)
    for order in range(4):
        (value,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        expected = list(special.polygamma(order, points))
        assert value.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14)
        assert polygamma(order, x).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14)
