"""The substitute for the curvature of E[log softmax] against the properties that both must share."""

import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import MaternKernel

from gpext.inference import KL, Status
from gpext.inference.drivers import fixed_point
from gpext.inference.drivers.softmax_curvature import coupled_nearby, exact_curvature, matching_softmax
from gpext.inference.local_terms import bound_terms
from gpext.inference.problem import Problem
from gpext.likelihoods import MultinomialLogitLikelihood
from gpext.posteriors import CoupledPosterior, DensePosterior
from gpext.quadrature import expected_log_sum_exp
from gpext.sites import GaussianSites
from tests.members import F64


def curvature(mean, variance):
    """E[diag(pi) - pi pi'] (N, K, K), by differences of E[pi]."""
    step, num_classes = 1e-4, len(mean)

    def softmax(m):
        m = m.clone().requires_grad_()
        return torch.autograd.grad(expected_log_sum_exp(m, variance).sum(), m)[0]

    columns = []
    for k in range(num_classes):
        shift = torch.zeros_like(mean)
        shift[k] = step
        columns.append((softmax(mean + shift) - softmax(mean - shift)) / (2 * step))
    return torch.stack(columns, -1).transpose(0, 1)


def stand_in(diagonal):
    size, q = matching_softmax(diagonal)
    return torch.diag_embed((size * q).mT) - (size * q).mT.unsqueeze(-1) * q.mT.unsqueeze(-2)


@pytest.mark.parametrize("num_classes", [2, 3, 7])
def test_shares_diagonal_rows_and_sign_with_the_curvature(num_classes):
    generator = torch.Generator().manual_seed(num_classes)
    mean = 2 * torch.randn(num_classes, 50, generator=generator, dtype=F64)
    variance = 10 * torch.rand(num_classes, 50, generator=generator, dtype=F64)
    exact = curvature(mean, variance)
    found = stand_in(exact.diagonal(dim1=-2, dim2=-1).mT)
    torch.testing.assert_close(
        found.diagonal(dim1=-2, dim2=-1), exact.diagonal(dim1=-2, dim2=-1), rtol=1e-5, atol=1e-12
    )
    torch.testing.assert_close(found.sum(-1), torch.zeros_like(found.sum(-1)), rtol=0, atol=1e-9)
    assert bool((torch.linalg.eigvalsh(found) > -1e-9).all())
    if num_classes == 2:
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-7)
    averaged = torch.diag_embed(exact.diagonal(dim1=-2, dim2=-1))
    assert (found - exact).norm() < 0.2 * (averaged - exact).norm()


@pytest.mark.parametrize("num_classes", [2, 3, 11])
def test_the_coupling_of_the_degrees_is_the_curvature_to_a_factor_of_two(num_classes):
    generator = torch.Generator().manual_seed(num_classes)
    pi = (3 * torch.randn(200, num_classes, generator=generator, dtype=F64)).softmax(-1)
    tau = pi * (1 - pi)
    exact = torch.diag_embed(pi) - pi.unsqueeze(-1) * pi.unsqueeze(-2)
    ours = torch.diag_embed(tau) - tau.unsqueeze(-1) * tau.unsqueeze(-2) / tau.sum(-1)[:, None, None]
    contrasts = torch.linalg.qr(torch.ones(num_classes, 1, dtype=F64), mode="complete").Q[:, 1:]
    root = torch.linalg.cholesky(contrasts.mT @ ours @ contrasts)
    half = torch.linalg.solve_triangular(root, contrasts.mT @ exact @ contrasts, upper=False)
    values = torch.linalg.eigvalsh(torch.linalg.solve_triangular(root, half.mT, upper=False))
    assert float(values.min()) > 1 - 1e-6
    assert float(values.max()) < 2 + 1e-6


