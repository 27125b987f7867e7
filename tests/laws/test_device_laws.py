"""On another device all results are there and equal those of the CPU: on a GPU, or without one a simulated device."""

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.priors import LogNormalPrior

import gpext
from gpext import distributions, likelihoods
from gpext.kernels import keops
from gpext.operators import UnbiasedSolver
from gpext.samplers import AugmentedSGLDSampler, GibbsSampler, MetropolisHastings, SGLDSampler
from gpext.solvers import (
    LowRankPreconditioner,
    conjugate_gradients,
    estimator_diagnostics,
    lanczos_log_det,
    nystrom,
    partial_cholesky,
    unbiased_cg,
)
from gpext.solvers.choose_preconditioner import share_of_steps, with_neighbours
from gpext.training import subsets
from tests import accelerator
from tests.accelerator import accelerated, sent
from tests.latent_cases import CASES, NO_DISTRIBUTION, PAIRS, RULES
from tests.members import F64, MEMBERS

pytestmark = pytest.mark.filterwarnings(
    "ignore::gpext.inference.DenseBlocksWarning", "ignore::gpext.inference.InferenceWarning"
)
TOLERANCE = {"rtol": 1e-6, "atol": 1e-8}  # for a GPU's rounding; the simulated device adds none
NEW = torch.linspace(0.1, 0.9, 3, dtype=F64).unsqueeze(-1)


def inputs(n=12):
    return torch.linspace(0, 1, n, dtype=F64).unsqueeze(-1)


def targets(name, n=12):
    x = inputs(n).squeeze(-1)
    return {"binary": (x > 0.4).to(F64), "real": torch.sin(6 * x), "counts": (4 * x).round()}[name]


def assert_there(found, expected=None):
    """Every tensor is on the device, and has these values."""
    assert found.device == accelerator.DEVICE
    if expected is not None:
        torch.testing.assert_close(found.cpu(), expected, equal_nan=True, **TOLERANCE)


def priors(module):
    """Register the priors that samplers require of a kernel's or a likelihood's parameters."""
    for name in ("lengthscale", "outputscale", "noise"):
        for owner in module.modules():
            if f"raw_{name}" in owner._parameters:
                owner.register_prior(f"{name}_prior", LogNormalPrior(-1.0, 1.0), name)
    return module


def moved(model):
    """Send a model with its training data."""
    x, y = model.train_inputs[0], model.train_targets
    sent(model).set_train_data(sent(x), sent(y), strict=False)
    return model


class Latent(gpext.models.LatentGP):
    def __init__(self, y, likelihood, inference=None, **options):
        super().__init__(inputs(len(y)), y, likelihood, inference, **options)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = priors(gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()))
        priors(self.likelihood)
        self.double()

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Exact(gpytorch.models.ExactGP):
    def __init__(self, kernel):
        super().__init__(inputs(), targets("real"), priors(gpytorch.likelihoods.GaussianLikelihood()))
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = priors(gpytorch.kernels.ScaleKernel(kernel))
        self.double()

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Sparse(gpytorch.models.ApproximateGP):
    def __init__(self):
        super().__init__(gpext.variational.SiteVariationalStrategy(self, inputs(4).clone()))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        self.double()

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


@pytest.mark.parametrize(("name", "rule"), PAIRS)
def test_inference_and_prediction(name, rule):
    case = CASES[name]
    likelihood, prior, y = case.problem(5)
    p = MultivariateNormal(prior().mean.detach(), prior().covariance_matrix.detach())
    expected = RULES[rule].infer(p, likelihood, y)
    with accelerated():
        there = sent(case.make())
        found = RULES[rule].infer(MultivariateNormal(sent(p.mean), sent(p.covariance_matrix)), there, sent(y))
        assert_there(found.log_evidence, expected.log_evidence)
        assert_there(found.log_loo, expected.log_loo)
        assert_there(found.posterior.mean, expected.posterior.mean)
        assert_there(found.sites.shift, expected.sites.shift)
        assert_there(
            there.log_marginal(sent(y), found.posterior), likelihood.log_marginal(y, expected.posterior).detach()
        )


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(NO_DISTRIBUTION)])
def test_predictive_distributions(name):
    case = CASES[name]
    likelihood, prior, y = case.problem(5)
    p = MultivariateNormal(prior().mean.detach(), prior().covariance_matrix.detach())
    expected = likelihood.marginal(p)
    with accelerated():
        found = sent(case.make()).marginal(MultivariateNormal(sent(p.mean), sent(p.covariance_matrix)))
        assert_there(found.mean, expected.mean.detach())
        assert_there(found.sample(torch.Size([2])))
        assert_there(found.log_prob(sent(y)), expected.log_prob(y).detach())
        half = torch.full(expected.batch_shape, 0.3, dtype=F64)
        for method, at in (("cdf", y), ("icdf", half)):
            try:
                values = getattr(expected, method)(at)
            except NotImplementedError:
                continue
            assert_there(getattr(found, method)(sent(at)), values.detach())


