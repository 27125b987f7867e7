"""Langevin draws given augmenting scales: gradients against differences, draws against quadrature, and predictions."""

import copy
import math
import pickle

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.priors import GammaPrior, LogNormalPrior

from gpext.inference import InferenceWarning
from gpext.likelihoods import BernoulliLogitLikelihood, LaplaceLikelihood, PoissonLikelihood, StudentTLikelihood
from gpext.models import LatentGP
from gpext.operators import UnbiasedSolver
from gpext.samplers import AugmentedSGLDSampler, SamplingStatus
from gpext.samplers.targets.site_posterior import SitePosterior, conditional_mode
from gpext.sites import GaussianSites
from tests.members import F64
from tests.statistics import misfit

NAMES = ["mean_module.constant", "covar_module.raw_outputscale", "covar_module.base_kernel.lengthscale"]
SOLVERS = pytest.mark.parametrize("solver", [None, UnbiasedSolver(num_probes=4)], ids=["exact", "unbiased"])


class Model(LatentGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        self.covar_module.register_prior("outputscale_prior", LogNormalPrior(0.0, 0.5), "outputscale")
        self.covar_module.base_kernel.register_prior("lengthscale_prior", GammaPrior(4.0, 4.0), "lengthscale")
        self.to(x)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def seed(number=0):
    return torch.Generator().manual_seed(number)


def problem(n=12, dtype=F64, likelihood=StudentTLikelihood):
    x = torch.linspace(0, 3, n, dtype=dtype)
    y = torch.sin(2 * x) + 0.2 * torch.randn(n, dtype=dtype, generator=seed())
    y = (y > 0).to(dtype) if likelihood in (BernoulliLogitLikelihood, PoissonLikelihood) else y
    likelihood = likelihood().to(dtype)
    if isinstance(likelihood, StudentTLikelihood):
        likelihood.register_prior("noise_prior", LogNormalPrior(-2.0, 0.7), "noise")
        likelihood.initialize(noise=0.1)
    return Model(x, y, likelihood)


def some_sites(model):
    n = len(model.train_targets)
    precision = 10 ** (3 * torch.rand(n, generator=seed(1), dtype=F64) - 1.5)
    return GaussianSites(precision * model.train_targets.double(), precision)


def run(sampler, *args, **options):
    return sampler.run(*args, **{"progress": False, "generator": seed(1), **options})


def dense_log_density(place, x, sites):
    """log p(theta | w, y) at (constant, log outputscale, log lengthscale), written without gpext."""
    constant, outputscale, lengthscale = place[0], *place[1:].exp()
    K = outputscale * torch.exp(-0.5 * ((x.unsqueeze(-1) - x) / lengthscale).square()) + torch.diag(1 / sites.precision)
    data = torch.distributions.MultivariateNormal(constant.expand(len(x)), K).log_prob(sites.shift / sites.precision)
    prior = -outputscale.log() - 0.5 * (outputscale.log() / 0.5).square() + 3 * lengthscale.log() - 4 * lengthscale
    return data + prior + place[1:].sum()


PLACE = torch.tensor([0.3, 0.4, -0.6], dtype=F64)


def differences(model, sites):
    x, step = model.train_inputs[0].squeeze(-1).double(), 1e-5
    steps = step * torch.eye(3, dtype=F64)
    ahead, behind = ([dense_log_density(PLACE + s * e, x, sites) for e in steps] for s in (1, -1))
    return (torch.stack(ahead) - torch.stack(behind)) / (2 * step)


@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-6), (torch.float32, 2e-3)])
def test_given_w_the_gradient_is_that_of_the_dense_log_marginal(dtype, tolerance):
    model = problem(dtype=dtype)
    posterior, sites = SitePosterior(model, NAMES, None, 0.0), some_sites(model)
    posterior.condition_on(sites)
    expected = differences(model, sites)
    torch.testing.assert_close(posterior.gradient(PLACE), expected, rtol=tolerance, atol=tolerance)


