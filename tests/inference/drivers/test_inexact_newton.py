"""Steps by conjugate gradients end where Newton's method does, and a training step factorises as often as stated."""

from collections import Counter

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal

from gpext.bounds.contracts import HasCurvature
from gpext.inference import EP, KL, Laplace
from gpext.inference.drivers.inexact_newton import refine_mode
from gpext.inference.expansion import expand
from gpext.inference.problem import Problem
from gpext.likelihoods import BernoulliLogitLikelihood, MultinomialLogitLikelihood
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.models import LatentGP
from gpext.operators.clique_covariance import CliqueRegressions
from gpext.operators.neighbour_covariance import LocalRegressions
from gpext.posteriors import RoughPosterior
from tests.latent_cases import CASES

F64 = torch.float64
COUPLED = [name for name, case in CASES.items() if isinstance(case.problem(3)[0], HasCurvature)]


def classes(latents, size, *batch, scale=4.0):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, 2, dtype=F64, generator=generator)
    y = torch.randint(0, latents, (*batch, size), generator=generator)
    squares = torch.cdist(x, x).square()
    lengthscales = torch.linspace(0.5, 1.5, latents, dtype=F64).view(-1, 1, 1)
    return x, y, scale * torch.exp(-0.5 * squares / lengthscales.square())