@pytest.mark.parametrize("batch_size", [None, 5])
@pytest.mark.parametrize(
    ("kind", "likelihood"),
    [("real", likelihoods.StudentTLikelihood), ("binary", likelihoods.BernoulliLogitLikelihood)],
)
def test_training_by_the_augmented_bound(kind, likelihood, batch_size):
    def trained(send):
        model, own, x, y = send(Sparse()), send(likelihood().double()), send(inputs()), send(targets(kind))
        mll = gpext.mlls.AugmentedELBO(own, model, num_data=len(y))
        gpext.fit(mll, x, y, batch_size=batch_size, max_steps=4, progress=False)
        with torch.no_grad():
            return own.eval()(model.eval()(send(NEW))).mean

    expected = trained(lambda value: value)
    with accelerated():
        assert_there(trained(sent), expected)


@pytest.mark.parametrize("options", [{}, {"neighbours": 3}], ids=str)
def test_training_of_a_latent_gp(options):
    def trained(model):
        mll = gpext.mlls.LatentMarginalLogLikelihood(model.likelihood, model)
        gpext.fit(mll, model.train_inputs[0], model.train_targets, max_steps=3, progress=False)
        return model.eval()

    expected = trained(Latent(targets("counts"), likelihoods.PoissonLikelihood(), **options))(NEW)
    with accelerated():
        found = trained(moved(Latent(targets("counts"), likelihoods.PoissonLikelihood(), **options)))(sent(NEW))
        assert_there(found.mean.detach(), expected.mean.detach())
        assert_there(found.variance.detach(), expected.variance.detach())


@pytest.mark.parametrize("initial", ["subset", "curvature"])
@pytest.mark.parametrize("rule", ["laplace", "kl", "ep", "cavi"])
def test_training_on_subsets(initial, rule, monkeypatch):
    monkeypatch.setattr(subsets, "_MOST", 8)
    monkeypatch.setattr(subsets, "_LEAST", 4)

    def trained(send):
        model = send(Latent(targets("binary", 40), likelihoods.BernoulliLogitLikelihood(), RULES[rule], neighbours=3))
        mll = gpext.mlls.LatentMarginalLogLikelihood(model.likelihood, model)
        x, y = model.train_inputs[0], model.train_targets
        return gpext.fit(mll, x, y, max_steps=6, initial=initial, progress=False).objective

    expected = trained(lambda model: model)
    with accelerated():
        assert trained(moved) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("options", [{"batch_size": 15, "max_steps": 4}, {"max_steps": 3}], ids=["blocks", "all"])
