"""The Matern-3/2 noise distribution: mass, cdf, quantiles and draws against each other by quadrature."""

import copy
import itertools
import math
import pickle

import pytest
import scipy.integrate
import scipy.stats
import torch

from gpext.distributions import Matern32

F64 = torch.float64


def tensor(*values):
    return torch.tensor(values, dtype=F64)


LOC, SCALE = tensor(0.3, -2.0, 0.0), tensor(0.7, 1e-3, 50.0)


def density(distribution, i):
    return lambda y: math.exp(distribution.log_prob(torch.full((3,), y, dtype=F64))[i].item())


@pytest.mark.parametrize("i", range(3))
def test_density_has_mass_one_and_gives_cdf_and_variance(i):
    noise = Matern32(LOC, SCALE)
    loc, scale = LOC[i].item(), SCALE[i].item()
    p = density(noise, i)

    def integral(function, to):
        edges = [e for e in (-60, -20, -5, 0.0, 5, 20, 60) if loc + e * scale < to] + [(to - loc) / scale]
        pieces = itertools.pairwise(edges)
        return sum(scipy.integrate.quad(function, loc + a * scale, loc + b * scale, epsrel=1e-12)[0] for a, b in pieces)

    assert integral(p, loc + 60 * scale) == pytest.approx(1, abs=1e-10)
    variance = integral(lambda y: p(y) * (y - loc) ** 2, loc + 60 * scale)
    assert noise.variance[i].item() == pytest.approx(variance, rel=1e-9)
    assert noise.stddev[i].item() == pytest.approx(math.sqrt(variance), rel=1e-9)
    for z in (-8.0, -1.0, 0.0, 0.4, 6.0):
        y = loc + z * scale
        assert noise.cdf(torch.full((3,), y, dtype=F64))[i].item() == pytest.approx(integral(p, y), rel=1e-8)


def test_cdf_icdf_round_trip():
    noise = Matern32(LOC, SCALE)
    for q in (1e-300, 1e-12, 0.01, 0.4999, 0.5, 0.7, 0.9999):
        assert noise.cdf(noise.icdf(torch.full((3,), q, dtype=F64))).tolist() == pytest.approx([q] * 3, rel=1e-11)
    assert noise.icdf(tensor(0.0, 1.0, 0.5)).tolist() == [-math.inf, math.inf, 0.0]
    assert noise.cdf(tensor(-math.inf, math.inf, 0.0)).tolist() == [0.0, 1.0, 0.5]


def test_icdf_derivative_is_one_over_density():
    noise = Matern32(LOC, SCALE)
    q = tensor(0.1, 0.6, 0.99).requires_grad_()
    y = noise.icdf(q)
    y.sum().backward()
    assert q.grad.tolist() == pytest.approx((-noise.log_prob(y.detach())).exp().tolist(), rel=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_samples_follow_the_cdf(dtype):
    torch.manual_seed(0)
    noise = Matern32(LOC.to(dtype), SCALE.to(dtype))
    draws = noise.sample((20000,))
    assert draws.dtype == dtype
    uniform = noise.cdf(draws)
    for i in range(3):
        # sqrt(n) D has tail 2 exp(-2 x^2): 2.7 is exceeded with probability 1e-6.
        assert scipy.stats.kstest(uniform[:, i].numpy(), "uniform").statistic * math.sqrt(20000) < 2.7


def test_rsample_is_reparametrised():
    torch.manual_seed(1)
    scale = tensor(2.0).requires_grad_()
    draw = Matern32(tensor(1.0), scale).rsample((5,))
    (gradient,) = torch.autograd.grad(draw.sum(), scale)
    assert gradient.item() == pytest.approx(((draw - 1.0) / 2.0).sum().item(), rel=1e-12)


def test_shapes_copies_and_validation():
    noise = Matern32(LOC, SCALE)
    wide = noise.expand((4, 3))
    assert wide.batch_shape == (4, 3)
    assert wide.sample((2,)).shape == (2, 4, 3)
    value = torch.zeros(4, 3, dtype=F64)
    for twin in (wide, copy.deepcopy(wide), pickle.loads(pickle.dumps(wide))):
        assert torch.equal(twin.log_prob(value), noise.log_prob(value))
    with pytest.raises(ValueError, match="scale"):
        Matern32(0.0, -1.0)
    with pytest.raises(ValueError, match="support"):
        noise.log_prob(tensor(math.nan, 0.0, 0.0))
    assert noise.expand((3,)).mean.tolist() == noise.mode.tolist() == LOC.tolist()