@pytest.mark.parametrize("scale", [0.1, 4.0, 1e3])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("condition", ["condition", "condition_roughly"])
def test_it_ends_at_the_mode(scale, batch, condition):
    """From the sites of a prior with four fifths of the variance."""
    _, y, K = classes(3, 25, *batch, scale=scale)
    mean = torch.zeros(*batch, 3, 25, dtype=F64)
    K, likelihood = K.expand(*batch, 3, 25, 25), MultinomialLogitLikelihood(3)
    problem = Problem.of(MultivariateNormal(mean, K), likelihood, y, 0.0)
    sites = Laplace().infer(MultivariateNormal(mean, 0.8 * K), likelihood, y).sites
    start = getattr(problem, condition)(sites)
    assert isinstance(start, RoughPosterior) == (condition == "condition_roughly" and scale < 1e3)
    f, weights, length = refine_mode(problem, start, start.mean, start.weights, 1e-8)
    assert bool((length < 1e-8).all())
    torch.testing.assert_close((K @ weights.unsqueeze(-1)).squeeze(-1), f, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(expand(problem.likelihood, y, f).gradient, weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", COUPLED)
def test_it_never_lowers_the_log_density(name):
    """From sites far from the mode, of log densities that are not concave as well."""
    likelihood, prior, y = CASES[name].problem(15, outputscale=9.0)
    problem = Problem.of(prior(), likelihood.requires_grad_(False), y, 0.0)
    with torch.no_grad():
        start = problem.condition(expand(likelihood, y, problem.mean.detach()).cautious)

        def log_density(f, weights):
            return expand(likelihood, y, f).log_prob.sum(-1) - 0.5 * problem.inner(f - problem.mean, weights)

        f, weights, _ = refine_mode(problem, start, start.mean, start.weights, 1e-9)
        before, after = log_density(start.mean, start.weights), log_density(f, weights)
    assert bool((after >= before - 1e-10 * (1 + before.abs())).all())


def test_sites_too_sharp_for_it_stay_as_they_are():
    _, y, K = classes(3, 10, scale=1e10)
    problem = Problem.of(MultivariateNormal(torch.zeros(3, 10, dtype=F64), K), MultinomialLogitLikelihood(3), y, 0.0)
    start = problem.condition(expand(problem.likelihood, y, problem.mean).sites)
    f, weights, length = refine_mode(problem, start, start.mean, start.weights, 1e-8)
    assert f is start.mean
    assert weights is start.weights
    assert bool(length.isinf().all())


class Model(LatentGP):
    """Softmax classes, a kernel for each or one for all; two classes and one latent for None."""

    def __init__(self, x, y, latents, shape, **options):
        likelihood = BernoulliLogitLikelihood() if latents is None else MultinomialLogitLikelihood(latents)
        super().__init__(x, y, likelihood, Laplace(), **options)
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=torch.Size([latents] if latents else []))
        base = gpytorch.kernels.RBFKernel(ard_num_dims=2, batch_shape=shape)
        self.covar_module = gpytorch.kernels.ScaleKernel(base, batch_shape=shape)
        self.double()

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def evaluate(model, x, y):
    """The objective and the derivatives in all parameters, by name."""
    model.zero_grad()
    loss = LatentMarginalLogLikelihood(model.likelihood, model)(model(x), y)
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("latents", [2, 3, 5])
def test_a_training_step_factorises_twice_for_each_latent(latents, monkeypatch):
    """At the sites of the last step, roughly, and at the mode: D factors of the latents and one of their coupling."""
    x, y, _ = classes(latents, 40)
    model = Model(x, y, latents, torch.Size([latents])).train()
    evaluate(model, x, y)
    factorise, counts = torch.linalg.cholesky_ex, Counter()

    def counted(matrix, **options):
        counts[matrix.dtype] += matrix.shape[:-2].numel()
        return factorise(matrix, **options)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", counted)
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.02
        counts.clear()
        evaluate(model, x, y)
        assert counts == {torch.float32: latents + 1, F64: latents + 1}


@pytest.mark.parametrize(("fill_in", "kind"), [(False, LocalRegressions), (True, CliqueRegressions)])
def test_so_does_one_with_neighbours(monkeypatch, fill_in, kind):
    x, y, _ = classes(2, 200)
    model = Model(x, y.to(F64), None, torch.Size(), neighbours=10, fill_in=fill_in).train()
    model.covar_module.base_kernel.lengthscale = 0.2  # a covariance with all its digits
    evaluate(model, x, y)
    factorise, sizes = kind.factorise, []

    def counted(regressions, diagonal):
        sizes.append(diagonal.size(-1))
        return factorise(regressions, diagonal)

    monkeypatch.setattr(kind, "factorise", counted)
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.02
        sizes.clear()
        evaluate(model, x, y)
        assert sizes == [200, 200]


@pytest.mark.parametrize("rule", [Laplace(), KL(tolerance=1e-12), EP(tolerance=1e-12)], ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.filterwarnings("ignore::gpext.inference.expansion.DenseBlocksWarning")
def test_one_kernel_of_all_classes_is_that_of_each(shape, sparse, rule):
    """The evidence and predictions agree, and its gradient is the sum of theirs."""
    x, y, _ = classes(3, 30)
    options = {"inducing_inputs": x[:8]} if sparse else {}
    one, each = (Model(x, y, 3, torch.Size(s), **options).train() for s in (shape, (3,)))
    one.inference = each.inference = rule
    value, derivatives = evaluate(one, x, y)
    apart, by_class = evaluate(each, x, y)
    torch.testing.assert_close(value, apart, rtol=1e-10, atol=1e-10)
    for name, derivative in derivatives.items():
        expected = by_class[name]
        if name.startswith("covar_module"):
            expected = expected.sum(0).view_as(derivative)
        torch.testing.assert_close(derivative, expected, rtol=1e-9, atol=1e-10)
    new = torch.randn(4, 2, dtype=F64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        one.eval(), each.eval()
        torch.testing.assert_close(one.likelihood(one(new)).probs, each.likelihood(each(new)).probs)
        torch.testing.assert_close(one(new).covariance_matrix, each(new).covariance_matrix, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("scales", [[1e-27, 1.0, 1.0], [1e-300, 1e4, 1.0], [1e-27, 1e-27, 1e-27]])
def test_a_class_whose_kernel_vanishes_is_served(scales, sparse):
    """Training may find that a class needs no function of its own: derivatives and variances keep their digits."""
    x, y, _ = classes(3, 30)
    model = Model(x, y, 3, torch.Size([3]), **({"inducing_inputs": x[:8]} if sparse else {})).train()
    model.covar_module.outputscale = torch.tensor(scales, dtype=F64)
    scales = model.covar_module.outputscale.detach()
    value, derivatives = evaluate(model, x, y)
    assert bool(value.isfinite())
    assert all(bool(derivative.isfinite().all()) for derivative in derivatives.values())
    with torch.no_grad():
        variance = model.eval()(torch.cat([x, x + 0.1])).variance
        assert bool((variance > 0).all())
        if not sparse:
            torch.testing.assert_close(variance[:, scales < 1e-20], scales[scales < 1e-20].expand(60, -1))
