"""Distributions of an angle: cdf, quantiles and arcs against mpmath, sums over components and draws."""

import copy
import math
import pickle

import mpmath
import numpy as np
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from linear_operator import to_linear_operator
from scipy import special

from gpext.distributions import Arc, VonMises
from gpext.distributions.circular.angle_table import AngleTable
from gpext.likelihoods import VonMisesLikelihood
from gpext.quadrature import QuadratureWarning

F64 = torch.float64
KAPPAS = [0.0, 1e-8, 0.1, 1.0, 7.0, 150.0, 1e4, 1e6]
SKEWED = ((3.0, 1.0), ((4.0, -3.0), (-3.0, 4.0)))
BIMODAL = ((0.5, 0.2), ((30.0, 0.0), (0.0, 1.0)))
SHARP = ((300.0, -1.0), ((900.0, 20.0), (20.0, 4.0)))
HEAVY = ((30.0, 0.0), ((200.0, 0.0), (0.0, 1.0)))  # sharp, except for a twentieth of the mass


def exact_cdf(offset, kappa):
    """P(Y - loc <= offset), in 30 digits."""
    with mpmath.workdps(30):
        k = mpmath.mpf(kappa)
        height = mpmath.exp(-k) / (2 * mpmath.pi * mpmath.besseli(0, k) * mpmath.exp(-k))
        inside = mpmath.quad(lambda t: mpmath.exp(k * mpmath.cos(t)), mpmath.linspace(0, mpmath.mpf(offset), 5))
        return float(0.5 + height * inside)


@pytest.mark.slow
@pytest.mark.parametrize("kappa", KAPPAS)
def test_the_distribution_function_against_many_digits(kappa):
    deviation = min(1 / math.sqrt(max(kappa, 1e-9)), 1.5)
    offset = deviation * torch.tensor([-2.0, -1.1, -0.3, -1e-3, 0.0, 0.5, 1.7, 2.05], dtype=F64)
    ours = VonMises(torch.tensor(0.7, dtype=F64), kappa)
    expected = [exact_cdf(t, kappa) for t in offset.tolist()]
    assert ours.cdf(0.7 + offset).tolist() == pytest.approx(expected, abs=1e-12 + 1e-16 * math.sqrt(kappa))
    quantiles = ours.icdf(torch.tensor(expected, dtype=F64)) - 0.7
    assert (quantiles / deviation).tolist() == pytest.approx((offset / deviation).tolist(), abs=1e-10)
    arc = ours.credible_arc(0.8)
    assert arc.half_width.item() == pytest.approx(ours.icdf(0.9).item() - 0.7, rel=1e-9)
    if kappa > 1e-6:
        assert arc.centre.item() == pytest.approx(0.7, abs=1e-7 * deviation / min(kappa, 1))


def test_the_circle_is_cut_opposite_to_the_mean():
    ours = VonMises(torch.tensor([3.0, -3.0], dtype=F64), 4.0)
    y = torch.tensor([-3.0, 3.0], dtype=F64)  # each 0.28 beyond the mean, past pi
    above, below = ours.cdf(y).tolist()
    assert above == pytest.approx(1 - below, abs=1e-12)
    assert above == pytest.approx(exact_cdf(2 * math.pi - 6, 4.0), abs=1e-12)
    torch.testing.assert_close(ours.cdf(y + 8 * math.pi), ours.cdf(y), rtol=0, atol=1e-12)
    assert ours.cdf(ours.mean + math.pi - 1e-9).tolist() == pytest.approx([1, 1], abs=1e-9)
    lower, upper = ours.icdf(torch.tensor([[0.05], [0.95]], dtype=F64))
    assert bool((lower < ours.mean).all() and (upper > ours.mean).all())
    assert upper[0] > math.pi
    torch.testing.assert_close(ours.quantile(0.95), upper)


