"""Filled neighbour graphs: exact covariances in cliques, nearer to the exact prior, copies and files, both dtypes."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch

from gpext.inference import EP, Laplace, Status
from gpext.likelihoods import PoissonLikelihood
from gpext.linalg.front_batches import Front
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.operators.clique_covariance import CliqueGraph
from gpext.operators.neighbour_covariance import NeighbourGraph
from tests.members import F64
from tests.models.test_neighbours import Model, data, divergence_from


def prior_of(model):
    return model.variational_strategy.prior_distribution


def filled(n=400, rule=None, dtype=F64, **options):
    x, y, new = data("count", n, dtype)
    model = Model(x, y, PoissonLikelihood(), rule or Laplace(), **{"neighbours": 5, "fill_in": True, **options})
    return model, x, y, new


@pytest.mark.parametrize("inducing", [0, 6])
def test_it_is_the_kernel_in_every_clique_and_not_elsewhere(inducing):
    x = data("count", 400)[0]
    options = {"inducing_inputs": 0.9 * x[:inducing] + 0.05} if inducing else {}
    model, x, _, _ = filled(**options)
    with torch.no_grad():
        covariance = prior_of(model).lazy_covariance_matrix
        found, exact = covariance.to_dense(), model.forward(x).covariance_matrix
    graph = covariance.graph
    assert isinstance(graph, CliqueGraph)
    for front in graph.dissection.fronts:
        at = graph.first[torch.cat([front.own, front.boundary])]
        torch.testing.assert_close(found[at][:, at], exact[at][:, at], rtol=1e-8, atol=1e-8)
    assert float((found - exact).abs().max()) > 1e-3


def test_fewer_neighbours_are_nearer_to_the_exact_prior_than_more_without():
    x, y, _ = data("count", 800)
    found = []
    for options in ({"neighbours": 10}, {"neighbours": 5, "fill_in": True}, {"neighbours": 10, "fill_in": True}):
        model = Model(x, y, PoissonLikelihood(), Laplace(), **options)
        with torch.no_grad():
            covariance = prior_of(model).lazy_covariance_matrix
            first = covariance.graph.first
            exact = model.forward(x[first]).covariance_matrix
            found.append(divergence_from(exact, covariance.to_dense()[first][:, first]))
    assert found[2] < found[1] < found[0]


def test_no_kernel_is_evaluated_at_no_inputs():
    """Of a front without own points; a kernel's derivative there may be NaN, as the mean of no inputs is."""
    x = torch.rand(8, 2, dtype=F64)
    graph = CliqueGraph.fill(NeighbourGraph.of(x, 3, torch.arange(8)))
    none = Front(torch.arange(0), torch.arange(0), 0, None, torch.arange(0), ())
    graph = replace(graph, tree=replace(graph.tree, fronts=(none, *graph.tree.fronts), node=graph.tree.node + 1))

    def evaluate(points, rows):
        assert rows
        return torch.exp(-torch.cdist(points[:, :rows], points))

    blocks = graph.covariances(x[graph.first], x.new_zeros(8, 0), evaluate)
    assert bool(graph.regress(blocks).positive)


def test_derivatives_are_differences():
    model, x, y, _ = filled(rule=EP(tolerance=1e-10))
    mll = LatentMarginalLogLikelihood(model.likelihood, model)
    model.train()
    parameter = model.covar_module.base_kernel.raw_lengthscale
    (gradient,) = torch.autograd.grad(mll(model(x), y), parameter)
    step = torch.tensor([[1e-4, 0.0]], dtype=F64)
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            parameter += sign * step
            values.append(float(mll(model(x), y)))
            parameter -= sign * step
    assert float(gradient[0, 0]) == pytest.approx((values[0] - values[1]) / 2e-4, rel=1e-5)


def test_predictions_take_twice_the_neighbours_or_those_asked_for():
    mean = [filled(prediction_neighbours=k)[0].eval()(data("count")[2]).mean for k in (None, 10, 5)]
    torch.testing.assert_close(mean[0], mean[1], rtol=0, atol=0)
    assert not torch.equal(mean[0], mean[2])
    with pytest.raises(ValueError, match="prediction_neighbours"):
        filled(prediction_neighbours=0)


def test_copies_and_pickles_predict_the_same():
    model, _, _, new = filled()
    expected = model.eval()(new).mean
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other.eval()(new).mean, expected)


def test_single_precision():
    model, _, _, new = filled(dtype=torch.float32)
    double = filled()[0].eval()(new.double())
    found = model.eval()(new)
    assert found.mean.dtype == torch.float32
    assert model.result.status is Status.CONVERGED
    torch.testing.assert_close(found.mean.double(), double.mean, rtol=1e-3, atol=1e-3)


def test_one_datum():
    x, y, new = data("count", 30)
    model = Model(x[:1], y[:1], PoissonLikelihood(), Laplace(), neighbours=5, fill_in=True).eval()
    assert bool(model(new).variance.isfinite().all())


def test_draws_have_the_covariance_of_the_prior():
    with torch.no_grad():
        covariance = prior_of(filled(n=60)[0]).lazy_covariance_matrix
    first = covariance.graph.first
    half = covariance.regressions.half_times(torch.eye(len(first), dtype=F64))  # of each unit vector, its row
    torch.testing.assert_close(half.mT @ half, covariance.to_dense()[first][:, first])
