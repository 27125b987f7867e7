"""LatentGP with nearest neighbours: the exact model where all data are neighbours, and its own definition elsewhere."""

import copy
import pickle
from dataclasses import replace
from functools import partial

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal

import gpext
from gpext.bounds import num_latents
from gpext.inference import CAVI, EP, KL, Laplace, Status, Taylor, exact_terms
from gpext.inference.drivers.fixed_point import visit
from gpext.inference.problem import Problem
from gpext.kernels import sphere_points
from gpext.likelihoods import (
    BernoulliLogitLikelihood,
    HeteroscedasticGaussianLikelihood,
    LaplaceLikelihood,
    MultinomialLogitLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.variational.neighbour_choice import NeighbourChoice
from tests.members import F64, tensor

N = 40


class Model(gpext.models.LatentGP):
    """A Matern-3/2 kernel, one of each latent or one of all; neighbours are not filled in unless asked for."""

    def __init__(self, x, y, likelihood, rule, *, shared=False, fill_in=False, **options):
        super().__init__(x, y, likelihood, rule, fill_in=fill_in, **options)
        latents = getattr(likelihood, "num_latents", None)
        batch = torch.Size([] if latents is None else [latents])
        shape = torch.Size([]) if shared else batch
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
        base = gpytorch.kernels.MaternKernel(1.5, ard_num_dims=2, batch_shape=shape)
        self.covar_module = gpytorch.kernels.ScaleKernel(base, batch_shape=shape)
        self.to(x.dtype)
        base.lengthscale = torch.tensor([[0.3, 0.5]])
        self.covar_module.outputscale = 1.7
        self.mean_module.constant.data.fill_(0.3)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def data(kind="real", n=N, dtype=F64):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, 2, generator=generator, dtype=F64)
    x[7], x[20] = x[3], x[21]  # equal inputs
    f = 2 * torch.sin(6 * x[:, 0])
    y = {
        "real": f + 0.3 * torch.randn(n, generator=generator, dtype=F64),
        "binary": (f > torch.randn(n, generator=generator, dtype=F64)).to(F64),
        "count": torch.poisson(f.exp(), generator=generator),
        "class": (f + 2).clamp(0, 2).long(),
    }[kind]
    new = torch.cat([x[5:6], torch.rand(8, 2, generator=generator, dtype=F64)])
    return x.to(dtype), y if kind == "class" else y.to(dtype), new.to(dtype)


def divergence_from(exact, near):
    """Return KL(N(0, exact) || N(0, near))."""
    ratio = torch.linalg.solve(near, exact)
    return float(0.5 * (ratio.trace() - len(exact) - torch.logdet(ratio)))


SINGLE = [
    (make, kind, rule)
    for make, kind, rules in (
        (BernoulliLogitLikelihood, "binary", (Laplace(), KL(), EP(), CAVI(), Taylor())),
        (PoissonLikelihood, "count", (Laplace(), KL(), EP())),
        (StudentTLikelihood, "real", (Laplace(), KL(), EP(), CAVI())),
        (lambda: MultinomialLogitLikelihood(3), "class", (Laplace(), KL())),
        (HeteroscedasticGaussianLikelihood, "real", (KL(), EP())),  # the mode has no noise
    )
    for rule in rules
]


@pytest.mark.parametrize(("make", "kind", "rule"), SINGLE)
@pytest.mark.parametrize(
    ("shared", "inducing", "fill_in"), [(False, 0, False), (True, 0, False), (False, 5, False), (True, 0, True)]
)
def test_with_all_data_as_neighbours_the_model_is_the_exact_one(make, kind, rule, shared, inducing, fill_in):
    x, y, new = data(kind)
    if inducing and num_latents(make()) is not None and not isinstance(rule, KL):
        pytest.skip("coupled sites")
    found = []
    for neighbours in (None, N - 1):
        likelihood = make()
        options = {"inducing_inputs": 0.9 * x[:inducing] + 0.05} if inducing and neighbours else {}
        model = Model(x, y, likelihood, rule, shared=shared, neighbours=neighbours, fill_in=fill_in, **options)
        mll = LatentMarginalLogLikelihood(likelihood, model)
        value = mll(model.train()(x), y)
        z = model.variational_strategy.sparse_inputs
        parameters = [p for p in mll.parameters() if p.requires_grad and p is not z]
        gradient = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
        prediction = model.eval()(new)
        assert model.result.status is Status.CONVERGED
        marginal = likelihood(prediction)
        noise = marginal.variance if kind != "class" else marginal.probs
        covariance = prediction.covariance_matrix
        found.append([value, *gradient, prediction.mean, prediction.variance, covariance, model.result.log_loo, noise])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("region_size", [None, 12])