def test_arcs_wrap():
    arc = Arc(torch.tensor([3.0, 0.5]), torch.tensor([0.5, 3.1]))
    assert arc.upper.tolist() == pytest.approx([3.5, 3.6])
    assert arc.lower.tolist() == pytest.approx([2.5, -2.6])
    assert arc.contains(torch.tensor([-3.0, 0.5])).tolist() == [True, True]
    assert arc.contains(torch.tensor([-2.0, 0.5 + math.pi])).tolist() == [False, False]
    assert arc.contains(torch.tensor([[3.0 + 4 * math.pi], [0.0]])).tolist() == [[True, True], [False, True]]


def compound(mean, covariance):
    V = torch.tensor(covariance, dtype=F64)
    return VonMisesLikelihood()(MultitaskMultivariateNormal(torch.tensor([mean], dtype=F64), to_linear_operator(V)))


def fine_density(mean, covariance, angle):
    """p(angle) as a sum over a grid of latents."""
    line = torch.arange(-8, 8, 0.04, dtype=F64)
    z = torch.cartesian_prod(line, line)
    z = z[z.square().sum(-1) < 49]
    eta = torch.tensor(mean, dtype=F64) + z @ torch.linalg.cholesky(torch.tensor(covariance, dtype=F64)).T
    kappa, direction = eta.norm(dim=-1).numpy(), torch.atan2(eta[:, 1], eta[:, 0]).numpy()
    weights = np.exp(-0.5 * z.square().sum(-1).numpy()) * 0.04**2 / (2 * math.pi) / (2 * math.pi * special.i0e(kappa))
    return np.array([weights @ np.exp(-2 * kappa * np.sin((t - direction) / 2) ** 2) for t in angle])


@pytest.mark.slow
@pytest.mark.parametrize("case", [SKEWED, BIMODAL, SHARP, HEAVY], ids=["skewed", "bimodal", "sharp", "heavy"])
def test_a_mixture_against_a_sum_over_its_components(case):
    predictive = compound(*case)
    loc, reach = predictive.mean.item(), 0.5 if case is SHARP else math.pi
    step = 2 * reach / 400
    angle = loc - reach + step * np.arange(400)  # periodic, or without density at its ends
    density = fine_density(*case, angle)
    assert density.sum() * step == pytest.approx(1, abs=1e-8)
    turns = np.fft.rfft(density) * step  # integrated as a Fourier series
    k = np.arange(1, 200) * math.pi / reach
    for index in (40, 150, 199, 230, 390):
        t = angle[index] - angle[0]
        expected = t / (2 * reach) + (turns[1:200] * (np.exp(1j * k * t) - 1) / (1j * k)).real.sum() / reach
        value = torch.tensor(angle[index], dtype=F64)
        assert predictive.cdf(value).item() == pytest.approx(expected, abs=1e-8)
    for q in (1e-4, 0.3, 0.975):
        assert predictive.cdf(predictive.icdf(q)).item() == pytest.approx(q, abs=1e-12)


def test_a_batch_is_a_loop():
    mean, covariance = (torch.tensor(values, dtype=F64) for values in zip(SKEWED, BIMODAL, SHARP, strict=True))
    q = MultitaskMultivariateNormal(
        mean.view(3, 1, 2).expand(3, 2, 2), to_linear_operator(torch.kron(torch.eye(2, dtype=F64), covariance))
    )
    together = VonMisesLikelihood()(q)
    y = torch.tensor([0.3, 2.0], dtype=F64)
    arc = together.credible_arc(0.7)
    assert together.cdf(y).shape == arc.centre.shape == (3, 2)
    for i, case in enumerate((SKEWED, BIMODAL, SHARP)):
        alone = compound(*case)
        torch.testing.assert_close(together.cdf(y)[i], alone.cdf(y.unsqueeze(-1))[:, 0], rtol=0, atol=1e-8)
        torch.testing.assert_close(arc.half_width[i, 1], alone.credible_arc(0.7).half_width[0], rtol=0, atol=1e-6)


