"""Nearest-neighbour priors under every pair of a rule and a likelihood, against the same prior as a dense matrix."""

from dataclasses import replace

import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator import to_linear_operator

from gpext.linalg import dissection
from gpext.linalg.dissection import Dissection
from gpext.operators.clique_covariance import CliqueGraph
from gpext.operators.neighbour_covariance import NeighbourGraph, NeighbourLinearOperator
from tests.latent_cases import CASES, PAIRS, RULES
from tests.members import F64

pytestmark = pytest.mark.filterwarnings("ignore::gpext.inference.DenseBlocksWarning")


@pytest.fixture(autouse=True)
def small_leaves(monkeypatch):
    """So that few data make a tree."""
    monkeypatch.setattr(dissection, "_LEAF", 4)


def graph_of(x, number, region_size, fill=None):
    """Neighbours among x, in a random order; filled in if there is a `fill`.

    It is "fronts", one at a time, "levels" of fronts, "regions" of a front each, or "regions at once".
    """
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    graph = NeighbourGraph.of(x, number, order, region_size)
    if fill is None:
        return graph
    if "regions" in fill:
        tree = Dissection.of_regions(graph.region, together=fill == "regions at once")
    else:
        tree = Dissection.of(graph.points, graph.rows, region=graph.region, together=fill == "levels")
    return replace(CliqueGraph.fill(graph), tree=tree)


def conditioning_sets(graph):
    """The points that each depends on: of a filled graph those eliminated after it in its front, and the boundary."""
    if not isinstance(graph, CliqueGraph):
        return [[j for j in row[1:] if j != i] for i, row in enumerate(graph.rows.tolist())]
    sets = [[]] * len(graph.points)
    for front in graph.dissection.fronts:
        clique = front.own.tolist() + front.boundary.tolist()
        for place, i in enumerate(front.own.tolist()):
            sets[i] = clique[place + 1 :]
    return sets


def neighbour_covariance(K, graph):
    """K~ (..., N, N) by its definition: inverses of dense blocks, one value after the other; differentiable."""
    K = K[..., graph.first, :][..., graph.first]
    size = K.size(-1)
    B = torch.eye(size, dtype=F64).expand(K.shape).clone()
    variances = []
    for i, near in enumerate(conditioning_sets(graph)):
        a = torch.linalg.solve(K[..., near, :][..., near], K[..., near, i].unsqueeze(-1)).squeeze(-1)
        B[..., i, near] = -a
        variances.append(K[..., i, i] - (a * K[..., near, i]).sum(-1))
    root = torch.linalg.solve(B, torch.diag_embed(torch.stack(variances, -1).sqrt()))
    return (root @ root.mT)[..., graph.point, :][..., graph.point]


def both(name, number, n=15, inducing=0, region_size=None, fill=None):
    """A likelihood, targets, and functions that return the prior by neighbours and the same as a dense one.

    The first of the data are inducing inputs, with a jitter.
    """
    likelihood, prior, y = CASES[name].problem(n)
    graph = graph_of(prior.x, number, region_size, fill)

    def parts():
        p = prior()
        K = p.covariance_matrix
        chol = torch.linalg.cholesky(K[..., :inducing, :inducing] + 0.1 * torch.eye(inducing, dtype=F64))
        root = torch.linalg.solve_triangular(chol, K[..., :inducing, :], upper=False).mT
        return p.mean, root, K - root @ root.mT

    def sparse():
        mean, root, rest = parts()
        rest = rest[..., graph.first, :][..., graph.first]

        def evaluate(points, rows):  # places, in place of inputs
            return rest[..., points[:, :rows].unsqueeze(-1), points.unsqueeze(-2)]

        places = torch.arange(len(graph.points))
        blocks = graph.covariances(places, root[..., :0], evaluate)
        return MultivariateNormal(mean, NeighbourLinearOperator(blocks, root[..., graph.first, :], graph=graph))

    def dense():
        mean, root, rest = parts()
        return MultivariateNormal(mean, to_linear_operator(neighbour_covariance(rest, graph) + root @ root.mT))

    return likelihood, prior, y, sparse, dense


