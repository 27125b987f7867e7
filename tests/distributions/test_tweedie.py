"""Tweedie's density against 40 digits, and the identities of a distribution."""

import math

import mpmath
import pytest
import torch

from gpext.distributions import Tweedie
from gpext.distributions.tweedie_density import tweedie_log_prob
from tests.members import F64
from tests.statistics import frequency_is, misfit

POWERS = (1.01, 1.1, 1.5, 1.8, 1.99)
PARAMETERS = [(0.0, 1.0, 1.5), (2.0, 0.1, 1.1), (3.0, 0.01, 1.01), (-1.0, 5.0, 1.9), (5.0, 0.01, 1.6)]


def tensor(*values):
    return tuple(torch.tensor(value, dtype=F64) for value in values)


def reference(y, log_mean, phi, p):
    """log p(y) by the series over the number of terms, or by its integral where it is wide; 40 digits."""
    with mpmath.workdps(40):
        y, mu, phi, p = mpmath.mpf(y), mpmath.exp(mpmath.mpf(log_mean)), mpmath.mpf(phi), mpmath.mpf(p)
        rate, a = mu ** (2 - p) / (phi * (2 - p)), (2 - p) / (p - 1)
        x = y / (phi * (p - 1) * mu ** (p - 1))
        centre = y ** (2 - p) / (phi * (2 - p))
        width = mpmath.sqrt(centre / (1 + a))

        def log_term(j):
            count = j * mpmath.log(rate) - rate - mpmath.loggamma(j + 1)
            return count + j * a * mpmath.log(x) - x - mpmath.loggamma(j * a) - mpmath.log(y)

        largest = log_term(max(mpmath.mpf(1), centre))
        if width < 30:
            first, last = max(1, int(centre - 15 * width - 20)), int(centre + 15 * width + 120)
            return largest + mpmath.log(mpmath.fsum(mpmath.exp(log_term(j) - largest) for j in range(first, last)))
        places = [-14, -7, -3, 0, 3, 7, 14]
        total = mpmath.quad(lambda u: mpmath.exp(log_term(centre + width * u) - largest), places)
        return largest + mpmath.log(width * total)