def test_predictions_are_regressions_on_the_nearest_data(region_size):
    x, y, new = data("count")
    model = Model(x, y, PoissonLikelihood(), Laplace(), neighbours=4, region_size=region_size).eval()
    with torch.no_grad():
        prediction, posterior = model(new), model.result.posterior
    scale = model.covar_module.base_kernel.lengthscale.detach()
    for i in range(len(new)):
        distance = torch.cdist(new[i : i + 1] / scale, x / scale).squeeze(0)
        distance[7], distance[20] = torch.inf, torch.inf  # equal to others
        near = distance.argsort()[:4]
        K = model.covar_module(torch.cat([new[i : i + 1], x[near]])).to_dense().detach()
        a = torch.linalg.solve(K[1:, 1:], K[1:, 0])
        mean = 0.3 + a @ (posterior.mean[near] - 0.3)
        V = posterior.covariance_matrix[near][:, near]
        variance = K[0, 0] - a @ K[1:, 0] + a @ V @ a
        torch.testing.assert_close(prediction.mean[i], mean)
        torch.testing.assert_close(prediction.variance[i], variance)
    covariance = prediction.covariance_matrix.detach()
    torch.testing.assert_close(covariance.diagonal(), prediction.variance)
    assert float(torch.linalg.eigvalsh(covariance).min()) > -1e-10


@pytest.mark.parametrize("make", [PoissonLikelihood, HeteroscedasticGaussianLikelihood])
def test_predictions_are_differentiable_in_the_new_inputs(make):
    x, y, new = data("count")
    model = Model(x, y, make(), Laplace(), neighbours=5).eval()

    def total(inputs):
        p = model(inputs)
        return p.mean.sum() + p.variance.sum()

    inputs = new[1:].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(total(inputs), inputs)
    step = 1e-6 * torch.tensor([1.0, 0.0], dtype=F64)
    with torch.no_grad():
        difference = (total(new[1:2] + step) - total(new[1:2] - step)) / 2e-6
    torch.testing.assert_close(gradient[0, 0], difference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ordering", ["maximin", "random", "coordinate", "middle"])
def test_more_neighbours_come_nearer_to_the_exact_evidence(ordering):
    x, y, _ = data("binary", 200)
    likelihood = BernoulliLogitLikelihood()
    exact = Model(x, y, likelihood, Laplace()).result.log_evidence
    errors = []
    for neighbours in (1, 60):
        model = Model(x, y, likelihood, Laplace(), neighbours=neighbours, ordering=ordering)
        errors.append(float((model.result.log_evidence - exact).abs()))
    assert errors[1] < min(0.1 * errors[0], 0.05)


def test_from_the_middle_outwards_no_neighbour_is_farther_from_the_middle():
    x, y, _ = data("count")
    model = Model(x, y, PoissonLikelihood(), Laplace(), neighbours=4, ordering="middle")
    model.variational_strategy.choose_neighbours()
    graph = model.variational_strategy.neighbours.graph(model.variational_strategy.inducing_points)
    points = x[graph.first] / tensor(0.3, 0.5)
    distance = (points - (x / tensor(0.3, 0.5)).mean(0)).norm(dim=-1)
    assert bool((distance[graph.rows[:, 1:]] <= distance[graph.rows[:, :1]] + 1e-9).all())


def test_derivatives_in_inducing_inputs_are_differences():
    x, y, new = data("count")
    model = Model(x, y, PoissonLikelihood(), Laplace(), neighbours=4, inducing_inputs=new).train()
    mll, z = LatentMarginalLogLikelihood(model.likelihood, model), model.variational_strategy.sparse_inputs
    assert not z.requires_grad  # by default they stay where they are
    z.requires_grad_()
    (gradient,) = torch.autograd.grad(mll(model(x), y), z)
    values = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            z[1, 0] += step
            values.append(mll(model(x), y))
            z[1, 0] -= step
    torch.testing.assert_close(gradient[1, 0], (values[0] - values[1]) / 2e-5, rtol=1e-4, atol=1e-7)


def test_inducing_inputs_and_neighbours_come_nearer_than_either():
    x = torch.rand(200, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    y = (x.sum(-1) > 1).to(F64)

    def covariance(**options):
        model = Model(x, y, BernoulliLogitLikelihood(), Laplace(), **options).train()
        with torch.no_grad():
            return model(x).lazy_covariance_matrix.to_dense()

    def divergence(**options):  # of the prior from the exact one
        return divergence_from(covariance(), covariance(**options))

    either = divergence(neighbours=3), divergence(inducing_inputs=x[:15])
    assert divergence(neighbours=3, inducing_inputs=x[:15]) < 0.8 * min(either)


def test_training_chooses_neighbours_by_the_lengthscales_found():
    x, _, _ = data("real", 300)
    y = torch.sin(15 * x[:, 0]) + 0.1 * torch.randn(300, generator=torch.Generator().manual_seed(1), dtype=F64)
    likelihood = StudentTLikelihood()
    model = Model(x, y, likelihood, Laplace(), neighbours=5)
    mll = LatentMarginalLogLikelihood(likelihood, model)
    model.variational_strategy.choose_neighbours()
    before = model.variational_strategy.neighbours.scale.clone()
    assert not model.variational_strategy.choose_neighbours()  # the same lengthscales
    model.covar_module.base_kernel.lengthscale = before * tensor(1.0, 1.2)  # nearly the same ratio
    assert not model.variational_strategy.choose_neighbours()
    assert torch.equal(model.variational_strategy.neighbours.scale, before)
    model.covar_module.base_kernel.lengthscale = before * tensor(1.0, 1.3)
    assert model.variational_strategy.choose_neighbours()
    gpext.fit(mll, x, y, progress=False)
    after = model.variational_strategy.neighbours.scale
    lengthscale = model.covar_module.base_kernel.lengthscale.detach().squeeze(0)
    assert float(after[1] / after[0]) > 2 * float(before[1] / before[0])
    assert float((lengthscale / lengthscale[0] / (after / after[0])).log().abs().max()) < 1


class SpaceTime(gpext.models.LatentGP):
    """A product of a kernel of places on the Earth and one of time, in thousands of kilometres and in days."""

    def __init__(self, x, y, days, **options):
        super().__init__(x, y, PoissonLikelihood(), Laplace(), **options)
        self.mean_module = gpytorch.means.ConstantMean()
        self.space = gpytorch.kernels.MaternKernel(1.5, active_dims=(0, 1, 2))
        self.time = gpytorch.kernels.MaternKernel(0.5, active_dims=(3,))
        self.space.lengthscale, self.time.lengthscale = 0.5, days
        self.double()

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), (self.space * self.time)(x))


