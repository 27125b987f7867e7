"""Tweedie's likelihood: its integrals, its predictions with an atom at zero, and what it refuses."""

import math

import pytest
import torch
from gpytorch.constraints import GreaterThan, Interval
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator

from gpext.inference import EP, KL, Laplace
from gpext.likelihoods import Censored, LatentLikelihood, Offset, Truncated, TweedieLikelihood
from tests.members import F64


def made(dispersion=0.8, power=1.6):
    likelihood = TweedieLikelihood().double()
    values = {"dispersion": dispersion, "power": power}
    return likelihood.initialize(**{name: torch.tensor(value, dtype=F64) for name, value in values.items()})


def normal(mean, variance):
    return MultivariateNormal(mean, to_linear_operator(variance.diag_embed()))


@pytest.mark.parametrize("power", [1.1, 1.5, 1.9])
def test_the_expected_log_density_is_the_integral(power):
    likelihood = made(power=power)
    y = torch.tensor([0.0, 1e-3, 1.0, 50.0], dtype=F64)
    mean, variance = torch.tensor([0.3, -2.0, 1.0, 3.0], dtype=F64), torch.tensor([0.5, 2.0, 0.01, 0.3], dtype=F64)
    by_quadrature = LatentLikelihood.expected_log_density(likelihood, y, mean, variance)
    torch.testing.assert_close(
        likelihood.expected_log_density(y, mean, variance), by_quadrature, rtol=1e-10, atol=1e-10
    )


def test_it_is_concave_in_f_and_its_derivatives_are_smooth():
    likelihood = made()
    y = torch.tensor([0.0, 1e-6, 1.0, 1e6], dtype=F64)
    f = torch.linspace(-20, 20, 201, dtype=F64).unsqueeze(-1).requires_grad_()
    (slope,) = torch.autograd.grad(likelihood.log_prob(y, f).sum(), f, create_graph=True)
    assert slope.shape == f.shape
    one = f.detach().expand(-1, 4).clone().requires_grad_()
    (slope,) = torch.autograd.grad(likelihood.log_prob(y, one).sum(), one, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), one)
    assert bool((bend < 0).all())


def test_predictions_have_an_atom_at_zero():
    likelihood = made(dispersion=1.5)
    predictive = likelihood.marginal(normal(torch.tensor([0.0, 1.0], dtype=F64), torch.full((2,), 0.3, dtype=F64)))
    zero = predictive.log_prob(torch.zeros(2, dtype=F64)).exp()
    torch.testing.assert_close(predictive.cdf(torch.zeros(2, dtype=F64)), zero, rtol=1e-9, atol=0)
    quantiles = predictive.icdf(torch.stack([0.5 * zero, 0.5 + 0.5 * zero]).detach())
    assert bool((quantiles[0] == 0).all())
    torch.testing.assert_close(predictive.cdf(quantiles[1]), 0.5 + 0.5 * zero, rtol=1e-9, atol=0)
    torch.testing.assert_close(predictive.mean, (torch.tensor([0.0, 1.0], dtype=F64) + 0.15).exp(), rtol=1e-9, atol=0)


def test_tail_probabilities_count_the_atom_on_both_sides():
    likelihood, y = made(dispersion=3.0), torch.tensor([0.0, 2.0], dtype=F64)
    result = KL().infer(normal(torch.zeros(2, dtype=F64), torch.ones(2, dtype=F64)), likelihood, y)
    mean, variance = result.conditioned.leave_one_out
    below = likelihood.marginal(normal(mean, variance)).cdf(y)
    expected = torch.stack([2 * below[0], 2 * (1 - below[1])]).clamp_max(1)
    torch.testing.assert_close(result.loo_tail, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "rule",
    [Laplace(), pytest.param(EP(tolerance=1e-9), marks=pytest.mark.slow), pytest.param(KL(), marks=pytest.mark.slow)],
    ids=["laplace", "ep", "kl"],
)
def test_evidences_of_censored_amounts_have_the_derivatives_of_their_differences(rule):
    x = torch.linspace(0, 1, 5, dtype=F64)
    gram = torch.exp(-0.5 * (x.unsqueeze(-1) - x).square())
    prior = MultivariateNormal(torch.zeros(5, dtype=F64), to_linear_operator(gram))
    y = torch.tensor([[0.0, 0.0], [1.0, math.inf], [0.7, 0.7], [-math.inf, 0.5], [0.2, 2.0]], dtype=F64)

    def evidence(likelihood):
        result = rule.infer(prior, likelihood, y)
        assert result.status.name == "CONVERGED"
        return result.log_evidence

    likelihood = made()
    found = torch.autograd.grad(evidence(Censored(likelihood)), [likelihood.raw_dispersion, likelihood.raw_power])
    for slope, name in zip(found, ("raw_dispersion", "raw_power"), strict=True):
        ends = []
        for step in (-1e-4, 1e-4):
            moved = made()
            with torch.no_grad():
                getattr(moved, name).add_(step)
                ends.append(evidence(Censored(moved)))
        torch.testing.assert_close(slope.squeeze(), (ends[1] - ends[0]) / 2e-4, rtol=1e-5, atol=1e-6)


def test_truncated_amounts_have_the_density_of_those_that_are_left():
    likelihood, f = made(), torch.tensor([0.2, 1.0], dtype=F64)
    y, law = torch.tensor([0.5, 2.0], dtype=F64), likelihood(f)
    rest = (law.cdf(torch.tensor(3.0, dtype=F64)) - law.cdf(torch.tensor(0.0, dtype=F64))).log()
    torch.testing.assert_close(Truncated(likelihood, 0.0, 3.0).log_prob(y, f), law.log_prob(y) - rest)


def test_an_exposure_is_an_offset():
    likelihood, y = made(), torch.tensor([0.0, 2.0, 7.0], dtype=F64)
    exposure, f = torch.tensor([0.5, 1.0, 3.0], dtype=F64), torch.tensor([0.1, 0.2, 0.3], dtype=F64)
    shifted = Offset(likelihood, exposure.log())
    torch.testing.assert_close(shifted.log_prob(y, f), likelihood.log_prob(y, f + exposure.log()))
    prior = normal(torch.zeros(3, dtype=F64), torch.ones(3, dtype=F64))
    assert KL().infer(prior, shifted, y).log_loo.isfinite().all()


def test_float32_and_integers():
    likelihood = TweedieLikelihood()
    y = torch.tensor([0, 3])
    assert likelihood.log_prob(y, torch.zeros(2)).dtype == torch.float32
    assert likelihood.log_prob(y, torch.zeros(2)).isfinite().all()
    assert likelihood.expansion_point(torch.zeros(2)).isfinite().all()


def test_bad_targets_and_constraints_are_refused():
    with pytest.raises(ValueError, match=r"zero or positive; got -1 at index 1"):
        TweedieLikelihood().log_prob(torch.tensor([0.0, -1.0]), torch.zeros(2))
    with pytest.raises(ValueError, match="index"):
        TweedieLikelihood().log_prob(torch.tensor([0.0, math.nan]), torch.zeros(2))
    for constraint in (Interval(1.0, 1.9), GreaterThan(1.1)):
        with pytest.raises(ValueError, match=r"within \(1, 2\)"):
            TweedieLikelihood(power_constraint=constraint)


def test_batch_shapes_and_priors():
    likelihood = TweedieLikelihood(torch.Size([2])).double()
    assert likelihood.power.shape == likelihood.dispersion.shape == (2, 1)
    assert likelihood.log_prob(torch.ones(5, dtype=F64), torch.zeros(2, 5, dtype=F64)).shape == (2, 5)
