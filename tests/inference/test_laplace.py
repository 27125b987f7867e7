"""Laplace: Newton's method reaches the mode under noise much narrower than the prior, and also ends early."""

import pytest
import torch
from gpytorch.distributions import MultivariateNormal

from gpext.inference import KL, Laplace, Status
from gpext.inference.expansion import require_curvature
from gpext.inference.problem import Problem
from gpext.likelihoods import (
    MultinomialLogitLikelihood,
    NegativeBinomialLogLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)
from tests.latent_cases import CASES
from tests.members import F64


def narrow(noise):
    likelihood = StudentTLikelihood().double()
    with torch.no_grad():
        likelihood.noise = torch.tensor(noise, dtype=F64)
        likelihood.deg_free = torch.tensor(4.0, dtype=F64)
    return likelihood


def prior(n):
    x = torch.arange(n, dtype=F64)
    return MultivariateNormal(torch.zeros(n, dtype=F64), torch.exp(-0.5 * (x[:, None] - x).square()))


@pytest.mark.parametrize("noise", [1e-12, 1e-14, 1e-16])
@pytest.mark.parametrize("targets", [[0.7], [0.7, 0.7, 0.7], [0.0, 1.0, -1.0]])
def test_a_narrow_peak_is_found_by_steps_far_too_long(targets, noise):
    y = torch.tensor(targets, dtype=F64)
    result = Laplace().infer(prior(len(y)), narrow(noise), y)
    assert result.status is Status.CONVERGED
    torch.testing.assert_close(result.posterior.mean, y, rtol=0, atol=2 * noise**0.5)