def test_spreads_beyond_the_nodes_lose_digits_alone():
    """No direction is preferred: the distribution function is linear."""
    predictive = compound((0.0, 0.0), ((1e4, 0.0), (0.0, 1e4)))
    turn = torch.linspace(-0.9, 0.9, 7, dtype=F64) * math.pi
    expected = 0.5 + turn / (2 * math.pi)
    ours = predictive.cdf((predictive.mean + turn).unsqueeze(-1))[:, 0]
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def shortest_by_search(predictive, probability):
    """The shortest of 4000 arcs, from a cumulative sum of the density."""
    theta = np.linspace(0, 2 * math.pi, 4001)
    below = predictive.cdf(torch.tensor(predictive.mean.item() - math.pi + 1e-12 + theta[:-1]).unsqueeze(-1))[:, 0]
    cumulative = np.append(below.numpy(), 1.0)
    twice, turned = np.append(cumulative, 1 + cumulative[1:]), np.append(theta, 2 * math.pi + theta[1:])
    return (np.interp(cumulative + probability, twice, turned) - theta).min()


@pytest.mark.parametrize("case", [SKEWED, BIMODAL], ids=["skewed", "bimodal"])
@pytest.mark.parametrize("probability", [0.3, 0.6, 0.95])
def test_the_arc_is_the_shortest_one(case, probability):
    predictive = compound(*case)
    arc = predictive.credible_arc(probability)
    assert 2 * arc.half_width.item() == pytest.approx(shortest_by_search(predictive, probability), abs=2e-5)
    inside = predictive.cdf(arc.upper) - predictive.cdf(arc.lower)
    assert (inside % 1).item() == pytest.approx(probability, abs=1e-9)
    torch.testing.assert_close(predictive.log_prob(arc.lower), predictive.log_prob(arc.upper), rtol=0, atol=1e-6)


def test_arcs_hold_their_share_of_draws():
    predictive = compound(*SKEWED)
    draws = predictive.sample((20_000,), generator=torch.Generator().manual_seed(0))
    share = predictive.credible_arc(0.9).contains(draws).double().mean().item()
    assert abs(share - 0.9) / math.sqrt(0.09 / 20_000) < 4.5
    matched = VonMises(predictive.mean, predictive.concentration)  # equal mean and concentration are not enough
    missed = matched.credible_arc(0.9).contains(draws).double().mean().item()
    assert abs(missed - 0.9) / math.sqrt(0.09 / 20_000) > 4.5


def test_batches_and_single_precision():
    loc = torch.tensor([[0.0], [2.0]])
    ours = VonMises(loc, torch.tensor([0.5, 4.0, 1e5]))
    assert ours.cdf(loc).dtype == ours.icdf(0.3).dtype == ours.credible_arc(0.5).centre.dtype == torch.float32
    assert ours.cdf(torch.zeros(5, 2, 3)).shape == (5, 2, 3)
    exact = VonMises(loc.double(), torch.tensor([0.5, 4.0, 1e5]).double())
    torch.testing.assert_close(ours.icdf(0.3).double(), exact.icdf(0.3), rtol=1e-6, atol=1e-6)
    one = VonMises(loc[1, 0].double(), 4.0)
    assert exact.credible_arc(0.7).half_width[1, 1].item() == pytest.approx(one.credible_arc(0.7).half_width.item())
    for clone in (copy.deepcopy, lambda d: pickle.loads(pickle.dumps(d))):
        assert torch.equal(clone(ours).icdf(0.3), ours.icdf(0.3))
    assert ours.expand((4, 2, 3)).icdf(0.5).shape == (4, 2, 3)


@pytest.mark.parametrize("call", [lambda d: d.icdf(0.0), lambda d: d.credible_arc(1.0), lambda d: d.icdf(math.nan)])
def test_probabilities_are_checked(call):
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        call(VonMises(0.0, 1.0))


def test_a_density_that_cannot_be_resolved_is_warned_about():
    sharp = VonMises(torch.tensor(2.0, dtype=F64), 1e7)
    with pytest.warns(QuadratureWarning, match="the distribution function of an angle has an error"):
        AngleTable.of(lambda angle: sharp.log_prob(angle).exp(), torch.zeros((), dtype=F64), torch.ones(()))
