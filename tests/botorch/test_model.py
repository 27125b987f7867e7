"""BoTorch's acquisition functions accept a BotorchGP; unsupported uses raise errors with advice."""

import math

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal

pytest.importorskip("botorch")

from botorch.acquisition.knowledge_gradient import qKnowledgeGradient
from botorch.acquisition.logei import qLogExpectedImprovement, qLogNoisyExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.sampling import SobolQMCNormalSampler
from botorch.sampling.get_sampler import get_sampler

import gpext
from gpext.botorch import BotorchGP, ObservationPosterior
from gpext.likelihoods import (
    BernoulliLogitLikelihood,
    LaplaceLikelihood,
    MultinomialLogitLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)
from gpext.mlls import LatentMarginalLogLikelihood
from tests.members import F64, tensor
from tests.neutral_settings import kept_settings
from tests.seeds import as_written


class Model(BotorchGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(ard_num_dims=x.size(-1)))
        self.to(x)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def uniform(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def made(likelihood=None, n=10):
    x = uniform(n, 2)
    y = torch.sin(5 * x[:, 0]) + x[:, 1]
    likelihood = StudentTLikelihood() if likelihood is None else likelihood
    if isinstance(likelihood, BernoulliLogitLikelihood | PoissonLikelihood):
        y = (y > 0).to(F64)
    elif isinstance(likelihood, MultinomialLogitLikelihood):
        y = (y > 0).long()
    return Model(x, y.unsqueeze(-1) if y.is_floating_point() else y, likelihood).eval()


@as_written()  # at other points there may be noise
@pytest.mark.filterwarnings("ignore")  # of BoTorch's optimisers
def test_noiseless_points_of_a_smooth_function_are_fitted():
    """Branin at 15 points: the noise fell to 5e-24, and the inference lost its digits."""
    x = torch.quasirandom.SobolEngine(2, scramble=True, seed=3).draw(15).to(F64)
    u, v = 15 * x[:, 0] - 5, 15 * x[:, 1]
    bowl = (v - 5.1 / (4 * math.pi**2) * u.square() + 5 / math.pi * u - 6).square()
    y = bowl + 10 * (1 - 1 / (8 * math.pi)) * u.cos() + 10
    model = Model(x, (y - y.mean()) / y.std(), StudentTLikelihood())
    mll = LatentMarginalLogLikelihood(model.likelihood, model)
    with kept_settings():
        fit_gpytorch_mll(mll)
    assert model.result.status is gpext.inference.Status.CONVERGED
    assert model.likelihood.raw_noise_constraint.lower_bound <= model.likelihood.noise < 1e-6


@pytest.mark.parametrize("kind", [StudentTLikelihood, LaplaceLikelihood, BernoulliLogitLikelihood])
def test_draws_of_observations_have_the_predictive_distribution(kind):
    """P(Y <= median of 20000 draws), by the predictive distribution, is a half within 4.5 binomial deviations."""
    model, size = made(kind()), 20_000
    posterior = model.posterior(uniform(3, 2, seed=1), observation_noise=True)
    assert isinstance(posterior, ObservationPosterior)
    base = torch.randn(size, 3, 2, generator=torch.Generator().manual_seed(2), dtype=F64)
    with torch.no_grad():
        draws = posterior.rsample_from_base_samples(torch.Size([size]), base)
        assert draws.shape == posterior._extended_shape(torch.Size([size])) == (size, 3, 1)
        predictive = model.likelihood(model(uniform(3, 2, seed=1)))
        level = predictive.mean if kind is not BernoulliLogitLikelihood else tensor(0.5)
        below = (draws.squeeze(-1) <= level).to(F64).mean(0)
        expected = predictive.cdf(level.expand(3))
    z = (below - expected) / (expected * (1 - expected) / size).sqrt()
    assert float(z.abs().max()) < 4.5
    torch.testing.assert_close(posterior.mean.squeeze(-1), predictive.mean)
    torch.testing.assert_close(posterior.variance.squeeze(-1), predictive.variance)


def test_draws_follow_their_base_samples_and_have_the_gradient_of_f():
    model = made()
    x = uniform(4, 3, 2, seed=1).requires_grad_()
    posterior = model.posterior(x, observation_noise=True)
    sampler = get_sampler(posterior, torch.Size([8]), seed=0)
    assert isinstance(sampler, SobolQMCNormalSampler)
    first = sampler(posterior)
    assert first.shape == (8, 4, 3, 1)
    assert torch.equal(first, sampler(posterior))
    assert posterior.base_sample_shape == (4, 3, 2)
    assert sampler.base_samples.shape == (8, 1, 3, 2)  # the same for all batches
    (gradient,) = torch.autograd.grad(first.sum(), x)
    assert bool((gradient != 0).any(-1).all())
    assert posterior.rsample().shape == (1, 4, 3, 1)


def test_improvement_functions_have_a_gradient():
    model = made()
    x = uniform(1, 2, 2, seed=1).requires_grad_()
    for function in (
        qLogExpectedImprovement(model, best_f=0.0),
        qLogNoisyExpectedImprovement(model, model.train_inputs[0]),
    ):
        (gradient,) = torch.autograd.grad(function(x).sum(), x)
        assert bool(gradient.isfinite().all() & (gradient != 0).any())


def test_fantasies_are_models_with_the_drawn_data():
    model = made()
    x, new = uniform(2, 2, seed=1), uniform(3, 2, seed=2)
    sampler = SobolQMCNormalSampler(torch.Size([4]), seed=0)
    with torch.no_grad():
        fantasies = model.fantasize(x, sampler)
        drawn = sampler(model.posterior(x, observation_noise=True)).squeeze(-1)
        assert fantasies.posterior(new).mean.shape == (4, 3, 1)
        for i in range(4):
            alone = model.get_fantasy_model(x, drawn[i])
            torch.testing.assert_close(
                fantasies.posterior(new).mean[i], alone.posterior(new).mean, atol=1e-5, rtol=1e-5
            )


def test_the_knowledge_gradient_has_a_value_and_refuses_a_derivative_that_it_has_not():
    function = qKnowledgeGradient(made(), num_fantasies=2)
    candidates = uniform(1, 3, 2, seed=1)
    with torch.no_grad():
        assert bool(function(candidates).isfinite().all())
    with pytest.raises(NotImplementedError, match=r'options=\{"with_grad": False\}'):
        function(candidates.requires_grad_())


def test_what_cannot_be_done_is_said():
    model, x = made(), uniform(2, 2)
    with pytest.raises(TypeError, match="observation_noise must be True or False"):
        model.posterior(x, observation_noise=torch.ones(2, 1, dtype=F64))
    with pytest.raises(ValueError, match=r"output_indices=\[1\]"):
        model.posterior(x, output_indices=[1])
    with pytest.raises(NotImplementedError, match=r"p\(y \| f\) of PoissonLikelihood \(Poisson\) has no icdf"):
        made(PoissonLikelihood()).posterior(x, observation_noise=True).rsample()
    with pytest.raises(ValueError, match=r"num_latents = 2; .*ModelListGP"):
        made(MultinomialLogitLikelihood(2))


def test_fit_trains_a_model_of_botorch_whose_constraints_no_transform_enforces():
    x = torch.rand(20, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    y = (6 * x.sum(-1, keepdim=True)).sin()
    values = {}
    for name in ("gpext", "botorch"):
        model = SingleTaskGP(x, y)
        mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
        (inputs,), targets = model.train_inputs, model.train_targets
        _ = (
            fit_gpytorch_mll(mll)
            if name == "botorch"
            else gpext.fit(mll, inputs, targets, progress=False, tolerance=1e-7)
        )
        model.train()
        values[name] = mll(model(inputs), targets).item()
    assert values["gpext"] == pytest.approx(values["botorch"], abs=1e-6)