@pytest.mark.parametrize("lengthscale", [0.3, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_mode_is_found_where_nearly_all_data_are_in_the_tails(seed, lengthscale):
    """Noise of 0.001 for residuals of 0.3: curvatures that are left out there make steps of thousands of deviations."""
    x = torch.linspace(0, 6, 60, dtype=F64)
    K = torch.exp(-0.5 * ((x[:, None] - x) / lengthscale).square()) + 1e-4 * torch.eye(60, dtype=F64)
    noise = torch.randn(60, dtype=F64, generator=torch.Generator().manual_seed(seed))
    p = MultivariateNormal(torch.zeros_like(x), K)
    result = Laplace(max_steps=60).infer(p, narrow(1e-6), torch.sin(2 * x) + 0.3 * noise)
    assert result.status is Status.CONVERGED, result.message


@pytest.mark.parametrize("correlation", [0.99, 0.9999])
@pytest.mark.parametrize("distance", [1e-2, 1e-6])
def test_a_saddle_is_left_in_a_step(distance, correlation):
    """Two targets that exclude each other: between them is a saddle, from which slopes are as small as the distance."""
    K = 4 * torch.tensor([[1.0, correlation], [correlation, 1.0]], dtype=F64)
    p = MultivariateNormal(torch.full((2,), distance, dtype=F64), K)
    result = Laplace().infer(p, narrow(0.01), torch.tensor([3.0, -3.0], dtype=F64))
    assert result.status is Status.CONVERGED
    assert result.num_steps <= 4
    assert result.posterior.mean.abs().min() > 2.8


def test_a_climb_cut_short_ends_where_it_stood(monkeypatch):
    monkeypatch.setattr("gpext.inference.laplace.refine_mode", lambda _p, _q, f, weights, _t: (f, weights, f.norm()))
    monkeypatch.setattr(Problem, "condition_roughly", Problem.condition)
    p, likelihood, y = prior(3), narrow(1e-6), torch.tensor([0.7, -1.0, 0.3], dtype=F64)

    def height(f):
        return float((likelihood.log_prob(y, f).sum() + p.log_prob(f)).detach())

    heights = []
    for steps in range(1, 10):  # it converges in ten
        result = Laplace(max_steps=steps).infer(p, likelihood, y)
        assert result.status is Status.MAX_STEPS
        heights.append(height(result.posterior.mean))
        again = Laplace(max_steps=1).infer(p, likelihood, y, start=result.sites)
        torch.testing.assert_close(again.posterior.mean, result.posterior.mean, rtol=1e-10, atol=1e-10)
    assert heights == sorted(heights)
    torch.testing.assert_close(Laplace(max_steps=1).infer(p, likelihood, y).posterior.mean, p.mean)


def test_near_the_mode_of_a_given_start_no_other_is_sought(monkeypatch):
    """Where psi has no digits to show a rise: as in training, whose objective must not jump to another mode."""
    p, likelihood, y = prior(3), narrow(1e-2), torch.tensor([0.7, -1.0, 0.3], dtype=F64)
    sites = Laplace(max_steps=8).infer(p, likelihood, y + 1e-4).sites
    climb, starts = Laplace._climb, []

    def counted(*args):
        starts.append(1)
        return climb(*args)

    monkeypatch.setattr(Laplace, "_climb", counted)
    monkeypatch.setattr("gpext.inference.laplace.rise", lambda *args: None)
    monkeypatch.setattr("gpext.inference.laplace.refine_mode", lambda _p, _q, f, weights, _t: (f, weights, None))
    exact = Laplace(tolerance=1e-300)
    result = exact.infer(p, likelihood, y, start=sites)
    assert (result.status, len(starts)) == (Status.STALLED, 1)
    assert exact.infer(p, likelihood, y).status is Status.STALLED
    assert len(starts) == 3


def test_with_several_latents_too():
    likelihood, p, y = CASES["multinomial"].problem(6)
    assert isinstance(likelihood, MultinomialLogitLikelihood)
    result = Laplace(max_steps=1).infer(p(), likelihood, y)
    torch.testing.assert_close(result.conditioned.mean, p().mean, rtol=0, atol=1e-12)
    assert Laplace().infer(p(), likelihood, y, start=result.sites).status is Status.CONVERGED


def enormous_counts(scale):
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(0, 1, 40, dtype=F64)
    K = 0.7 * torch.exp(-0.5 * ((x.unsqueeze(-1) - x) / 0.7) ** 2) + 1e-6 * torch.eye(40, dtype=F64)
    y = torch.poisson(scale * torch.exp(2 * torch.sin(6 * x)), generator=generator)
    return MultivariateNormal(0 * x, K), y


def over_dispersed(dispersion):
    likelihood = NegativeBinomialLogLikelihood().double()
    likelihood.dispersion = dispersion
    return likelihood


@pytest.mark.parametrize(("scale", "dispersion"), [(1e6, 0.0), (1e8, 0.0), (1e12, 0.0), (1e6, 1e-9), (1e8, 1e-13)])
def test_enormous_counts_converge_to_what_the_best_gaussian_is(scale, dispersion):
    """So many counts make the likelihood Gaussian, where both are exact up to 1 / y; psi sums terms of size 1e13."""
    prior, y = enormous_counts(scale)
    likelihood = over_dispersed(dispersion) if dispersion else PoissonLikelihood()
    laplace, kl = (rule.infer(prior, likelihood, y) for rule in (Laplace(), KL()))
    assert laplace.status is Status.CONVERGED, laplace.message
    assert laplace.num_steps <= 30
    torch.testing.assert_close(laplace.log_evidence, kl.log_evidence, rtol=1e-9, atol=1e-4)
    variance = 1 / scale + dispersion  # of log y
    atol = 5 * variance + 1e-4 * variance**0.5
    torch.testing.assert_close(laplace.posterior.mean, kl.posterior.mean, rtol=0, atol=atol)


def test_a_density_that_bends_about_the_logarithm_of_its_target_alone_is_not_taken_for_a_kink():
    _, y = enormous_counts(1e12)
    require_curvature(over_dispersed(1e-13), y, torch.zeros_like(y))