def test_its_value_is_that_density_up_to_a_constant():
    model = problem()
    posterior, sites = SitePosterior(model, NAMES, None, 0.0), some_sites(model)
    posterior.condition_on(sites)
    x = model.train_inputs[0].squeeze(-1)
    gaps = [posterior.value(each) - float(dense_log_density(each, x, sites)) for each in (PLACE, PLACE + 1, PLACE - 1)]
    assert gaps == pytest.approx([gaps[0]] * 3, abs=1e-7)


def test_estimates_of_the_gradient_are_right_on_average():
    model, sites = problem(), some_sites(problem())
    solver = UnbiasedSolver(num_probes=2, rank=0)  # with twelve data a preconditioner would leave nothing to estimate
    exact, estimated = (SitePosterior(model, NAMES, each, 0.0) for each in (None, solver))
    for posterior in (exact, estimated):
        posterior.condition_on(sites)
    generator = seed(2)
    estimates = torch.stack([estimated.gradient(PLACE, generator=generator) for _ in range(200)])
    assert (estimates.std(0) > 0.001).all()
    assert misfit(estimates, exact.gradient(PLACE)) < 1


def test_the_scale_shrinks_with_data():
    model = problem()
    mode, M = conditional_mode(model, NAMES, 0.0, seed())
    assert mode.shape == (3,)
    assert (torch.linalg.eigvalsh(M) > 0).all()
    twice = Model(*(torch.cat([v, v]) for v in (model.train_inputs[0], model.train_targets)), model.likelihood)
    assert torch.linalg.det(conditional_mode(twice, NAMES, 0.0, seed())[1]) < torch.linalg.det(M)


class Quick:
    """The gradient for two data at one place in closed form: some fifty times as fast as through gpytorch."""

    def __init__(self, sampler):
        self.slow = sampler._posterior

    def condition_on(self, sites):
        self.sites = sites

    is_estimated = False

    def gradient(self, place, *, generator):
        nu, tau = self.sites.shift, self.sites.precision
        outputscale = place.exp().squeeze()
        # K = s 1 1': A(nu, tau) = s (sum nu)^2 / (1 + s sum tau) / 2 - log(1 + s sum tau) / 2
        total, precision = nu.sum(), tau.sum()
        inflation = 1 + outputscale * precision
        slope = 0.5 * (total / inflation) ** 2 - 0.5 * precision / inflation
        return (slope * outputscale - place.squeeze()).view(1)  # the prior is a LogNormal(0, 1)


def two_data():
    """Two data at one place, one of them far out, one scale of the prior and one of the noise."""
    model = problem(2)
    model.set_train_data(torch.zeros(2, 1, dtype=F64), torch.tensor([0.5, 4.0], dtype=F64))
    model.mean_module.requires_grad_(False)
    model.covar_module.base_kernel.requires_grad_(False)
    model.covar_module.register_prior("outputscale_prior", LogNormalPrior(0.0, 1.0), "outputscale")
    model.likelihood.register_prior("noise_prior", LogNormalPrior(-1.0, 1.0), "noise")
    return model


def test_the_quick_gradient_is_the_one_of_the_sampler():
    sampler = AugmentedSGLDSampler(two_data())
    quick, sites = Quick(sampler), GaussianSites(*torch.tensor([[1.0, 3.0], [2.0, 0.7]], dtype=F64))
    for posterior in (quick, quick.slow):
        posterior.condition_on(sites)
    for value in (-1.0, 0.5, 3.0):
        place = torch.tensor([value], dtype=F64)
        torch.testing.assert_close(
            quick.gradient(place, generator=None), quick.slow.gradient(place), rtol=1e-5, atol=1e-7
        )


def joint_statistics(log_s, log_noise, f):
    return [log_s, log_noise, f, f**2, f * log_s, f * log_noise, log_s * log_noise, log_s**2, log_noise**2]


