"""Neighbours by correlation or information: the nearest where distance tells, others where not, kept like sites."""

import copy
import pickle

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal

import gpext
from gpext.inference import EP, KL, Laplace
from gpext.likelihoods import MultinomialLogitLikelihood, PoissonLikelihood
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.models.latent_gp import restricted_to
from tests.members import F64
from tests.models.test_neighbours import Model, data, divergence_from


class Seasonal(gpext.models.LatentGP):
    """Counts by place and time: a Matern-3/2 in one column times a period of one in the other."""

    def __init__(self, x, y, rule=None, **options):
        super().__init__(x, y, PoissonLikelihood(), rule or Laplace(), **options)
        self.mean_module = gpytorch.means.ConstantMean()
        season = gpytorch.kernels.PeriodicKernel(active_dims=[1])
        place = gpytorch.kernels.MaternKernel(1.5, active_dims=[0])
        self.covar_module = gpytorch.kernels.ScaleKernel(place * season)
        self.to(x.dtype)
        place.lengthscale, season.lengthscale, season.period_length = 0.3, 0.5, 1.0

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def seasonal_data(n=150):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, 2, generator=generator, dtype=F64) * torch.tensor([1.0, 10.0], dtype=F64)
    y = torch.poisson((1 + torch.sin(6 * x[:, 0]) + torch.sin(6.28 * x[:, 1])).exp(), generator=generator)
    return x, y, torch.rand(9, 2, generator=generator, dtype=F64) * torch.tensor([1.0, 10.0], dtype=F64)


def graph(model):
    return model.variational_strategy.prior_distribution.lazy_covariance_matrix.graph


@pytest.mark.parametrize("rule", [Laplace(), KL(), EP()], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("region_size", [None, 12, "auto"])
def test_the_most_correlated_are_the_nearest_of_a_stationary_kernel(rule, region_size):
    x, y, new = data("count")
    found = []
    for by in ("distance", "correlation"):
        model = Model(x, y, PoissonLikelihood(), rule, neighbours=5, neighbours_by=by, region_size=region_size)
        value = LatentMarginalLogLikelihood(model.likelihood, model)(model.train()(x), y)
        prediction = model.eval()(new)
        found.append([graph(model).rows, value, prediction.mean, prediction.variance])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


BY = pytest.mark.parametrize("by", ["correlation", "information"])


def test_several_latents():
    x, y, new = data("class")
    model = Model(x, y, MultinomialLogitLikelihood(3), Laplace(), neighbours=5, neighbours_by="correlation").eval()
    other = Model(x, y, MultinomialLogitLikelihood(3), Laplace(), neighbours=5).eval()
    torch.testing.assert_close(model(new).mean, other(new).mean, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "likelihood"), [("count", PoissonLikelihood()), ("class", MultinomialLogitLikelihood(3))]
)
@pytest.mark.parametrize("rule", [Laplace(), KL()], ids=lambda rule: type(rule).__name__)
def test_with_all_neighbours_information_changes_nothing(kind, likelihood, rule):
    x, y, new = data(kind)
    for inducing_inputs in (None, 0.9 * x[:6] + 0.05) if kind == "count" else (None,):
        found = []
        for by in ("distance", "information"):
            model = Model(
                x,
                y,
                likelihood,
                rule,
                neighbours=len(x),
                neighbours_by=by,
                inducing_inputs=inducing_inputs,
                shared=True,
            )
            value = LatentMarginalLogLikelihood(model.likelihood, model)(model.train()(x), y)
            prediction = model.eval()(new)
            found.append([value, prediction.mean, prediction.variance])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("inducing", [0, 6])
def test_the_most_telling_lower_the_variance_most_of_twice_as_many_nearest(inducing):
    x, y, new = data("count")
    new = new[1:]  # the first is at a datum, beside which the others tell nothing
    z = 0.9 * x[:inducing] + 0.05 if inducing else None
    model = Model(x, y, PoissonLikelihood(), KL(), neighbours=4, neighbours_by="information", inducing_inputs=z)
    found, choice = graph(model), model.variational_strategy.neighbours
    every = torch.cat([x[found.first], new])
    with torch.no_grad():
        K = model.covar_module(torch.cat([every, x[:0] if z is None else z])).to_dense()
    n = len(every)
    R = K[:n, :n] - K[:n, n:] @ torch.linalg.solve(K[n:, n:], K[n:, :n])
    distance = torch.cdist(choice.scaled(every), choice.scaled(every))

    def expected(i, allowed):
        near = allowed[distance[i, allowed].argsort()][:8].tolist()
        chosen = []
        while near and len(chosen) < 4:
            left = [
                R[i, i] - R[i, [*chosen, j]] @ torch.linalg.solve(R[[*chosen, j]][:, [*chosen, j]], R[[*chosen, j], i])
                for j in near
            ]
            chosen.append(near.pop(int(torch.stack(left).argmin())))
        return chosen

    for place, i in enumerate(found.order.tolist()):
        of_point = expected(i, found.order[:place])
        assert found.rows[i, 1 : 1 + len(of_point)].tolist() == of_point
    root_of = model.variational_strategy._root_of
    nearest = choice._new_values(model.forward, x, root_of, found, 0.0, new, several=False).nearest
    assert nearest.tolist() == [expected(i, torch.arange(len(found.first))) for i in range(len(found.first), n)]


