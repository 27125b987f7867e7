"""gpext's strategies and likelihoods under Pyro's SVI; each likelihood's ELBO is tested in test_pyro_laws.py."""

from functools import partial

import gpytorch
import pyro
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import VariationalELBO
from gpytorch.models.pyro import PyroGP
from gpytorch.optim import NGD
from pyro import poutine
from pyro.infer import TraceMeanField_ELBO

from gpext.likelihoods import (
    BernoulliLogitLikelihood,
    MultinomialLogitLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)
from gpext.models import LatentGP
from gpext.variational import SiteVariationalStrategy
from tests.members import F64
from tests.sparse_models import SparseGP, inputs, randomise
from tests.statistics import misfit


class Counts(PyroGP):
    def __init__(self, x):
        strategy = SiteVariationalStrategy(self, x[::6], learn_inducing_locations=False)
        super().__init__(strategy, PoissonLikelihood(), num_data=len(x))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        self.double()

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def trained(x, y, make_loss, num_steps=250):
    """The ELBO per datum before and after training q(u) by natural gradients and the kernel by Adam."""
    model = Counts(x)
    elbo, loss = VariationalELBO(model.likelihood, model, len(y)), make_loss(model)
    start = elbo(model(x), y).item()
    optimizers = [
        NGD(model.variational_parameters(), num_data=len(y), lr=0.5),
        torch.optim.Adam(model.hyperparameters(), lr=0.2),
    ]
    schedules = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.01, num_steps) for o in optimizers]
    for _ in range(num_steps):
        model.zero_grad()
        loss().backward()
        for moving in (*optimizers, *schedules):
            moving.step()
    return start, elbo(model(x), y).item()


@pytest.mark.slow
def test_svi_reaches_the_elbo_of_gpytorchs_loop():
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(0, 4, 60, dtype=F64).unsqueeze(-1)
    y = torch.poisson((1 + (3 * x[:, 0]).sin()).exp(), generator=generator)
    pyro.set_rng_seed(0)
    estimate = TraceMeanField_ELBO(num_particles=32, vectorize_particles=True, max_plate_nesting=1)

    def in_gpytorch(model):
        elbo = VariationalELBO(model.likelihood, model, len(y))
        return lambda: -elbo(model(x), y)

    def in_pyro(model):
        return lambda: estimate.differentiable_loss(model.model, model.guide, x, y) / len(y)

    start, expected = trained(x, y, in_gpytorch)
    _, reached = trained(x, y, in_pyro)
    assert expected > start + 0.5
    assert abs(reached - expected) < 0.01 * (expected - start)  # noise leaves about a tenth of that


def elbo_in_pyro(model, likelihood, x, y, *, max_plate_nesting=1):
    """Estimates by ApproximateGP.pyro_model and pyro_guide with the likelihood's hooks, (40, 1)."""
    likelihood.num_data = 9

    def program(x, y):
        return likelihood.pyro_model(model.pyro_model(x), y)

    def guide(x, y):
        return likelihood.pyro_guide(model.pyro_guide(x), y)

    estimate = TraceMeanField_ELBO(num_particles=50, vectorize_particles=True, max_plate_nesting=max_plate_nesting)
    return torch.tensor([[-estimate.loss(program, guide, x, y)] for _ in range(40)], dtype=F64)


MODELS = {
    "one GP": (StudentTLikelihood, (), None),
    "a batch of GPs": (StudentTLikelihood, (2,), None),
    "tasks that share a likelihood": (StudentTLikelihood, (3,), 3),
    "tasks that are latents of one datum": (partial(MultinomialLogitLikelihood, 3), (3,), 3),
}


@pytest.mark.parametrize("name", MODELS)
def test_pyro_model_and_guide_of_an_approximate_gp(name):
    make, batch, tasks = MODELS[name]
    x, likelihood = inputs(9, 1), make().double()
    model = randomise(SparseGP(inputs(*batch, 4, 1, seed=1), num_tasks=tasks))
    shape = (9,) if tasks is None or likelihood.num_latents else (9, tasks)
    if batch and tasks is None:
        x, shape = x.expand(*batch, 9, 1), (*batch, 9)
    y = torch.randint(3, shape, generator=torch.Generator().manual_seed(2)).to(F64)
    pyro.set_rng_seed(0)
    estimates = elbo_in_pyro(model, likelihood, x, y, max_plate_nesting=len(shape))
    q = model(x)
    exact = likelihood.expected_log_prob(y, q).sum() - model.variational_strategy.kl_divergence().sum()
    assert misfit(estimates, exact.detach()) < 1


def test_in_eval_mode_q_is_that_of_the_present_parameters():
    x = inputs(9, 1)
    model = randomise(SparseGP(inputs(4, 1, seed=1))).eval()
    first = [model(x).mean, model.variational_strategy.kl_divergence()]
    assert model.variational_strategy.variational_distribution is model.variational_strategy.variational_distribution
    with torch.no_grad():
        model.natural[0].mul_(2)
        model.covar_module.base_kernel.raw_lengthscale.add_(0.5)
    second = [model(x).mean, model.variational_strategy.kl_divergence()]
    model.variational_strategy._clear_cache()
    fresh = [model(x).mean, model.variational_strategy.kl_divergence()]
    for old, new, expected in zip(first, second, fresh, strict=True):
        torch.testing.assert_close(new, expected)
        assert not torch.allclose(old, expected)


def test_in_training_a_guide_samples_from_the_present_q():
    model = randomise(SparseGP(inputs(4, 1, seed=1)))
    model(inputs(9, 1))
    with torch.no_grad():
        model.natural[0].mul_(2)
    guide = poutine.trace(model.pyro_guide).get_trace(inputs(9, 1))
    vec, mat = model.natural
    expected = torch.linalg.solve(-2 * mat, vec)
    torch.testing.assert_close(guide.nodes[".u"]["fn"].mean, expected)


class Latent(LatentGP):
    def forward(self, x):
        return MultivariateNormal(x[:, 0], torch.eye(len(x), dtype=x.dtype))


def test_a_latent_gp_names_what_serves_in_pyro():
    x = inputs(5, 1)
    model = Latent(x, torch.ones(5, dtype=F64), BernoulliLogitLikelihood())
    for hook in (model.pyro_model, model.pyro_guide):
        with pytest.raises(NotImplementedError, match=r"gpext\.ppl\.latent_gp"):
            hook(x)
