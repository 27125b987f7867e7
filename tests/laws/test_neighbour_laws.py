"""Nearest-neighbour priors under every pair of a rule and a likelihood, against the same prior as a dense matrix."""

import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator import to_linear_operator

from gpext.linalg import dissection
from gpext.operators.neighbour_covariance import NeighbourGraph, NeighbourLinearOperator
from tests.latent_cases import CASES, PAIRS, RULES
from tests.members import F64

pytestmark = pytest.mark.filterwarnings("ignore::gpext.inference.DenseBlocksWarning")


@pytest.fixture(autouse=True)
def small_leaves(monkeypatch):
    """So that few data make a tree."""
    monkeypatch.setattr(dissection, "_LEAF", 4)


def graph_of(x, number):
    """Neighbours among x, in a random order."""
    return NeighbourGraph.of(x, number, torch.randperm(len(x), generator=torch.Generator().manual_seed(1)))


def neighbour_covariance(K, graph):
    """K~ (..., N, N) by its definition: inverses of dense blocks, one value after the other; differentiable."""
    K = K[..., graph.first, :][..., graph.first]
    size = K.size(-1)
    B = torch.eye(size, dtype=F64).expand(K.shape).clone()
    variances = []
    for i in range(size):
        near = [j for j in graph.rows[i, 1:].tolist() if j != i]
        a = torch.linalg.solve(K[..., near, :][..., near], K[..., near, i].unsqueeze(-1)).squeeze(-1)
        B[..., i, near] = -a
        variances.append(K[..., i, i] - (a * K[..., near, i]).sum(-1))
    root = torch.linalg.solve(B, torch.diag_embed(torch.stack(variances, -1).sqrt()))
    return (root @ root.mT)[..., graph.point, :][..., graph.point]


def both(name, number, n=15):
    """A likelihood, targets, and functions that return the prior by neighbours and the same as a dense one."""
    likelihood, prior, y = CASES[name].problem(n)
    graph = graph_of(prior.x, number)

    def sparse():
        p = prior()
        blocks = p.covariance_matrix[..., graph.first, :][..., graph.first]
        blocks = blocks[..., graph.rows.unsqueeze(-1), graph.rows.unsqueeze(-2)]
        return MultivariateNormal(p.mean, NeighbourLinearOperator(blocks, graph=graph))

    def dense():
        p = prior()
        return MultivariateNormal(p.mean, to_linear_operator(neighbour_covariance(p.covariance_matrix, graph)))

    return likelihood, prior, y, sparse, dense


@pytest.mark.parametrize(("name", "rule"), PAIRS)
def test_the_result_is_that_of_the_dense_matrix(name, rule):
    likelihood, prior, y, sparse, dense = both(name, 4)
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
