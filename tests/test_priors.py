"""Registered priors: which parameters they are on, their densities, and that every objective adds each of them once."""

import copy
import math
import pickle

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.kernels import MaternKernel, PeriodicKernel, RBFKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood, VariationalELBO
from gpytorch.priors import GammaPrior, LogNormalPrior

import gpext
from gpext.inference import KL, Laplace
from gpext.likelihoods import BernoulliLogitLikelihood, Matern32Likelihood, StudentTLikelihood
from gpext.mlls import AugmentedELBO, LatentMarginalLogLikelihood
from gpext.priors import lengthscale_prior, noise_prior, outputscale_prior, register_priors
from gpext.training.minibatch import SiteStepper
from gpext.training.registered_priors import add_log_prior
from tests.members import F64
from tests.sparse_models import SparseGP


def data(num_data=30, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_data, 3, generator=generator, dtype=F64)
    return x, torch.sin(2 * x[:, 0]) + 0.3 * torch.randn(num_data, generator=generator, dtype=F64)


class Exact(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = ScaleKernel(MaternKernel(ard_num_dims=3))
        self.to(x)

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Latent(gpext.models.LatentGP):
    def __init__(self, x, y, likelihood, rule):
        super().__init__(x, y, likelihood, rule)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = ScaleKernel(MaternKernel(ard_num_dims=3))
        self.to(x)

    forward = Exact.forward


def exact():
    x, y = data()
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    return ExactMarginalLogLikelihood(likelihood, Exact(x, y, likelihood)), x, y


def latent(likelihood=StudentTLikelihood, rule=None):
    x, y = data()
    model = Latent(x, y, likelihood().to(F64), rule or KL())
    return LatentMarginalLogLikelihood(model.likelihood, model), x, y


def sparse(objective=VariationalELBO, num_data=30):
    x, y = data(num_data)
    return objective(StudentTLikelihood().to(F64), SparseGP(x[:8].clone(), learn=False), num_data=num_data), x, y


OBJECTIVES = {"exact": exact, "latent": latent, "elbo": sparse, "augmented": lambda: sparse(AugmentedELBO)}


def log_prior(mll):
    """The log densities, written out from the parameters' values, each once."""
    kernel = mll.model.covar_module
    noise = mll.likelihood.noise
    d = kernel.base_kernel.lengthscale.size(-1)

    def log_normal(value, mu, s):
        return (-(((value.log() - mu) / s) ** 2) / 2 - value.log() - math.log(s * math.sqrt(2 * math.pi))).sum()

    default = noise_prior()
    total = log_normal(kernel.base_kernel.lengthscale, *_moments(lengthscale_prior(d)))
    return (
        total + log_normal(kernel.outputscale, *_moments(outputscale_prior())) + log_normal(noise, *_moments(default))
    )


def _moments(prior):
    return float(prior.base_dist.loc), float(prior.base_dist.scale)


@pytest.mark.parametrize("columns", [1, 4, 60])
def test_the_median_lengthscale_grows_with_the_square_root_of_the_dimension(columns):
    grown = lengthscale_prior(columns).base_dist.loc - lengthscale_prior(1).base_dist.loc
    torch.testing.assert_close(grown.exp().item(), math.sqrt(columns), rtol=1e-6, atol=0)


def test_the_noise_prior_moves_with_the_squared_scale_of_the_targets():
    moved = noise_prior(3.0).base_dist.loc - noise_prior().base_dist.loc
    torch.testing.assert_close(moved.exp().item(), 9.0, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_gains_the_log_densities_divided_by_the_number_of_data(name):
    mll, x, y = OBJECTIVES[name]()
    mll.model(x)  # the first call initialises q(u)
    without = mll(mll.model(x), y)
    found = register_priors(mll, noise=noise_prior)
    assert len(found) == 3
    expected = without + log_prior(mll) / len(y)
    torch.testing.assert_close(mll(mll.model(x), y), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("likelihood", [Matern32Likelihood, StudentTLikelihood])
def test_noise_of_robust_likelihoods_has_a_prior(likelihood):
    assert "likelihood.noise_prior" in register_priors(latent(likelihood)[0], noise=noise_prior)


def test_a_likelihood_without_noise_has_none():
    x, y = data()
    model = Latent(x, (y > 0).to(F64), BernoulliLogitLikelihood(), Laplace())
    found = set(register_priors(model, noise=noise_prior))
    assert found == {"covar_module.base_kernel.lengthscale_prior", "covar_module.outputscale_prior"}


def test_each_kernel_takes_the_number_of_its_own_columns():
    parts = ScaleKernel(RBFKernel(active_dims=[0])) + ScaleKernel(RBFKernel(ard_num_dims=2, active_dims=[1, 2]))
    kernel = parts * MaternKernel() + PeriodicKernel()
    found = register_priors(kernel, num_inputs=np.int64(3), outputscale=None)
    columns = {name: float(prior.base_dist.loc - lengthscale_prior(1).base_dist.loc) for name, prior in found.items()}
    number = {name: round(math.exp(2 * value)) for name, value in columns.items()}
    assert sorted(number.values()) == [1, 2, 3]
    assert not any(isinstance(kernel.get_submodule(n.rpartition(".")[0]), PeriodicKernel) for n in found)


def test_a_batch_of_kernels_has_a_density_for_each_member():
    kernel = ScaleKernel(RBFKernel(ard_num_dims=3, batch_shape=torch.Size([4])), batch_shape=torch.Size([4]))
    register_priors(kernel, num_inputs=3)
    shapes = {name: prior.log_prob(closure(m)).shape for name, m, prior, closure, _ in kernel.named_priors()}
    assert shapes == {"outputscale_prior": (4,), "base_kernel.lengthscale_prior": (4, 1, 3)}


def test_priors_that_are_there_and_parameters_that_are_not_trained_are_left_alone():
    mll, _, _ = exact()
    base = mll.model.covar_module.base_kernel
    given = GammaPrior(3.0, 6.0)
    base.register_prior("lengthscale_prior", given, lambda m: m.lengthscale)
    mll.likelihood.raw_noise.requires_grad_(False)
    assert sorted(register_priors(mll, noise=noise_prior)) == ["model.covar_module.outputscale_prior"]
    assert base.lengthscale_prior is given
    assert register_priors(mll, noise=noise_prior) == {}  # a second time


def test_initial_values_are_modes_where_parameters_have_their_defaults():
    mll, _, _ = exact()
    mll.model.covar_module.outputscale = 5.0
    found = register_priors(mll, initialise=True)
    mode = found["model.covar_module.base_kernel.lengthscale_prior"].mode
    torch.testing.assert_close(mll.model.covar_module.base_kernel.lengthscale, mode.expand(1, 3).to(F64))
    assert mll.model.covar_module.outputscale.item() == pytest.approx(5.0)


def test_other_priors_and_none():
    mll, _, _ = exact()
    found = register_priors(mll, lengthscale=lambda d: GammaPrior(3.0, 6.0), outputscale=None, noise=None)
    assert [type(prior) for prior in found.values()] == [GammaPrior]


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_have_priors_of_their_own_parameters(name, clone):
    mll, _, _ = OBJECTIVES[name]()
    register_priors(mll, noise=noise_prior)
    other = clone(mll)
    other.model.covar_module.outputscale = 7.0
    values = {n: closure(m) for n, m, _, closure, _ in other.named_priors()}
    assert values["model.covar_module.outputscale_prior"].item() == pytest.approx(7.0)
    assert mll.model.covar_module.outputscale.item() != pytest.approx(7.0)


def test_float32_models_have_priors_of_their_dtype():
    kernel = ScaleKernel(RBFKernel()).float()
    found = register_priors(kernel, num_inputs=1)
    assert {prior.log_prob(torch.ones(1)).dtype for prior in found.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((lambda: "kernel", {}), TypeError, "expected an objective"),
        ((RBFKernel, {}), ValueError, "give num_inputs"),
        ((RBFKernel, {"num_inputs": 0}), ValueError, "at least 1"),
        ((RBFKernel, {"num_inputs": 1.5}), TypeError, "whole number"),
    ],
)
def test_bad_arguments(arguments, error, message):
    make, options = arguments
    with pytest.raises(error, match=message):
        register_priors(make(), **options)


def test_by_default_noise_has_no_prior():
    assert sorted(register_priors(exact()[0])) == [
        "model.covar_module.base_kernel.lengthscale_prior",
        "model.covar_module.outputscale_prior",
    ]


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_bad_target_scale(scale):
    with pytest.raises(ValueError, match="target_scale must be positive"):
        noise_prior(scale)
    with pytest.raises(ValueError, match="scale must be positive"):
        lengthscale_prior(1, scale)


# ---- training in closed form ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", [VariationalELBO, AugmentedELBO])
def test_the_collapsed_full_batch_ends_where_the_penalised_bound_is_stationary(objective):
    """At the optimum of q(u), the envelope theorem makes the gradient of the ELBO with priors zero."""
    mll, x, y = sparse(objective)
    register_priors(mll, noise=noise_prior)
    bound = "augmented" if objective is AugmentedELBO else "exact"
    result = gpext.fit(mll, x, y, hyperparameters=bound, progress=False, tolerance=1e-9)
    assert result.status is not gpext.FitStatus.BREAKDOWN
    mll.train()
    loss = -mll(mll.model(x), y)
    assert result.objective == pytest.approx(-loss.item(), abs=1e-5)
    loss.backward()
    trained = [p for p in [*mll.model.hyperparameters(), *mll.likelihood.parameters()] if p.grad is not None]
    assert max(float(p.grad.abs().max()) for p in trained) < 1e-3


def test_minibatches_take_the_gradient_of_the_priors_divided_by_all_data():
    """The difference of the gradients with and without priors is that of -log p / N, for a batch of any size."""
    grads, values = [], []
    for with_priors in (False, True):
        mll, x, y = sparse()
        if with_priors:
            register_priors(mll, noise=noise_prior)
        stepper = SiteStepper(
            mll, mll.model.base, mll.likelihood, len(y), rate=0.5, learning_rate=0.1, bound="exact", gradient="exact"
        )
        value = stepper._update(x, y, torch.arange(10), 0.5)
        grads.append([p.grad.clone() for p in stepper._parameters])
        values.append(value)
    expected = torch.autograd.grad(-log_prior(mll) / len(y), stepper._parameters, allow_unused=True)
    for without, found, own in zip(*grads, expected, strict=True):
        torch.testing.assert_close(
            found - without, torch.zeros_like(found) if own is None else own, rtol=1e-6, atol=1e-7
        )
    assert values[1] - values[0] == pytest.approx(log_prior(mll).item() / len(y), rel=1e-5)


def test_a_likelihood_that_the_model_holds_as_well_counts_once():
    mll, _, _ = sparse()
    mll.model.likelihood = mll.likelihood
    register_priors(mll, noise=noise_prior)
    assert add_log_prior(mll, 0.5, gradient=False) == pytest.approx(0.5 * log_prior(mll).item(), rel=1e-6)


def test_a_strong_prior_holds_a_parameter_in_every_kind_of_training():
    for batch_size in (None, 10):
        mll, x, y = sparse()
        register_priors(mll, lengthscale=None, outputscale=lambda: LogNormalPrior(math.log(0.1), 1e-3))
        mll.model.covar_module.outputscale = 0.1
        gpext.fit(mll, x, y, batch_size=batch_size, progress=False, max_steps=60)
        assert mll.model.covar_module.outputscale.item() == pytest.approx(0.1, rel=0.05)
