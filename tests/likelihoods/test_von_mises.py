"""The von Mises likelihood: density and curvature against SciPy and autograd, predictions against integrals."""

import copy
import math
import pickle
import warnings

import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator import to_linear_operator
from linear_operator.operators import DiagLinearOperator
from scipy import special, stats

from gpext.distributions import CompoundVonMises, VonMises
from gpext.inference import Laplace
from gpext.likelihoods import VonMisesLikelihood
from gpext.likelihoods.von_mises import AngleWarning
from tests.members import F64, tensor
from tests.statistics import misfit

LENGTHS = [1e-9, 1e-3, 0.4, 0.99, 1.01, 3.0, 29.0, 31.0, 300.0]


def latents(length, angle=0.7):
    return (length * torch.stack([tensor(angle).cos(), tensor(angle).sin()])).requires_grad_()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("y", [0.7, 0.75, 3.0])
def test_log_prob_and_curvature_against_scipy_and_autograd(length, y):
    likelihood, f, targets = VonMisesLikelihood(), latents(length), tensor(y)
    value = likelihood.log_prob(targets, f)
    assert value.item() == pytest.approx(stats.vonmises.logpdf(y, length, 0.7), rel=1e-12, abs=1e-12)
    at = likelihood.curvature(targets, f)
    torch.testing.assert_close(at.log_prob, value)
    hessian = torch.autograd.functional.hessian(lambda f: likelihood.log_prob(targets, f).sum(), f)[:, 0, :, 0]
    (gradient,) = torch.autograd.grad(value.sum(), f)
    torch.testing.assert_close(at.gradient, gradient, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(at.blocks[..., 0], -hessian, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(at.expected_blocks, at.blocks)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_curvature_is_differentiable(length):
    """Laplace needs the third derivatives of log p."""
    likelihood, f = VonMisesLikelihood(), latents(length)

    def blocks(f):
        return likelihood.curvature(tensor(0.0), f).blocks

    ours = torch.autograd.functional.jacobian(blocks, f)
    for j in range(2):
        step = 1e-4 * max(length, 1.0)
        up, down = f.detach().clone(), f.detach().clone()
        up[j] += step
        down[j] -= step
        difference = (blocks(up) - blocks(down)) / (2 * step)
        torch.testing.assert_close(ours[..., j, 0], difference, rtol=1e-6, atol=1e-7 / max(length, 1.0))


def test_extreme_concentrations():
    likelihood = VonMisesLikelihood()
    f = latents(1e6)
    at = likelihood.curvature(tensor(0.7 + 1e-3), f)
    assert at.log_prob.item() == pytest.approx(stats.norm.logpdf(1e-3, scale=1e-3), rel=1e-6)
    low, high = torch.linalg.eigvalsh(at.blocks[..., 0]).tolist()
    assert low == pytest.approx(0.5e-12, rel=1e-5)  # along eta, 1 / (2 kappa^2)
    assert high == pytest.approx(1e-6, rel=1e-5)
    single = likelihood.curvature(torch.tensor([0.71]), latents(1e4).detach().float())
    exact = likelihood.curvature(torch.tensor([0.71]).double(), latents(1e4).detach().float().double())
    for name in ("log_prob", "gradient", "precision", "coupling"):
        assert getattr(single, name).dtype == torch.float32
        torch.testing.assert_close(getattr(single, name).double(), getattr(exact, name), rtol=1e-5, atol=1e-6)
    at_zero = likelihood.curvature(tensor(0.3), torch.zeros(2, 1, dtype=F64))
    torch.testing.assert_close(at_zero.blocks[..., 0], 0.5 * torch.eye(2, dtype=F64))


def test_a_sure_direction_keeps_its_digits_in_float32():
    f = latents(1e6).detach().float()
    given = VonMisesLikelihood()(MultivariateNormal(f, to_linear_operator(1e-3 * torch.ones(2, 1, 1))))
    assert given.variance.dtype == given.concentration.dtype == given.mean.dtype == torch.float32
    assert given.variance.item() == pytest.approx(0.5e-6, rel=1e-4)  # 1 / (2 kappa)
    assert given.concentration.item() == pytest.approx(1e6, rel=1e-4)


def test_forward_is_the_same_density():
    likelihood, f = VonMisesLikelihood(), torch.randn(3, 2, 5, dtype=F64)
    y = torch.randn(3, 5, dtype=F64)
    conditional = likelihood(f)
    assert isinstance(conditional, VonMises)
    torch.testing.assert_close(conditional.log_prob(y), likelihood.log_prob(y, f))


def correlated(mean, covariance):
    """One datum."""
    return MultitaskMultivariateNormal(tensor(*mean).unsqueeze(0), to_linear_operator(covariance))


@pytest.mark.parametrize(
    ("mean", "covariance"),
    [
        ((1.0, 2.0), ((1.0, 0.6), (0.6, 2.0))),
        ((-10.0, 3.0), ((25.0, -20.0), (-20.0, 25.0))),
        ((200.0, 60.0), ((100.0, 10.0), (10.0, 4.0))),
    ],
)
def test_the_predictive_sees_the_correlation(mean, covariance):
    V = torch.tensor(covariance, dtype=F64)
    predictive = VonMisesLikelihood()(correlated(mean, V))
    assert isinstance(predictive, CompoundVonMises)
    step = 0.04
    line = torch.arange(-9, 9 + step, step, dtype=F64)
    z = torch.cartesian_prod(line, line)
    eta = tensor(*mean) + z @ torch.linalg.cholesky(V).T
    weights = torch.exp(-0.5 * z.square().sum(-1)) * step**2 / (2 * math.pi)
    kappa = eta.norm(dim=-1)
    for y in (0.3, 2.9 if mean[0] < 100 else 0.2):
        dot = eta @ tensor(math.cos(y), math.sin(y))
        density = torch.exp(dot - kappa) / (2 * math.pi * torch.special.i0e(kappa))
        expected = (weights * density).sum().log().item()
        assert predictive.log_prob(tensor(y)).item() == pytest.approx(expected, rel=1e-8)
    A = torch.special.i1e(kappa) / torch.special.i0e(kappa)
    resultant = ((weights * A / kappa).unsqueeze(-1) * eta).sum(0)
    assert predictive.mean.item() == pytest.approx(math.atan2(resultant[1], resultant[0]), abs=1e-8)
    length = resultant.norm().item()
    assert predictive.resultant_length.item() == pytest.approx(length, rel=1e-8)
    kappa = predictive.concentration.item()
    assert special.i1e(kappa) / special.i0e(kappa) == pytest.approx(length, rel=1e-8)


def test_the_predictive_density_has_mass_one():
    predictive = VonMisesLikelihood()(correlated((1.0, 2.0), torch.tensor([[1.0, 0.6], [0.6, 2.0]]).double()))
    turn = torch.arange(40, dtype=F64) * 2 * math.pi / 40
    mass = predictive.log_prob(turn.unsqueeze(-1)).exp().sum() * 2 * math.pi / 40
    assert mass.item() == pytest.approx(1, abs=1e-8)


def test_draws_agree_with_the_moments():
    predictive = VonMisesLikelihood()(correlated((1.0, 2.0), torch.tensor([[1.0, 0.6], [0.6, 2.0]]).double()))
    y = predictive.sample((200_000,), generator=torch.Generator().manual_seed(0))
    assert y.shape == (200_000, 1)
    assert misfit(torch.cat([y.cos(), y.sin()], -1), predictive.resultant[:, 0]) < 1


def test_independent_latents_of_either_layout():
    mean, variance = torch.randn(2, 5, dtype=F64), torch.rand(2, 5, dtype=F64)
    y = torch.randn(5, dtype=F64)
    batch = MultivariateNormal(mean, DiagLinearOperator(variance))
    tasks = MultitaskMultivariateNormal.from_batch_mvn(batch)
    likelihood = VonMisesLikelihood()
    for method in ("log_marginal", "expected_log_prob"):
        torch.testing.assert_close(getattr(likelihood, method)(y, batch), getattr(likelihood, method)(y, tasks))
    torch.testing.assert_close(likelihood(batch).log_prob(y), likelihood.log_marginal(y, tasks))
    f = mean + variance.sqrt() * torch.randn(200_000, 2, 5, dtype=F64, generator=torch.Generator().manual_seed(0))
    values = likelihood.log_prob(y, f)
    assert misfit(values, likelihood.expected_log_prob(y, batch)) < 1


def test_the_direction_of_a_circle_is_recovered():
    x = torch.linspace(0, 2 * math.pi, 60, dtype=F64)
    y = torch.remainder(x + 0.1 * torch.randn(60, dtype=F64, generator=torch.Generator().manual_seed(0)), 2 * math.pi)
    K = 25 * torch.exp(-0.5 * (x.unsqueeze(-1) - x).square()) + 1e-6 * torch.eye(60, dtype=F64)
    prior = MultivariateNormal(torch.zeros(2, 60, dtype=F64), to_linear_operator(K.expand(2, 60, 60)))
    result = Laplace().infer(prior, VonMisesLikelihood(), y)
    assert result.status.name == "CONVERGED"
    predictive = VonMisesLikelihood()(result.posterior)
    error = torch.atan2((predictive.mean - x).sin(), (predictive.mean - x).cos())
    assert float(error.abs().mean()) < 0.08
    assert float(predictive.concentration.min()) > 4
    assert bool((result.log_loo > -3).all())


def test_degrees_are_warned_about_once_and_whole_turns_do_not_matter():
    likelihood, f = VonMisesLikelihood(), torch.randn(2, 2, dtype=F64)
    with pytest.warns(AngleWarning, match=r"90 at index 1 is more than a full turn.*torch.deg2rad"):
        value = likelihood.log_prob(tensor(0.5, 90.0), f)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped = likelihood.log_prob(tensor(0.5, 90.0 - 28 * math.pi), f)
    torch.testing.assert_close(value, wrapped)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies(clone):
    likelihood, f, y = VonMisesLikelihood(), torch.randn(2, 3), torch.randn(3)
    assert torch.equal(clone(likelihood).log_prob(y, f), likelihood.log_prob(y, f))
