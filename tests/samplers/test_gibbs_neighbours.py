"""Gibbs sampling under a prior by nearest neighbours: that of the exact prior where all data are neighbours, and of its
own dense matrix elsewhere."""

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.priors import GammaPrior, LogNormalPrior

from gpext.inference.gibbs import draw_latent
from gpext.likelihoods import BernoulliLogitLikelihood, StudentTLikelihood
from gpext.models import LatentGP
from gpext.samplers import AugmentedSGLDSampler, GibbsSampler
from gpext.sites import GaussianSites
from tests.members import F64
from tests.statistics import misfit_of_gaussians

N = 12


class Model(LatentGP):
    def __init__(self, x, y, likelihood, **options):
        super().__init__(x, y, likelihood, **options)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(1.5, ard_num_dims=2))
        self.covar_module.register_prior("outputscale_prior", LogNormalPrior(0.0, 0.5), "outputscale")
        self.covar_module.base_kernel.register_prior("lengthscale_prior", GammaPrior(4.0, 4.0), "lengthscale")
        self.to(x)
        self.covar_module.base_kernel.lengthscale = torch.tensor([[0.3, 0.5]])
        self.mean_module.constant.data.fill_(0.3)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def seed(number=0):
    return torch.Generator().manual_seed(number)


def inputs(n=N, dtype=F64, seed_number=0):
    return torch.rand(n, 2, dtype=dtype, generator=seed(seed_number))


def model(neighbours=N, inducing=0, dtype=F64, x=None):
    x = inputs(dtype=dtype) if x is None else x
    z = inputs(inducing, dtype, 1) if inducing else None
    return Model(x, torch.sin(5 * x[:, 0]), StudentTLikelihood().to(dtype), neighbours=neighbours, inducing_inputs=z)


def sites(shape):
    precision = 0.5 + torch.rand(shape, dtype=F64, generator=seed(2))
    return GaussianSites(torch.randn(shape, dtype=F64, generator=seed(3)), precision)


def run(sampler, num_samples, **options):
    return sampler.run(num_samples, num_chains=2, **{"warmup": 2, "generator": seed(1), "progress": False, **options})


@pytest.mark.parametrize("inducing", [0, 3])
def test_with_all_neighbours_all_densities_are_those_of_the_exact_prior(inducing):
    """To the jitter of the inducing inputs, 1e-6 by gpytorch."""
    x, tolerance = inputs(5, seed_number=7), 1e-8 if not inducing else 1e-6
    near = GibbsSampler(model(inducing=inducing)).target
    exact = GibbsSampler(model(None)).target
    raw = exact.begin(1)[0] + 0.3
    f, of_data = torch.randn(4, N, dtype=F64, generator=seed()), sites((N,))
    for coordinate in exact.of_prior:
        densities = [each.log_density_given_sites(raw, coordinate, of_data) for each in (near, exact)]
        torch.testing.assert_close(*densities, rtol=0, atol=10 * tolerance)
    for found, expected in zip(near.predicted_at(raw, f, x), exact.predicted_at(raw, f, x), strict=True):
        torch.testing.assert_close(found, expected.expand_as(found), rtol=0, atol=1e3 * tolerance)


@pytest.mark.parametrize("inducing", [0, 3])
def test_draws_are_those_of_the_dense_matrix(inducing):
    target = GibbsSampler(model(3, inducing)).target
    prior = target.prior_at(target.begin(1)[0])
    K, mu = prior.distribution.covariance_matrix.detach(), prior.mean.detach()
    starts = prior.draw(torch.Size((20_000, N)), generator=seed(4))
    assert misfit_of_gaussians(starts, mu, K) < 1
    of_data = sites((N,))
    V = torch.linalg.inv(torch.linalg.inv(K) + torch.diag(of_data.precision))
    mean = mu + V @ (of_data.shift - of_data.precision * mu)
    draws = draw_latent(prior.condition(of_data), starts, generator=seed(5))
    assert misfit_of_gaussians(draws, mean, V) < 1


