"""Credible regions on the simplex hold their share of new draws."""

import copy
import math
import pickle

import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from scipy import stats

from gpext.distributions.predictive.simplex_region import draw_log_shares
from gpext.likelihoods import DirichletLikelihood
from tests.statistics import z_threshold

F64 = torch.float64


def predictive(mean, sd, latents=3, dtype=F64):
    """One datum for each mean, with equal latents."""
    m = torch.tensor(mean, dtype=dtype).expand(latents, len(mean))
    covariance = torch.eye(len(mean), dtype=dtype) * sd**2
    return DirichletLikelihood(latents)(MultivariateNormal(m, covariance.expand(latents, -1, -1)))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("latents", [2, 3, 6])
def test_regions_hold_their_share_of_new_draws(latents):
    prediction = predictive([-2.0, 0.0, 3.0, 20.0], 1.5, latents)
    region = prediction.credible_region(0.8, generator=seeded())
    draws = prediction.sample((4000,), generator=seeded(1))
    inside = region.contains(draws.clamp_min(1e-300))  # with small parameters some shares are zero in float64
    error = math.hypot(region.standard_error, math.sqrt(0.16 / 4000))
    assert region.standard_error == pytest.approx(math.sqrt(0.16 / 4096))
    assert float(((inside.double().mean(0) - 0.8) / error).abs().max()) < z_threshold(4)
    assert float(((inside.double().mean(0) - 0.9) / error).abs().min()) > z_threshold(4)  # the test can fail


def test_without_spread_of_the_latents_the_region_is_that_of_a_beta():
    region = predictive([6.0], 1e-4, 2).credible_region(0.9, num_draws=8000, generator=seeded())
    alpha = math.log1p(math.exp(6))
    low, high = stats.beta(alpha, alpha).interval(0.9)  # symmetric: of highest density
    y = torch.linspace(0.001, 0.999, 999, dtype=F64)
    inside = region.contains(torch.stack([y, 1 - y], -1).unsqueeze(-2))[:, 0]
    assert y[inside].min().item() == pytest.approx(low, abs=5e-3)
    assert y[inside].max().item() == pytest.approx(high, abs=5e-3)
    exact = torch.tensor(stats.beta(alpha, alpha).logpdf(low))
    assert region.log_threshold.item() == pytest.approx(exact.item(), abs=0.05)


def test_its_density_is_close_to_that_of_the_prediction():
    prediction = predictive([3.0], 1.0)
    region = prediction.credible_region(0.9, num_draws=16_384, generator=seeded())
    y = prediction.sample((6,), generator=seeded(1))
    torch.testing.assert_close(region.log_density(y), prediction.log_prob(y), rtol=0, atol=0.25)


def test_shares_that_underflow_have_logarithms():
    theta = torch.tensor([1e-4, 2.0, 0.3], dtype=F64).expand(50_000, 3)
    log_y = draw_log_shares(theta.log(), seeded())
    assert bool(log_y.isfinite().all())
    assert float(log_y.min()) < -1000
    torch.testing.assert_close(log_y.exp().sum(-1), torch.ones(50_000, dtype=F64))
    given = log_y[:, 2].exp() / (log_y[:, 1].exp() + log_y[:, 2].exp())
    assert stats.kstest(given[:3000].numpy(), stats.beta(0.3, 2.0).cdf).pvalue > 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_shares_of_parameters_that_all_underflow_are_a_corner_chosen_by_their_ratios(dtype):
    log_theta = torch.tensor([-2000.0, -2000.0 + math.log(3.0)], dtype=dtype).expand(20_000, 2)
    log_y = draw_log_shares(log_theta, seeded())
    assert bool(log_y.isfinite().all())
    assert float((log_y.amin(-1) < -100).double().mean()) > 0.999  # float32 has occasional ties
    share = float((log_y[:, 1] == 0).double().mean())
    assert abs(share - 0.75) < 4.5 * math.sqrt(0.75 * 0.25 / 20_000)
    region = predictive([-2000.0], 1.0, dtype=dtype).credible_region(0.5, num_draws=400, generator=seeded())
    assert bool(region.log_threshold.isfinite().all())


def test_shapes_types_and_copies():
    prediction = predictive([1.0, 2.0], 0.5, dtype=torch.float32)
    region = prediction.credible_region(0.5, num_draws=400, generator=seeded())
    assert region.concentration.shape == (100, 2, 3)
    assert region.log_threshold.dtype == torch.float32
    y = torch.tensor([0.2, 0.3, 0.5])
    assert region.contains(y.expand(7, 1, 3)).shape == (7, 2)
    again = prediction.credible_region(0.5, num_draws=400, generator=seeded())
    assert torch.equal(again.log_threshold, region.log_threshold)
    for clone in (copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))):
        assert torch.equal(clone(region).contains(y.expand(2, 3)), region.contains(y.expand(2, 3)))


def test_batches():
    mean = torch.tensor([[1.0, 8.0], [3.0, -1.0], [2.0, 2.0]], dtype=F64)  # D = 3, two data
    covariance = 0.5 * torch.eye(2, dtype=F64).expand(4, 3, 2, 2)
    prediction = DirichletLikelihood(3)(MultivariateNormal(mean.expand(4, 3, 2), covariance))
    region = prediction.credible_region(0.8, generator=seeded())
    assert region.log_threshold.shape == (4, 2)
    spread = region.log_threshold.std(0)
    assert float(spread.max()) < 0.2  # the four are alike
    assert abs(region.log_threshold.mean(0).diff().item()) > 0.3  # the two data are not
    draws = prediction.sample((50,), generator=seeded(1))
    one = region.contains(draws[:, 1:2])
    assert one.shape == (50, 4, 2)
    assert torch.equal(one[:, 1], region.contains(draws)[:, 1])


def test_many_points_are_taken_in_parts(monkeypatch):
    region = predictive([1.0, 2.0], 0.5).credible_region(0.5, num_draws=400, generator=seeded())
    y = predictive([1.0], 0.5).sample((6, 5), generator=seeded(1))  # (6, 5, 1, 3)
    at_once = region.log_density(y)
    monkeypatch.setattr("gpext.distributions.predictive.simplex_region._CHUNK", 3000)
    torch.testing.assert_close(region.log_density(y), at_once)
    torch.testing.assert_close(torch.stack([region.log_density(part) for part in y]), at_once)
    assert at_once.shape == (6, 5, 2)


def test_errors_say_what_was_expected():
    prediction = predictive([1.0], 0.5)
    with pytest.raises(ValueError, match="strictly between 0 and 1; got 1"):
        prediction.credible_region(1.0)
    with pytest.raises(ValueError, match="num_draws must be at least 100; got 10"):
        prediction.credible_region(0.5, num_draws=10)
    region = prediction.credible_region(0.5, num_draws=100)
    with pytest.raises(ValueError, match=r"inside the simplex; got 0 at index \(0, 2\)"):
        region.contains(torch.tensor([[0.5, 0.5, 0.0]], dtype=F64))
