"""A mixture over a batch dimension, against the mean over its components."""

import pickle

import pytest
import torch
from torch.distributions import Bernoulli, Independent, Laplace, Normal

from gpext.distributions import BatchMixture, Mixture
from tests.statistics import misfit

F64 = torch.float64


def components():
    generator = torch.Generator().manual_seed(0)
    return Normal(
        torch.randn(7, 3, dtype=F64, generator=generator), torch.rand(7, 3, dtype=F64, generator=generator) + 0.1
    )


def test_is_the_mixture_of_its_components_with_equal_weights():
    normal = components()
    average = BatchMixture(normal)
    separate = Mixture(
        torch.full((7,), 1 / 7, dtype=F64), [Normal(m, s) for m, s in zip(normal.loc, normal.scale, strict=True)]
    )
    value = torch.randn(4, 3, dtype=F64, generator=torch.Generator().manual_seed(1))
    for name in ("mean", "variance"):
        torch.testing.assert_close(getattr(average, name), getattr(separate, name))
    for name in ("log_prob", "cdf"):
        torch.testing.assert_close(getattr(average, name)(value), getattr(separate, name)(value))
    torch.testing.assert_close(
        average.quantile(torch.tensor([0.1, 0.5, 0.99], dtype=F64)),
        separate.icdf(torch.tensor([0.1, 0.5, 0.99], dtype=F64)),
    )
    assert average.batch_shape == (3,)


def test_quantiles_invert_the_distribution_function():
    average = BatchMixture(components())
    q = torch.rand(5, 3, dtype=F64).clamp(1e-3, 1 - 1e-3)
    torch.testing.assert_close(average.cdf(average.icdf(q)), q, rtol=1e-12, atol=1e-12)


def test_samples_have_its_moments():
    torch.manual_seed(0)
    average = BatchMixture(components())
    draws = average.sample((20_000,))
    assert draws.shape == (20_000, 3)
    assert misfit(draws, average.mean, variance=average.variance) < 1
    assert average.sample().shape == (3,)
    correlation = torch.corrcoef(draws.mT)[0, 1]  # the entries of one draw are independent
    assert abs(correlation) < 4.5 / 20_000**0.5


def test_expands_pickles_and_refuses():
    average = pickle.loads(pickle.dumps(BatchMixture(Laplace(torch.zeros(4, 1), 1.0))))
    wide = average.expand((5,))
    torch.testing.assert_close(wide.log_prob(torch.ones(5)), average.log_prob(torch.ones(1)).expand(5))
    with pytest.raises(NotImplementedError, match="cannot expand"):
        average.expand((2, 5))
    with pytest.raises(ValueError, match=r"got batch shape \(\)"):
        BatchMixture(Normal(0.0, 1.0))
    with pytest.raises(ValueError, match="event shape"):
        BatchMixture(Independent(Normal(torch.zeros(2, 3), 1.0), 1))
    discrete = BatchMixture(Bernoulli(torch.tensor([0.2, 0.4])))
    torch.testing.assert_close(discrete.mean, torch.tensor(0.3))
    with pytest.raises(NotImplementedError, match="discrete"):
        discrete.icdf(0.5)