@pytest.mark.slow
def test_draws_agree_with_quadrature():
    """Against a grid of the prior's scale, the noise and f; the bias of Langevin steps is below the errors."""
    model = two_data()
    sampler = AugmentedSGLDSampler(model)
    sampler._posterior = Quick(sampler)
    draws = run(sampler, 30, num_chains=20, warmup=10)

    log_s, log_noise = torch.linspace(-5, 6, 111, dtype=F64), torch.linspace(-7, 6, 131, dtype=F64)
    f = torch.linspace(-12, 16, 561, dtype=F64)
    nu = model.likelihood.deg_free.detach()
    student = torch.distributions.StudentT(nu, f, (0.5 * log_noise).exp().unsqueeze(-1))  # (noise, f)
    log_f = torch.distributions.Normal(0, (0.5 * log_s).exp().view(-1, 1, 1)).log_prob(f)
    log_likelihood = sum(student.log_prob(y) for y in model.train_targets)
    log_joint = log_f + log_likelihood - 0.5 * log_s.view(-1, 1, 1) ** 2 - 0.5 * (log_noise.view(-1, 1) + 1) ** 2
    weight = torch.softmax(log_joint.flatten(), 0).view_as(log_joint)
    grid = torch.meshgrid(log_s, log_noise, f, indexing="ij")
    expected = torch.stack([(weight * value).sum() for value in joint_statistics(*grid)])

    scale, noise = (draws.hyperparameters[name] for name in ("covar_module.outputscale", "likelihood.noise"))
    found = torch.stack(joint_statistics(scale.log(), noise.log().squeeze(-1), draws.latent[..., 0]))
    assert misfit(found.mean(-1).mT, expected) < 1  # of chains


@pytest.mark.slow
@SOLVERS
@pytest.mark.parametrize("likelihood", [StudentTLikelihood, LaplaceLikelihood, BernoulliLogitLikelihood])
def test_runs_for_other_likelihoods(likelihood, solver):
    draws = run(AugmentedSGLDSampler(problem(8, likelihood=likelihood), solver=solver, step_size=0.3), 3, 2, 1)
    assert draws.latent.shape == (2, 3, 8)
    assert bool(draws.latent.isfinite().all())
    assert draws.hyperparameters["covar_module.outputscale"].shape == (2, 3)
    assert ("likelihood.noise" in draws.hyperparameters) is (likelihood is StudentTLikelihood)
    assert "SGLD within Gibbs, 2 chains of 3 draws" in draws.message


def test_by_products_it_predicts_what_the_dense_posterior_given_w_does():
    """The average over draws of (w, theta), against dense conditioning with the same w."""
    sampler = AugmentedSGLDSampler(problem(10), solver=UnbiasedSolver(), step_size=0.3)
    draws = run(sampler, 2, 3, 1)
    x, target = torch.tensor([[0.4], [2.9], [50.0]], dtype=F64), sampler.target
    means, variances = [], []
    for f, raw in zip(draws.latent.flatten(0, 1), draws.raw.flatten(0, 1), strict=True):
        sites = target.sites(f.unsqueeze(0), raw.unsqueeze(0), seed())
        prior, (test_mean, cross, test_variance) = target.prior_at(raw), target._beside(x)
        posterior = prior.condition(GaussianSites(sites.shift[0].detach(), sites.precision[0].detach()))
        predicted = posterior.predict(test_mean, cross, torch.diag(test_variance))
        means.append(predicted.mean)
        variances.append(predicted.variance)
    found = draws.predict(x)
    torch.testing.assert_close(found.components.mean, torch.stack(means), rtol=0, atol=1e-6)
    torch.testing.assert_close(found.components.variance, torch.stack(variances), rtol=0, atol=1e-6)
    assert draws.predict_targets(x, num_draws=4).batch_shape == (3,)


@pytest.mark.slow
@SOLVERS
def test_in_parts_and_from_disk_it_draws_what_it_draws_at_once(solver, tmp_path):
    model = problem(8)

    def sampler():
        return AugmentedSGLDSampler(model, solver=solver, steps=2)

    whole = run(sampler(), 4, 1, 21, thinning=2)
    first = run(sampler(), 1, 1, 21, thinning=2, checkpoint=tmp_path)
    again = run(sampler(), 3, thinning=2, resume=first)
    loaded = run(sampler(), 3, thinning=2, resume=sampler().load(tmp_path), checkpoint=tmp_path)
    for other in (again, loaded):
        assert torch.equal(other.latent, whole.latent)
        for name, value in whole.hyperparameters.items():
            assert torch.equal(other.hyperparameters[name], value)


