"""The von Mises distribution: density and draws against SciPy's."""

import math

import pytest
import torch
from scipy import stats

from gpext.distributions import VonMises
from gpext.distributions.circular.compound_von_mises import concentration_of
from gpext.special import resultant_slope

F64 = torch.float64
KAPPAS = [1e-6, 0.1, 0.9999, 1.0001, 2.0, 7.0, 29.9, 30.1, 1e3, 1e6]


@pytest.mark.parametrize("kappa", [0.0, 0.5, 4.0, 200.0])
def test_log_prob_is_scipys(kappa):
    y = torch.linspace(-3, 3, 13, dtype=F64)
    ours = VonMises(torch.tensor(0.7, dtype=F64), kappa)
    expected = stats.vonmises.logpdf(y.numpy(), kappa, 0.7) if kappa else [-math.log(2 * math.pi)] * 13
    assert ours.log_prob(y).tolist() == pytest.approx(list(expected), rel=1e-12)
    assert ours.log_prob(y + 4 * math.pi).tolist() == pytest.approx(list(expected), rel=1e-9)


def test_a_sharp_one_is_a_normal():
    ours = VonMises(torch.tensor(1.0, dtype=F64), 1e6)
    y = 1 + 1e-3 * torch.linspace(-3, 3, 7, dtype=F64)
    normal = torch.distributions.Normal(torch.tensor(1.0, dtype=F64), 1e-3).log_prob(y)
    torch.testing.assert_close(ours.log_prob(y), normal, rtol=1e-5, atol=1e-5)
    assert ours.variance.item() == pytest.approx(0.5e-6, rel=1e-6)


@pytest.mark.parametrize("kappa", [0.0, 0.3, 5.0, 1e4, 1e12])
def test_draws_have_the_distribution(kappa):
    ours = VonMises(torch.tensor(0.5, dtype=F64), torch.tensor(kappa, dtype=F64))
    draws = ours.sample((20_000,), generator=torch.Generator().manual_seed(0))
    assert bool(((draws > -math.pi) & (draws <= math.pi)).all())
    if kappa <= 100:
        off = torch.remainder(draws - 0.5 + math.pi, 2 * math.pi) - math.pi
        cdf = (lambda t: stats.vonmises.cdf(t, kappa)) if kappa else stats.uniform(-math.pi, 2 * math.pi).cdf
    else:
        off, cdf = (draws - 0.5) * math.sqrt(kappa), stats.norm.cdf
    assert stats.kstest(off.numpy(), cdf).pvalue > 1e-5
    again = ours.sample((20_000,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(draws, again)


def test_expands_and_checks():
    ours = VonMises(torch.zeros(3), torch.ones(3))
    assert ours.expand((2, 3)).sample().shape == (2, 3)
    assert ours.mean.tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="concentration"):
        VonMises(torch.zeros(3), -torch.ones(3))


def test_the_concentration_of_a_resultant_length():
    kappa = torch.tensor([0.0, 1e-3, 0.4, 1.7, 30.0, 1e4], dtype=F64)
    length = VonMises(torch.zeros(6, dtype=F64), kappa).resultant_length.requires_grad_()
    found = concentration_of(length)
    torch.testing.assert_close(found, kappa, rtol=1e-9, atol=1e-12)
    (slope,) = torch.autograd.grad(found.sum(), length)
    torch.testing.assert_close(slope, 1 / resultant_slope(kappa.square()), rtol=1e-9, atol=0)