def large_functions(num_classes=4, num_data=60, scale=1e5):
    """Return a prior, a likelihood and random labels; Newton steps of each class by itself crawl."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(num_data, 2, dtype=F64, generator=generator)
    y = torch.randint(0, num_classes, (num_data,), generator=generator)
    with torch.no_grad():
        covariance = scale * MaternKernel(2.5).double()(x).to_dense()
    prior = MultivariateNormal(
        torch.zeros(num_classes, num_data, dtype=F64), covariance.expand(num_classes, num_data, num_data)
    )
    return prior, MultinomialLogitLikelihood(num_classes), y


def iterate_of(prior, likelihood, y, steps=8):
    problem = Problem.of(prior, likelihood, y, 0.0)
    sites = KL(max_steps=steps).infer(prior, likelihood, y).sites
    return problem, fixed_point.visit(problem, lambda m, v: bound_terms(KL().bound.bind(likelihood, y), m, v), sites)


def test_the_coupled_target_solves_for_the_means_of_all_latents_in_few_products(monkeypatch):
    problem, iterate = iterate_of(*large_functions())
    posterior = iterate.posterior
    assert isinstance(posterior, DensePosterior)
    real, products = CoupledPosterior.solve, []
    monkeypatch.setattr(CoupledPosterior, "solve", lambda self, r: products.append(r) or real(self, r))
    monkeypatch.setattr(fixed_point, "_FEW_PRODUCTS", 0)  # with the latents apart
    target = fixed_point.coupled_target(problem, iterate, exact_curvature)
    assert 0 < len(products) < 12  # some 50 with the latents apart
    H = exact_curvature(iterate.terms)
    blocks = torch.diag_embed(H.precision.mT)
    blocks += H.coupling[:, None, None] * H.direction.mT.unsqueeze(-1) * H.direction.mT.unsqueeze(-2)  # (N, D, D)
    inverse = torch.block_diag(*torch.linalg.inv(problem.prior.covariance.detach()))
    exact = inverse + torch.diag_embed(blocks.movedim(0, -1)).movedim(1, 2).reshape(240, 240)
    wanted = torch.linalg.solve(exact, (iterate.terms.mean_gradient - posterior.weights).flatten())
    pull = target.shift - target.precision * iterate.mean - posterior.weights  # (K^-1 + diag(tau*)) dm
    move = torch.linalg.solve(inverse + torch.diag(target.precision.flatten()), pull.flatten())
    error = move - wanted
    assert float(error @ exact @ error) < 0.1**2 * float(wanted @ exact @ wanted)


@pytest.mark.parametrize("steps", [1, 4, 8, 16])
def test_a_part_of_a_coupled_step_moves_the_means_as_far_and_raises_the_bound(steps):
    """However far precisions are from their best values; halved often enough, a step is not rejected."""
    prior, likelihood, y = large_functions()
    problem, iterate = iterate_of(prior, likelihood, y, steps)
    target = fixed_point.coupled_target(problem, iterate, exact_curvature)
    for rate in (1.0, 0.3, 1e-3):
        sites = fixed_point._between(problem, iterate.sites, target, torch.tensor(rate, dtype=F64))
        moved = problem.condition(sites).mean - iterate.mean
        scale = float(target.move.abs().max())
        torch.testing.assert_close(moved, rate * target.move, rtol=0, atol=1e-6 * rate * scale)
    bound = KL().bound.bind(likelihood, y)
    there = fixed_point.visit(problem, lambda m, v: bound_terms(bound, m, v), sites)
    assert float(there.value) > float(iterate.value)


def test_negative_precisions_are_not_coupled():
    problem, iterate = iterate_of(*large_functions(scale=1.0))
    sites = iterate.sites
    precision = sites.precision.clone()
    precision[0, 0] = -1e-3
    posterior = problem.condition(GaussianSites(sites.shift, precision))
    assert coupled_nearby(posterior) is posterior
    assert isinstance(coupled_nearby(iterate.posterior), CoupledPosterior)


def test_what_no_softmax_has_gives_something_finite():
    for diagonal in (
        [1.0, 0.1, 0.1],
        [1.0, 1e-300, 1e-300],
        [1e-300, 1e-300, 1e-300],
        [1e6, 1e6, 1e-9],
        [1.0, 1.0, 1.0],
    ):
        found = stand_in(torch.tensor(diagonal, dtype=F64).unsqueeze(-1))
        assert bool(found.isfinite().all())
        assert bool((torch.linalg.eigvalsh(found) > -1e-8 * max(diagonal)).all())


def test_a_rejected_step_takes_no_other_newton_step_for_the_means(monkeypatch):
    """Where labels are random and functions large, Anderson's mixing and full steps lead astray a few times."""
    real, seen = fixed_point.coupled_target, []

    def target(problem, iterate, curvature):
        seen.append(iterate)
        return real(problem, iterate, curvature)

    monkeypatch.setattr(fixed_point, "coupled_target", target)
    result = KL().infer(*large_functions())
    assert result.status is Status.CONVERGED
    assert len({id(iterate) for iterate in seen}) == len(seen)
    assert len(seen) < len(result.trace) - 2