@pytest.mark.slow
@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("phi", [1e-3, 1.0, 1e3])
def test_the_log_density_to_1e_10(p, phi):
    for y in (1e-8, 0.3, 1e3, 1e8):
        for log_ratio in (0.0, 0.5):
            log_mean = math.log(y) + log_ratio
            expected = float(reference(y, log_mean, phi, p))
            got = tweedie_log_prob(*tensor(y, log_mean, phi, p)).item()
            assert got == pytest.approx(expected, rel=1e-12, abs=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("p", [1.01, 1.5, 1.99])
@pytest.mark.parametrize(("y", "phi"), [(1e-8, 1e-3), (0.3, 1.0), (1e3, 0.1), (1e8, 1e3)])
def test_derivatives_in_dispersion_and_power(y, phi, p):
    log_mean = math.log(y) + 0.3
    arguments = [value.requires_grad_() for value in tensor(log_mean, phi, p)]
    gradient = torch.autograd.grad(tweedie_log_prob(torch.tensor(y, dtype=F64), *arguments), arguments)
    for i, step in enumerate((1e-9, 1e-9 * phi, 1e-9)):
        with mpmath.workdps(40):
            at = [[mpmath.mpf(v) + k * (j == i) * step for j, v in enumerate((log_mean, phi, p))] for k in (-1, 1)]
            difference = (reference(y, *at[1]) - reference(y, *at[0])) / (2 * mpmath.mpf(step))
        assert gradient[i].item() == pytest.approx(float(difference), rel=1e-8, abs=1e-8)


@pytest.mark.parametrize(("log_mean", "phi", "p"), PARAMETERS)
def test_the_density_and_the_atom_sum_to_one_with_the_stated_moments(log_mean, phi, p):
    law = Tweedie(*tensor(log_mean, phi, p))
    spread = float(law.variance.sqrt() / law.mean)
    ends = (-14 * spread, 14 * spread) if spread < 0.2 else (-30 * max((p - 1) / (2 - p), 1), 8.0)  # of log(y / mu)
    u = torch.linspace(*ends, 40001, dtype=F64)
    y = (log_mean + u).exp()
    density = law.log_prob(y).exp() * y
    zero = law.log_prob(torch.zeros((), dtype=F64)).exp()
    moments = [torch.trapezoid(density * (y / law.mean) ** k, u) + (zero if k == 0 else 0) for k in range(3)]
    assert moments[0].item() == pytest.approx(1, abs=1e-9)
    assert moments[1].item() == pytest.approx(1, abs=1e-9)
    assert moments[2].item() - 1 == pytest.approx(float(law.variance / law.mean**2), rel=1e-6)


@pytest.mark.parametrize(("log_mean", "phi", "p"), PARAMETERS)
def test_the_cdf_is_the_integral_of_the_density(log_mean, phi, p):
    law = Tweedie(*tensor(log_mean, phi, p))
    y = law.mean * torch.tensor([0.2, 0.7, 1.0, 1.4, 3.0], dtype=F64)
    step = 1e-3 * torch.minimum(y, law.variance.sqrt())
    ends = [law.cdf(y + k * step) for k in (-2, -1, 1, 2)]
    slope = (8 * (ends[2] - ends[1]) - (ends[3] - ends[0])) / (12 * step)
    torch.testing.assert_close(slope, law.log_prob(y).exp(), rtol=1e-6, atol=1e-8)
    zero = torch.zeros((), dtype=F64)
    torch.testing.assert_close(law.cdf(zero), law.log_prob(zero).exp())
    assert law.cdf(zero - 1) == 0
    assert law.cdf(1e6 * law.mean).item() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(("log_mean", "phi", "p"), PARAMETERS)
def test_draws_follow_the_distribution(log_mean, phi, p):
    law, number = Tweedie(*tensor(log_mean, phi, p)), 20000
    draws = law.sample((number,), generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(draws, law.sample((number,), generator=torch.Generator().manual_seed(3)))
    assert misfit(draws.unsqueeze(-1), law.mean, variance=law.variance) < 1
    for y in (0.0, 0.5 * law.mean.item(), law.mean.item(), 1.5 * law.mean.item()):
        assert frequency_is(law.cdf(torch.tensor(y, dtype=F64)), (draws <= y).sum(), number)


def test_the_scores_have_mean_zero():
    """E[d log p(Y) / d(log mu, phi, p)] = 0."""
    number = 20000
    arguments = [value.expand(number).clone().requires_grad_() for value in tensor(0.4, 0.7, 1.4)]
    y = Tweedie(*(value.detach() for value in arguments)).sample(generator=torch.Generator().manual_seed(4))
    scores = torch.autograd.grad(tweedie_log_prob(y, *arguments).sum(), arguments)
    assert misfit(torch.stack(scores, -1), 0.0) < 1


def test_batches_shapes_and_dtypes():
    law = Tweedie(torch.zeros(3), 1.0, torch.tensor([1.2, 1.5, 1.8]))
    assert law.batch_shape == (3,)
    assert law.sample((4,)).shape == (4, 3)
    y = torch.tensor([[0.0], [2.5]])
    assert law.log_prob(y).shape == law.cdf(y).shape == (2, 3)
    assert law.log_prob(y).dtype == law.cdf(y).dtype == torch.float32
    alone = [Tweedie(0.0, 1.0, p).log_prob(y.double()) for p in (1.2, 1.5, 1.8)]
    torch.testing.assert_close(law.log_prob(y), torch.cat(alone, -1).float(), rtol=1e-5, atol=1e-5)
    assert law.expand(torch.Size([2, 3])).mean.shape == (2, 3)
    assert Tweedie(torch.zeros(0), 1.0, 1.5).log_prob(torch.zeros(0)).shape == (0,)


def test_bad_parameters_and_values_are_refused():
    with pytest.raises(ValueError, match="power"):
        Tweedie(0.0, 1.0, 2.0)
    with pytest.raises(ValueError, match="dispersion"):
        Tweedie(0.0, -1.0, 1.5)
    with pytest.raises(ValueError, match="support"):
        Tweedie(0.0, 1.0, 1.5).log_prob(torch.tensor(-1.0))