@pytest.mark.parametrize("inducing", [0, 3])
def test_predictions_condition_the_joint_prior_on_a_draw(inducing):
    """f_* = mu + phi'z + a'r_N + s beside f = mu + Phi z + r, as one dense Gaussian."""
    the_model, new = model(3, inducing), inputs(5, seed_number=7)
    target = GibbsSampler(the_model).target
    raw = target.begin(1)[0]
    prior, strategy = target.prior_at(raw), target.model.variational_strategy
    found = strategy.neighbours._new_values(
        target.model.forward, inputs(), strategy._root_of, prior.graph, prior.jitter, new, several=False
    )
    K = prior.distribution.covariance_matrix.detach()
    point = prior.graph.point
    root = prior.root.detach()[point]
    a = torch.zeros(5, N, dtype=F64).scatter_(1, point.argsort()[found.nearest], found.weights.detach())
    cross = a @ (K - root @ root.mT) + found.root.detach() @ root.mT
    own = (a @ (K - root @ root.mT) @ a.mT + found.root @ found.root.mT).diagonal().detach() + found.rest.detach()
    f = torch.randn(4, N, dtype=F64, generator=seed())
    gain = torch.linalg.solve(K, cross.mT)
    mean, variance = target.predicted_at(raw, f, new)
    torch.testing.assert_close(mean, 0.3 + (f - 0.3) @ gain, rtol=0, atol=1e-8)
    torch.testing.assert_close(variance, own - (cross.mT * gain).sum(0), rtol=0, atol=1e-8)


def test_chains_have_hyperparameters_of_their_own():
    target = GibbsSampler(model(3)).target
    raw = target.begin(2) + torch.tensor([[0.0], [0.4]])
    together = target.prior(raw)
    of_data = sites((2, N))
    posterior = together.condition(of_data)
    for chain in range(2):
        alone = target.prior_at(raw[chain]).condition(GaussianSites(of_data.shift[chain], of_data.precision[chain]))
        torch.testing.assert_close(posterior.mean[chain], alone.mean)
        torch.testing.assert_close(posterior.variance[chain], alone.variance)
    assert not torch.allclose(posterior.variance[0], posterior.variance[1], atol=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("inducing", [0, 3])
def test_it_runs_and_goes_on_and_predicts(inducing, dtype):
    the_model = model(3, inducing, dtype)
    whole = run(GibbsSampler(the_model), 6)
    part = run(GibbsSampler(the_model), 2)
    rest = run(GibbsSampler(the_model), 4, resume=part)
    assert torch.equal(rest.latent, whole.latent)
    assert whole.latent.dtype == dtype
    assert whole.hyperparameters["covar_module.base_kernel.lengthscale"].shape == (2, 6, 1, 2)
    new = inputs(5, dtype, 7)
    predicted = whole.predict(new)
    assert predicted.mean.dtype == dtype
    assert bool((predicted.variance > 0).all())
    assert bool(whole.predict_targets(new).log_prob(torch.zeros(5, dtype=dtype)).isfinite().all())
    known = whole.predict(inputs(dtype=dtype)).components  # at the data nothing but rounding is left
    assert float(known.variance.max()) < (1e-3 if dtype == torch.float32 else 1e-6)


def test_data_at_one_input_are_drawn_alike():
    x = inputs()
    x[5] = x[2]
    draws = run(GibbsSampler(model(3, x=x)), 4)
    torch.testing.assert_close(draws.latent[..., 5], draws.latent[..., 2], rtol=0, atol=1e-8)


def test_the_largest_jitter_that_chains_needed_is_reported():
    """Neighbours a thousandth of a lengthscale away leave conditional variances no digits."""
    sampler = GibbsSampler(model(3))
    target = sampler.target
    own = target.begin(1)[0]
    assert target.prior_at(own).jitter == target.jitter == 0
    added = target.prior_at(own + 5000).jitter
    assert added > 0
    assert target.prior_at(own).jitter == 0
    assert f"; jitter {added:g}." in run(sampler, 2).message


def test_neighbours_stay_while_lengthscales_move():
    target = GibbsSampler(model(3)).target
    raw = target.begin(1)[0]
    assert target.prior_at(raw + torch.linspace(-1, 1, len(raw))).graph is target.prior_at(raw).graph


def test_what_it_cannot_serve():
    x = inputs()
    with pytest.raises(TypeError, match="or one by neighbours; build the LatentGP without inducing_inputs, or with"):
        GibbsSampler(model(None, 3))
    labels = Model(x, (x[:, 0] > 0.5).to(F64), BernoulliLogitLikelihood(), neighbours=3)
    with pytest.raises(TypeError, match="a prior without neighbours; GibbsSampler"):
        AugmentedSGLDSampler(labels)
    with torch.no_grad():
        alone = labels.variational_strategy.prior_distribution
        labels.variational_strategy.choose_neighbours()
    with pytest.raises(TypeError, match="one by neighbours without its model"):
        GibbsSampler(alone, BernoulliLogitLikelihood(), labels.train_targets)
    draws = run(GibbsSampler(labels, hyperparameters=()), 2)
    with pytest.raises(TypeError, match=r"no covariances with new values; call predict\(x\)"):
        draws.predict_from(torch.zeros(1), torch.zeros(N, 1), torch.ones(1))
    with pytest.raises(ValueError, match=r"one set of inputs, \(S, d\), not a batch"):
        draws.predict(x.view(2, 6, 2))