def test_they_are_nearer_to_the_exact_prior_than_the_nearest():
    x, y, _ = data("count", 150)
    exact = Model(x, y, PoissonLikelihood(), KL())
    unit = 1e-9 * torch.eye(len(x), dtype=F64)
    divergence = {}
    with torch.no_grad():
        for by in ("distance", "information"):
            model = Model(x, y, PoissonLikelihood(), KL(), neighbours=10, neighbours_by=by)
            near = model.variational_strategy.prior_distribution.covariance_matrix
            divergence[by] = divergence_from(exact.covar_module(x).to_dense() + unit, near + unit)
    assert divergence["information"] < 0.6 * divergence["distance"]


def test_with_a_period_they_are_nearer_to_the_exact_prior():
    x, y, _ = seasonal_data()
    divergence = {}
    for by in ("distance", "correlation"):
        model = Seasonal(x, y, neighbours=10, neighbours_by=by, fill_in=False)
        with torch.no_grad():
            near = model.variational_strategy.prior_distribution.covariance_matrix
            exact = model.covar_module(x).to_dense()
        divergence[by] = divergence_from(exact + 1e-9 * torch.eye(len(x)), near + 1e-9 * torch.eye(len(x)))
    assert divergence["correlation"] < 0.3 * divergence["distance"]


def test_with_inducing_inputs_correlations_are_of_what_these_leave():
    x, y, _ = data("count")
    z = 0.9 * x[:6] + 0.05
    model = Model(x, y, PoissonLikelihood(), KL(), neighbours=4, neighbours_by="correlation", inducing_inputs=z)
    found = graph(model)
    with torch.no_grad():
        K = model.covar_module(torch.cat([x, z])).to_dense()
    R = K[: len(x), : len(x)] - K[: len(x), len(x) :] @ torch.linalg.solve(K[len(x) :, len(x) :], K[len(x) :, : len(x)])
    rho = (R / R.diagonal().sqrt() / R.diagonal().sqrt().unsqueeze(-1)).abs()[found.first][:, found.first]
    for place, i in enumerate(found.order.tolist()):
        before = found.order[:place]
        expected = before[rho[i, before].argsort(descending=True)][:4]
        assert set(found.rows[i, 1 : 1 + len(expected)].tolist()) == set(expected.tolist())


@BY
def test_they_stay_until_they_are_chosen_again_and_are_saved(by):
    x, y, new = seasonal_data()
    model = Seasonal(x, y, neighbours=6, neighbours_by=by).eval()
    before = graph(model).rows
    model.covar_module.base_kernel.kernels[1].lengthscale = 2.0
    assert torch.equal(graph(model).rows, before)
    loaded = Seasonal(x, y, neighbours=6, neighbours_by=by).eval()
    loaded.load_state_dict(model.state_dict())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert torch.equal(graph(other).rows, before)
        torch.testing.assert_close(other(new).mean, model(new).mean, rtol=1e-12, atol=1e-12)
    assert model.variational_strategy.choose_neighbours()
    assert not torch.equal(graph(model).rows, before)
    assert not model.variational_strategy.choose_neighbours()


@BY
def test_a_part_of_the_data_has_its_own_meanwhile(by):
    x, y, _ = seasonal_data()
    model = Seasonal(x, y, neighbours=6, neighbours_by=by)
    before = graph(model).rows
    with restricted_to(model, torch.arange(0, 150, 3)):
        assert graph(model).rows.shape == (50, 7)
    model.covar_module.base_kernel.kernels[1].lengthscale = 2.0
    assert torch.equal(graph(model).rows, before)
    model.set_train_data(x[:80], y[:80], strict=False)
    assert graph(model).rows.shape == (80, 7)


@BY
@pytest.mark.parametrize("options", [{"initial": "subset"}, {"batch_size": 200, "max_steps": 4}], ids=str)
def test_training(options, by):
    x, y, new = seasonal_data(500)
    model = Seasonal(x, y, neighbours=8, neighbours_by=by)
    mll = LatentMarginalLogLikelihood(model.likelihood, model)
    result = gpext.fit(mll, x, y, progress=False, **options)
    assert result.status.name in ("CONVERGED", "MAX_STEPS"), result.message
    prediction = model.eval()(new)
    assert bool(prediction.variance.isfinite().all())
    assert graph(model).rows.shape == (500, 9)


def test_other_words_are_refused():
    x, y, _ = data("count")
    with pytest.raises(ValueError, match=r"neighbours_by must be one of .*'distance', 'correlation'.*; got 'kernel'"):
        Model(x, y, PoissonLikelihood(), Laplace(), neighbours=5, neighbours_by="kernel")