@torch.no_grad()
@pytest.mark.parametrize("days", [0.2, 200.0])
def test_neighbours_in_space_and_time_are_near_in_lengthscales_of_each(days):
    generator = torch.Generator().manual_seed(0)
    size = 150
    places = torch.rand(size, 2, generator=generator, dtype=F64) * tensor(20.0, 10.0) + tensor(0.0, 45.0)
    time = 30 * torch.rand(size, 1, generator=generator, dtype=F64)
    x = torch.cat([sphere_points(places, radius=6.371), time], -1)
    y = torch.ones(size, dtype=F64)
    exact = SpaceTime(x, y, days).train()(x).covariance_matrix

    def divergence(neighbours, scale=None):  # of the prior from the exact one
        model = SpaceTime(x, y, days, neighbours=neighbours, fill_in=False).train()
        if scale is not None:
            model.variational_strategy.neighbours.scale = scale
        near = model(x).lazy_covariance_matrix.to_dense()
        torch.testing.assert_close(
            model.variational_strategy.neighbours.scale, tensor(0.5, 0.5, 0.5, days) if scale is None else scale
        )
        return divergence_from(exact, near)

    assert divergence(size - 1) < 1e-8
    assert divergence(4) < 0.9 * divergence(4, torch.ones(4, dtype=F64))  # as if all columns had the same units


def test_training_on_subsets_has_all_data_again():
    x, y, new = data("count", 420)
    model = Model(x, y, PoissonLikelihood(), Laplace(), neighbours=5)
    mll = LatentMarginalLogLikelihood(model.likelihood, model)
    result = gpext.fit(mll, x, y, progress=False, initial="subset")
    assert "begun on 150, then 250 random data of 420" in result.message
    assert len(model.result.conditioned.mean) == 420
    assert bool((model.eval()(new).variance > 0).all())


def test_copies_and_files_predict_the_same():
    x, y, new = data("count")
    model = Model(x, y, PoissonLikelihood(), Laplace(), neighbours=5)
    model.variational_strategy.choose_neighbours()
    model.covar_module.base_kernel.lengthscale = torch.tensor([[0.8, 0.2]])  # other than neighbours were chosen by
    expected = model.eval()(new)
    other = Model(x, y, PoissonLikelihood(), Laplace(), neighbours=5)
    other.load_state_dict(model.state_dict())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), other.eval()):
        found = copied(new)
        torch.testing.assert_close(found.mean, expected.mean)
        torch.testing.assert_close(found.variance, expected.variance)


def test_single_precision():
    found = []
    for dtype in (F64, torch.float32):
        x, y, new = data("count", dtype=dtype)
        model = Model(x, y, PoissonLikelihood(), Laplace(), neighbours=5).eval()
        found.append(model(new))
        assert found[-1].mean.dtype is dtype is found[-1].variance.dtype
    torch.testing.assert_close(found[1].mean.double(), found[0].mean, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found[1].variance.double(), found[0].variance, rtol=1e-3, atol=1e-3)