def test_the_model_stays_as_it_is_and_only_named_parameters_move():
    model = problem(8)
    before = copy.deepcopy(model.state_dict())
    draws = run(AugmentedSGLDSampler(model, hyperparameters=["covar_module.outputscale"]), 3, 2, 0)
    assert set(draws.hyperparameters) == {"covar_module.outputscale"}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert float(draws.hyperparameters["covar_module.outputscale"].std()) > 0


def test_goes_to_arviz_and_copies():
    draws = run(AugmentedSGLDSampler(problem(8)), 4, 2, 0)
    exported = draws.to_arviz(log_likelihood=True)
    assert exported.posterior["likelihood.noise"].shape == (2, 4, 1)
    assert exported.log_likelihood["targets"].shape == (2, 4, 8)
    assert torch.equal(copy.deepcopy(draws).latent, draws.latent)
    model = problem(8)  # a prior that gpytorch registers by name makes a module that cannot be pickled
    names = ["covar_module.outputscale"]
    for module in model.modules():
        if isinstance(module, gpytorch.Module):
            module._priors.clear()
    plain = run(AugmentedSGLDSampler(model, hyperparameters=names), 2, 2, 0)
    assert torch.equal(pickle.loads(pickle.dumps(plain)).latent, plain.latent)


@pytest.mark.slow
@SOLVERS
def test_single_precision(solver):
    draws = run(AugmentedSGLDSampler(problem(8, torch.float32), solver=solver, step_size=0.3), 3, 2, 0)
    assert draws.latent.dtype == torch.float32
    assert draws.predict(torch.zeros(1, 1)).mean.dtype == torch.float32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@SOLVERS
def test_on_a_gpu(solver):
    model = problem(8).cuda()
    draws = AugmentedSGLDSampler(model, solver=solver, step_size=0.3).run(
        3, 2, 1, generator=torch.Generator("cuda").manual_seed(0), progress=False
    )
    assert draws.latent.device.type == "cuda"
    assert bool(draws.predict(torch.zeros(1, 1, dtype=F64).cuda()).mean.isfinite().all())


def test_a_chain_that_diverges_says_so_and_its_draws_survive():
    sampler = AugmentedSGLDSampler(problem(8), step_size=1e4)
    with pytest.warns(InferenceWarning, match="smaller step"):
        draws = run(sampler, 300, 2, 0)
    assert draws.status is SamplingStatus.DIVERGED
    assert bool(draws.latent.isfinite().all())


def test_where_a_site_is_not_usable_it_says_which():
    model = problem(4)
    posterior = SitePosterior(model, NAMES, None, 0.0)
    precision = torch.tensor([1.0, 0.0, 1.0, math.inf], dtype=F64)
    with pytest.raises(FloatingPointError, match="site 1 has shift 0 and precision 0"):
        posterior.condition_on(GaussianSites(torch.zeros(4, dtype=F64), precision))


def test_bad_input():
    with pytest.raises(TypeError, match="augmentation"):
        AugmentedSGLDSampler(problem(likelihood=PoissonLikelihood))
    for options in ({"steps": 0}, {"step_size": 0.0}, {"step_size": math.nan}):
        with pytest.raises(ValueError, match="expected steps >= 1 and step_size > 0"):
            AugmentedSGLDSampler(problem(), **options)
    with pytest.raises(ValueError, match="GibbsSampler"):
        AugmentedSGLDSampler(problem(), hyperparameters=["likelihood.noise"])
    with pytest.raises(ValueError, match="names of parameters"):
        AugmentedSGLDSampler(problem(), hyperparameters=["lengthscale"])
    with pytest.raises(ValueError, match=r"a preconditioner \(2, 2\); got \(3,\)"):
        AugmentedSGLDSampler(problem(), preconditioner=torch.ones(3))
    with pytest.raises(ValueError, match="a warm-up of more than 40 steps to find a step size in; got 25"):
        run(AugmentedSGLDSampler(problem(), solver=UnbiasedSolver()), 2, 2, 5)
    x = torch.linspace(0, 1, 4, dtype=F64)
    with pytest.raises(ValueError, match=r"expected targets \(N,\); got \(2, 4\)"):
        AugmentedSGLDSampler(Model(x, torch.zeros(2, 4, dtype=F64), StudentTLikelihood().double()))
