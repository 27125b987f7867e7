"""The inverse Gaussian: tails and moments against mpmath, also at extreme parameters."""

import math

import mpmath
import pytest
import torch

from gpext.distributions import InverseGaussian

F64 = torch.float64


def tensor(*values):
    return torch.tensor(values, dtype=F64)


def reference(x, mean, shape):
    """Cdf and survival in 60 digits."""
    with mpmath.workdps(60):
        x, shape = mpmath.mpf(x), mpmath.mpf(shape)
        rate = 0 if mean == math.inf else 1 / mpmath.mpf(mean)
        root = mpmath.sqrt(shape / x)
        a, b = root * (x * rate - 1), root * (x * rate + 1)
        reflected = mpmath.exp(2 * shape * rate) * mpmath.ncdf(-b)
        return float(mpmath.ncdf(a) + reflected), float(mpmath.ncdf(-a) - reflected)


@pytest.mark.parametrize("mean", [1e-6, 0.5, 30.0, 1e8, math.inf])
@pytest.mark.parametrize("shape", [1e-3, 0.5, 200.0])
def test_both_tails_are_relatively_accurate(mean, shape):
    law = InverseGaussian(tensor(mean), tensor(shape))
    width = min(math.sqrt(mean / shape), 1.0)
    centre = min(mean, shape)
    for z in (-6, -2, 0, 2, 8):
        x = centre * math.exp(z * width)
        cdf, survival = reference(x, mean, shape)
        if cdf > 1e-290:
            assert float(law.cdf(tensor(x))) == pytest.approx(cdf, rel=1e-10)
        if survival > 1e-290:
            assert float(law.survival(tensor(x))) == pytest.approx(survival, rel=1e-10)


def test_moments_at_extreme_ratios_of_mean_and_shape():
    mean, shape = tensor(1e-8, 1.0, 1e5), tensor(1.0, 1e12, 1e-3)
    law = InverseGaussian(mean, shape)
    draws = law.sample((50_000,), generator=torch.Generator().manual_seed(0))
    assert bool((draws > 0).all())
    uniform = law.cdf(draws)
    # A uniform variable has mean 1/2 and variance 1/12.
    assert float(((uniform.mean(0) - 0.5) * math.sqrt(12 * 50_000)).abs().max()) < 4.5
    assert float(((draws[:, 1] - 1).std() / 1e-6 - 1).abs()) < 0.02


def test_infinite_mean_is_the_levy_distribution():
    law = InverseGaussian(math.inf, tensor(0.5, 2.0))
    assert law.mean.tolist() == law.variance.tolist() == [math.inf, math.inf]
    x = tensor(0.3, 7.0)
    expected = torch.erfc((law.shape / (2 * x)).sqrt())
    torch.testing.assert_close(law.cdf(x), expected, rtol=1e-14, atol=0)
    median = law.icdf(0.5)
    torch.testing.assert_close(law.cdf(median), tensor(0.5, 0.5), rtol=1e-14, atol=0)
    limit = InverseGaussian(1e30, law.shape)
    torch.testing.assert_close(limit.log_prob(x), law.log_prob(x), rtol=1e-14, atol=0)


def test_bad_parameters_are_refused():
    for mean, shape in ((0.0, 1.0), (-1.0, 1.0), (1.0, 0.0), (math.nan, 1.0)):
        with pytest.raises(ValueError, match="constraint"):
            InverseGaussian(mean, shape, validate_args=True)