def test_a_covariance_too_smooth_for_its_digits_gets_a_jitter_that_is_reported():
    x, y, new = data("real", 60)
    model = Model(x, y, StudentTLikelihood(), Laplace(), neighbours=30)
    model.covar_module.base_kernel = gpytorch.kernels.RBFKernel().double()
    model.covar_module.base_kernel.lengthscale = 3.0
    assert "jitter" in model.result.message
    assert model.result.status is Status.CONVERGED
    assert bool((model.eval()(new).variance > 0).all())


def test_sharp_sites_lose_no_digits():
    x, y, new = data("real")
    found = []
    for neighbours in (None, 19):
        likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.Positive()).double()
        likelihood.noise = 1e-12  # beside a prior variance of 1.7
        model = Model(x[21:], y[21:], likelihood, Laplace(), neighbours=neighbours)  # without equal inputs
        conditioned = model.result.conditioned
        found.append(
            [model.result.log_evidence, *conditioned.leave_one_out, conditioned.weights, model.eval()(new).mean]
        )
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_the_bound_has_the_digits_that_it_says_where_neighbours_tell_almost_all():
    """Neighbours leave a 10^8th of the variance of a value and less, and means have half of their digits."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 2, generator=generator, dtype=F64)
    y = torch.sin(2 * x[:, 0]) + 0.1 * torch.randn(200, generator=generator, dtype=F64)
    likelihood = LaplaceLikelihood().double()
    likelihood.noise = 0.02
    model = Model(x, y, likelihood, KL(), neighbours=20, fill_in=True)
    model.covar_module.base_kernel = gpytorch.kernels.MaternKernel(2.5).double()
    model.covar_module.base_kernel.lengthscale = 30.0
    model.covar_module.outputscale = 100.0
    assert model.result.status is Status.CONVERGED
    noise = 1e-12 * torch.randn(5, 200, generator=generator, dtype=F64)
    with torch.no_grad():
        problem = Problem.of(model.variational_strategy.prior_distribution, likelihood, y, 0.0)
        terms, sites = partial(exact_terms, likelihood, y), model.result.conditioned.sites
        found = [visit(problem, terms, replace(sites, shift=sites.shift * (1 + each))) for each in noise]
        values = torch.stack([each.value for each in found])
        assert float(values.max() - values.min()) < float(found[0].rounding)


def test_new_data_replace_the_old():
    x, y, new = data("count")
    model = Model(x[:20], y[:20], PoissonLikelihood(), Laplace(), neighbours=5).eval()
    model(new)
    model.set_train_data(x, y, strict=False)
    expected = Model(x, y, PoissonLikelihood(), Laplace(), neighbours=5).eval()(new)
    torch.testing.assert_close(model(new).mean, expected.mean)


def test_one_datum():
    x, y, new = data("count")
    found = [Model(x[:1], y[:1], PoissonLikelihood(), Laplace(), neighbours=k).eval()(new) for k in (20, None)]
    torch.testing.assert_close(found[0].mean, found[1].mean)
    torch.testing.assert_close(found[0].variance, found[1].variance)


def test_bad_input():
    x, y, new = data("count")
    with pytest.raises(ValueError, match="neighbours"):
        Model(x, y, PoissonLikelihood(), Laplace(), neighbours=0)
    with pytest.raises(TypeError, match="neighbours"):
        Model(x, y, PoissonLikelihood(), Laplace(), neighbours=2.5)
    with pytest.raises(ValueError, match="ordering must be"):
        Model(x, y, PoissonLikelihood(), Laplace(), neighbours=5, ordering="hilbert")
    with pytest.raises(ValueError, match="one set of inputs"):
        Model(x.expand(2, -1, -1), y, PoissonLikelihood(), Laplace(), neighbours=5)
    with pytest.raises(NotImplementedError, match="design"):
        Model(x, y, PoissonLikelihood(), Laplace(), neighbours=5, design=gpext.designs.sums(torch.arange(N)))
    with pytest.raises(ValueError, match="finite"):
        Model(x, y, PoissonLikelihood(), Laplace(), neighbours=5).eval()(new * torch.nan)
    with pytest.raises(ValueError, match="batch"):
        Model(x, y, PoissonLikelihood(), Laplace(), neighbours=5).eval()(new.expand(2, -1, -1))


def test_rounding_of_a_lengthscale_does_not_choose_among_equally_near_data():
    line = torch.linspace(0, 1, 12, dtype=F64)
    x, found = torch.cartesian_prod(line, line), []
    for lengthscale in (0.05, 0.05 * (1 + 2**-52), 0.17, 0.3):
        choice = NeighbourChoice(6, 2)
        choice.scale = tensor(lengthscale, lengthscale)
        found.append(choice.graph(x).rows)
    assert all(torch.equal(rows, found[0]) for rows in found)