SERVED = [(name, rule) for name, rule in PAIRS if CASES[name].num_latents is None or rule == "kl"]
FEW = [(name, rule) for name, rule in PAIRS if name in ("bernoulli_logit", "student_t")]
JOINT = [(name, rule) for name, rule in PAIRS if name == "multinomial"]
ALL = [(*pair, 0, None, None) for pair in PAIRS]
ALL += [(*pair, 3, None, None) for pair in SERVED]
ALL += [(*pair, 3, 6, None) for pair in FEW] + [(*pair, 0, 6, None) for pair in JOINT]
ALL += [(*pair, 0, None, "fronts") for pair in PAIRS] + [(*pair, 3, 6, "fronts") for pair in FEW]
ALL += [(*pair, 0, 6, "levels") for pair in FEW + JOINT] + [(*pair, 3, None, "levels") for pair in FEW]
ALL += [(*pair, 0, 6, "regions") for pair in PAIRS] + [(*pair, 3, 6, "regions at once") for pair in FEW]
ALL += [(*pair, 0, 6, "regions at once") for pair in JOINT]


@pytest.mark.parametrize(("name", "rule", "inducing", "region_size", "fill"), ALL)
def test_the_result_is_that_of_the_dense_matrix(name, rule, inducing, region_size, fill):
    likelihood, prior, y, sparse, dense = both(name, 3 if fill else 4, 15, inducing, region_size, fill)
    found, expected = RULES[rule].infer(sparse(), likelihood, y), RULES[rule].infer(dense(), likelihood, y)
    assert found.status is expected.status
    assert isinstance(found.posterior, MultitaskMultivariateNormal) == isinstance(
        expected.posterior, MultitaskMultivariateNormal
    )
    torch.testing.assert_close(found.log_evidence, expected.log_evidence, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(found.posterior.mean, expected.posterior.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.posterior.variance, expected.posterior.variance, rtol=1e-5, atol=1e-6)
    covariances = found.posterior.covariance_matrix, expected.posterior.covariance_matrix
    torch.testing.assert_close(*covariances, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.log_loo, expected.log_loo, rtol=1e-5, atol=1e-5, equal_nan=True)
    parameters = [prior.log_kernel, prior.mean, *(p for p in likelihood.parameters() if p.requires_grad)]
    gradients = [
        torch.autograd.grad(result.log_evidence, parameters, allow_unused=True, materialize_grads=True)
        for result in (found, expected)
    ]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "rule"), [(name, rule) for name, rule in PAIRS if rule in ("kl", "laplace")])
def test_with_all_neighbours_it_is_the_exact_prior(name, rule):
    likelihood, prior, y, sparse, _ = both(name, 14)
    found, expected = RULES[rule].infer(sparse(), likelihood, y), RULES[rule].infer(prior(), likelihood, y)
    torch.testing.assert_close(found.log_evidence, expected.log_evidence, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(found.posterior.mean, expected.posterior.mean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fill", [None, "fronts", "levels", "regions"])
@pytest.mark.parametrize("inducing", [0, 3])
@pytest.mark.parametrize("name", ["student_t", "multinomial"])
def test_the_operator_is_the_dense_matrix(name, inducing, fill):
    _, _, _, sparse, dense = both(name, 3, inducing=inducing, fill=fill)
    operator, matrix = sparse().lazy_covariance_matrix, dense().covariance_matrix
    vector = torch.randn(15, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    torch.testing.assert_close(operator @ vector, matrix @ vector)
    torch.testing.assert_close(operator.to_dense(), matrix)


def test_inducing_inputs_with_coupled_sites_are_refused():
    likelihood, _, y, sparse, _ = both("multinomial", 4, inducing=3)
    with pytest.raises(NotImplementedError, match="inducing_inputs"):
        RULES["laplace"].infer(sparse(), likelihood, y)
