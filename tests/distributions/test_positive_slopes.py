"""First derivatives of log densities by numerical inversion or quadrature, as NUTS and SVI need them."""

import pytest
import torch

from gpext.distributions import GeneralizedInverseGaussian, InverseGaussian, PolyaGamma, ScaleMixture

F64 = torch.float64


def tensor(value):
    return torch.tensor(value, dtype=F64)


LAWS = {
    "polya_gamma": (lambda z: PolyaGamma(tensor(2.5), z), [[0.0, 1e-3, 0.7, -9.0]], 0.05),
    "polya_gamma_many": (lambda z: PolyaGamma(tensor(1e3), z), [[0.0, 0.5]], 247.0),
    "scale_mixture": (lambda c: ScaleMixture(lambda r: torch.exp(-torch.sqrt(r)), c), [[0.1, 1.0, 6.0]], 0.3),
    "inverse_gaussian": (InverseGaussian, [[0.5, 3.0], [2.0, 0.4]], 0.8),
    "generalized": (GeneralizedInverseGaussian, [[-1.5, 0.3, 4.0], [2.0, 1.0, 9.0], [1.5, 2.0, 0.2]], 0.6),
}


@pytest.mark.parametrize("name", LAWS)
def test_slopes_of_log_densities_are_finite_differences(name):
    make, parameters, value = LAWS[name]
    arguments = [tensor(p) for p in parameters] + [torch.full((len(parameters[0]),), value, dtype=F64)]
    leaves = [t.clone().requires_grad_() for t in arguments]
    log_prob = make(*leaves[:-1]).log_prob(leaves[-1])
    with torch.no_grad():
        torch.testing.assert_close(log_prob, make(*arguments[:-1]).log_prob(arguments[-1]))
    for k, slope in enumerate(torch.autograd.grad(log_prob.sum(), leaves)):
        step = 1e-4 * arguments[k].abs().clamp_min(1e-2)

        def moved(by, k=k, step=step):
            shifted = [t + by * step if j == k else t for j, t in enumerate(arguments)]
            return make(*shifted[:-1]).log_prob(shifted[-1])

        expected = (8 * (moved(1) - moved(-1)) - (moved(2) - moved(-2))) / (12 * step)
        torch.testing.assert_close(slope, expected, rtol=1e-7, atol=1e-7)


def test_slopes_where_there_is_no_density():
    for law in (
        PolyaGamma(torch.tensor([0.0, 1.0, 1.0]), torch.tensor([1.0, torch.inf, 1.0], requires_grad=True)),
        ScaleMixture(lambda r: torch.exp(-torch.sqrt(r)), torch.tensor([torch.inf, 1.0, 100.0], requires_grad=True)),
    ):
        log_prob = law.log_prob(torch.tensor([0.5, 0.0, 40.0]))
        (slope,) = torch.autograd.grad(log_prob.exp().sum(), law.tilt)
        assert bool(slope.isfinite().all())
    with pytest.raises(NotImplementedError, match="no derivative in count"):
        PolyaGamma(torch.tensor(1.0, requires_grad=True), torch.tensor(1.0)).log_prob(torch.tensor(0.2))
