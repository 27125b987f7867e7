"""Mixtures: density, cdf, moments and draws against quadrature."""

import copy
import math
import pickle

import pytest
import torch
from torch.distributions import Cauchy, Laplace, MultivariateNormal, Normal, Poisson

from gpext.distributions import Mixture, StudentT
from tests.statistics import misfit

F64 = torch.float64
WEIGHTS = torch.tensor([0.2, 0.5, 0.3], dtype=F64)


def tensor(*values):
    return torch.tensor(values, dtype=F64)


def made():
    return Mixture(
        WEIGHTS,
        [
            Normal(tensor(0.0, 1.0), tensor(1.0, 0.1)),
            Laplace(tensor(4.0, -1.0), tensor(0.5, 2.0)),
            Normal(tensor(-9.0, 0.0), tensor(0.2, 1.0)),
        ],
    )


def test_density_cdf_and_moments_are_those_of_the_density_by_quadrature():
    mixture = made()
    y = torch.linspace(-60, 60, 1200001, dtype=F64).unsqueeze(-1)
    density = mixture.log_prob(y).exp()
    mass = lambda values: torch.trapezoid(values, y.expand_as(values), dim=0)  # noqa: E731
    torch.testing.assert_close(mass(density), torch.ones(2, dtype=F64), rtol=0, atol=1e-7)
    mean = mass(y * density)
    torch.testing.assert_close(mixture.mean, mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mixture.variance, mass((y - mean).square() * density), rtol=1e-6, atol=1e-6)
    at = 700000
    torch.testing.assert_close(
        mixture.cdf(y[at]), torch.trapezoid(density[: at + 1], y[: at + 1].expand(-1, 2), dim=0), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("q", [1e-6, 0.1, 0.2, 0.5, 0.75, 0.999])
def test_quantiles_invert_the_cdf(q):
    mixture = made()
    y = mixture.quantile(q)
    torch.testing.assert_close(mixture.cdf(y), torch.full((2,), q, dtype=F64), rtol=1e-10, atol=1e-14)
    assert torch.equal(mixture.icdf(tensor(q, q)), y)


def test_samples_have_its_moments():
    torch.manual_seed(0)
    mixture = made()
    draws = mixture.sample((200000,))
    assert draws.shape == (200000, 2)
    assert misfit(draws, mixture.mean, variance=mixture.variance) < 1
    below = mixture.cdf(tensor(2.0, 2.0))
    assert misfit((draws < 2).double(), below, variance=below * (1 - below)) < 1


def test_events_are_drawn_whole():
    torch.manual_seed(0)
    covariance = 1e-4 * torch.eye(2, dtype=F64)
    mixture = Mixture(tensor(0.4, 0.6), [MultivariateNormal(tensor(v, v), covariance) for v in (-5.0, 5.0)])
    assert (mixture.batch_shape, mixture.event_shape) == ((), (2,))
    draws = mixture.sample((1000,))
    assert draws.shape == (1000, 2)
    assert bool((draws[:, 0].sign() == draws[:, 1].sign()).all())
    assert (draws[:, 0] > 0).double().mean().item() == pytest.approx(0.6, abs=0.06)
    torch.testing.assert_close(mixture.mean, tensor(1.0, 1.0))
    torch.testing.assert_close(mixture.variance, tensor(24.0, 24.0), rtol=1e-3, atol=0)
    at = tensor(5.0, 5.0)
    expected = math.log(0.6) + mixture.components[1].log_prob(at)
    torch.testing.assert_close(mixture.log_prob(at), expected)


def test_what_has_no_weight_may_be_anything():
    broken = Normal(tensor(math.nan), tensor(1.0), validate_args=False)
    mixture = Mixture(tensor(0.0, 1.0), [broken, Normal(tensor(2.0), tensor(1.0))])
    assert mixture.mean.tolist() == [2.0]
    assert mixture.log_prob(tensor(2.0)).isfinite().all()


def test_moments_that_do_not_exist_do_not():
    heavy = Mixture(tensor(0.5, 0.5), [Normal(tensor(0.0), 1.0), StudentT(1.5, tensor(1.0), 1.0)])
    assert heavy.mean.tolist() == [0.5]
    assert heavy.variance.tolist() == [math.inf]
    heavier = Mixture(tensor(0.5, 0.5), [Normal(tensor(0.0), 1.0), Cauchy(tensor(1.0), tensor(1.0))])
    assert bool(heavier.mean.isnan().all())


def test_copies_and_expansions_are_alike():
    mixture, y = made(), tensor(0.3, -2.0)
    for again in (copy.deepcopy(mixture), pickle.loads(pickle.dumps(mixture))):
        assert torch.equal(again.log_prob(y), mixture.log_prob(y))
    wide = mixture.expand(torch.Size([3, 2]))
    assert wide.batch_shape == (3, 2)
    assert torch.equal(wide.log_prob(y), mixture.log_prob(y).expand(3, 2))
    assert wide.sample((4,)).shape == (4, 3, 2)


def test_gradients_reach_the_components():
    loc = tensor(0.5).requires_grad_()
    Mixture(tensor(0.3, 0.7), [Normal(loc, 1.0), Normal(loc + 1, 1.0)]).log_prob(tensor(0.0)).sum().backward()
    assert loc.grad.abs().item() > 0.1


def test_float32_stays():
    mixture = Mixture(WEIGHTS[:2] / 0.7, [Normal(torch.zeros(3), 1.0), Normal(torch.ones(3), 1.0)])
    for value in (mixture.mean, mixture.variance, mixture.log_prob(torch.zeros(3)), mixture.sample()):
        assert value.dtype == torch.float32


def test_errors_say_what_was_expected():
    one = Normal(tensor(0.0), 1.0)
    with pytest.raises(ValueError, match="one weight for each"):
        Mixture(tensor(1.0), [one, one])
    with pytest.raises(ValueError, match="sum to one"):
        Mixture(tensor(0.5, 0.6), [one, one])
    with pytest.raises(ValueError, match="one batch shape"):
        Mixture(tensor(0.5, 0.5), [one, Normal(tensor(0.0, 1.0), 1.0)])
    with pytest.raises(ValueError, match="strictly between"):
        Mixture(tensor(1.0), [one]).icdf(1.0)
    with pytest.raises(NotImplementedError, match="discrete"):
        Mixture(tensor(1.0), [Poisson(tensor(2.0))]).icdf(0.5)