@pytest.mark.parametrize("by", ["distance", "correlation", "information"])
def test_training_and_prediction_with_neighbours(by, options):
    """At places whose distances all differ: rounding chooses among equal ones. Adam, of blocks, amplifies rounding."""
    tolerance = 1e-4 if "batch_size" in options else 1e-6

    def trained(send):
        model = Latent(targets("counts", 40), likelihoods.PoissonLikelihood(), neighbours=3, neighbours_by=by)
        model.set_train_data(inputs(40) ** 1.5)
        model = send(model)
        mll = gpext.mlls.LatentMarginalLogLikelihood(model.likelihood, model)
        objective = gpext.fit(mll, model.train_inputs[0], model.train_targets, progress=False, **options).objective
        return objective, model.eval()(send(NEW)).mean

    objective, mean = trained(lambda each: each)
    with accelerated():
        found, there = trained(lambda each: sent(each) if isinstance(each, torch.Tensor) else moved(each))
        assert_there(there.detach())
    assert found == pytest.approx(objective, rel=tolerance)
    torch.testing.assert_close(there.detach().cpu(), mean.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", MEMBERS)
def test_gibbs(name):
    member = MEMBERS[name]
    with accelerated():
        K = torch.exp(-0.5 * (inputs(6) - inputs(6).mT).square() / 0.1)
        prior = MultivariateNormal(sent(torch.zeros(6, dtype=F64)), sent(K))
        sampler = GibbsSampler(prior, sent(member.make()), sent(member.targets(6)))
        draws = sampler.run(2, num_chains=2, warmup=1, progress=False)
        assert_there(draws.latent)
        assert bool(draws.latent.isfinite().all())


SAMPLERS = {
    "Gibbs": (GibbsSampler, {}),
    "Gibbs, neighbours": (GibbsSampler, {"neighbours": 2}),
    "Gibbs, neighbours by information": (GibbsSampler, {"neighbours": 2, "neighbours_by": "information"}),
    "Gibbs, neighbours of what is left": (GibbsSampler, {"neighbours": 2, "inducing_inputs": inputs(2)}),
    "SGLD": (lambda model: AugmentedSGLDSampler(model, preconditioner=torch.eye(2)), {}),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_hyperparameters_of_a_latent_gp(name):
    sampler, options = SAMPLERS[name]
    with accelerated():
        model = moved(Latent(targets("binary", 5), likelihoods.BernoulliLogitLikelihood(), **options))
        draws = sampler(model).run(2, num_chains=1, warmup=1, progress=False)
        assert_there(draws.latent)
        assert_there(draws.predict(sent(NEW)).mean)


KERNELS = {
    "rbf": keops.RBFKernel,
    "matern": keops.MaternKernel,
    "periodic": keops.PeriodicKernel,
    "rq": keops.RQKernel,
    "stock": gpytorch.kernels.RBFKernel,
}


@pytest.mark.parametrize("name", KERNELS)
def test_lazy_kernels_and_unbiased_gradients(name):
    """With as many probes as data and solves to the end the gradient is no estimate."""

    def gradient(model):
        solver = UnbiasedSolver(num_probes=12, tolerance=1e-10, generator=torch.Generator().manual_seed(0))
        mll = gpext.mlls.UnbiasedMarginalLogLikelihood(model.likelihood, model, solver=solver)
        mll(model(*model.train_inputs), model.train_targets).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    with gpytorch.settings.max_cholesky_size(1):
        expected = gradient(Exact(KERNELS[name]()))
        with accelerated():
            assert_there(gradient(moved(Exact(KERNELS[name]()))), expected)


def test_langevin_steps():
    with accelerated():
        model = moved(Exact(keops.RBFKernel()))
        sampler = SGLDSampler(gpext.mlls.UnbiasedMarginalLogLikelihood(model.likelihood, model))
        found = sampler.run(
            num_samples=2, num_chains=1, warmup=1, step_size=1e-3, preconditioner=torch.eye(3), progress=False
        )
        assert_there(found.predict(sent(NEW)).mean)


def test_metropolis_hastings():
    with accelerated():
        model = moved(Exact(gpytorch.kernels.RBFKernel()))
        sampler = MetropolisHastings(gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model))
        found = sampler.run(num_samples=2, num_chains=1, warmup=2, progress=False)
        assert_there(found.predict(sent(NEW)).mean)


def test_solvers():
    x = inputs(20)
    K = torch.exp(-(x - x.mT).square() / 0.02)

    def found(send):
        K_there, b = send(K), send(x)
        noise = torch.full_like(b[:, 0], 0.1)

        def product(v):
            return K_there @ v + 0.1 * v

        def seeded():
            return torch.Generator().manual_seed(0)

        L = partial_cholesky(lambda i: K_there[:, i], K_there.diagonal(), noise=0.1, generator=seeded())
        P = LowRankPreconditioner.of(L, noise)
        entries, left = (lambda i, j: K_there[i, j]), (1 - L[:, :5].square().sum(-1)).clamp_min(0)
        near = with_neighbours(entries, L[:, :5], left, noise, b, generator=seeded())
        share = share_of_steps(entries, L[:, :5], left, noise, b, tolerance=1e-8, generator=seeded())
        return [
            near(b),
            near.whitened(product)(b),
            near.log_det,
            b * share,
            conjugate_gradients(product, b, precondition=P).solution,
            unbiased_cg(product, b, precondition=P, generator=seeded()).solution,
            nystrom(lambda v: K_there @ v, 20, 5, like=K_there, generator=seeded()).square().sum(-1),
            estimator_diagnostics(product, b).mean,
            lanczos_log_det(product, 20, num_probes=2, num_steps=5, like=K_there, generator=seeded())[0],
            P.whitened(product)(b),
        ]

    expected = found(lambda value: value)
    with accelerated():
        for ours, theirs in zip(found(sent), expected, strict=True):
            assert_there(ours, theirs)


def tensor(*values):
    return sent(torch.tensor(values, dtype=F64))


MIXING = {
    "PolyaGamma": lambda: distributions.PolyaGamma(tensor(1.0, 2.5), tensor(0.0, 2.0)),
    "InverseGaussian": lambda: distributions.InverseGaussian(tensor(1.0, 2.0), tensor(1.0, 2.0)),
    "GIG": lambda: distributions.GeneralizedInverseGaussian(tensor(1.0, 2.0), tensor(1.0, 2.0), tensor(0.5, 1.0)),
    "ScaleMixture": lambda: distributions.ScaleMixture(
        lambda r: torch.exp(1 - torch.sqrt(1 + 4 * r)), tensor(0.0, 1.0, 30.0)
    ),
    "VonMises": lambda: distributions.VonMises(tensor(1.0, 2.0), tensor(1.0, 200.0)),
}


@pytest.mark.parametrize("name", MIXING)
def test_distributions(name):
    with accelerated():
        made = MIXING[name]()
        drawn = made.sample(torch.Size([4]), generator=torch.Generator(accelerator.DEVICE).manual_seed(0))
        for values in (drawn, made.sample(), made.mean, made.variance, made.log_prob(drawn), made.cdf(drawn)):
            assert_there(values)
        assert_there(made.icdf(torch.full_like(made.mean, 0.4)))
