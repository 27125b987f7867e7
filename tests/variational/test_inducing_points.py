"""Choices of inducing points, against the quantisation error and the pivots of a Cholesky factor."""

import gpytorch
import pytest
import torch

from gpext.variational import greedy_inducing_points, kmeans_inducing_points

F64 = torch.float64


def inputs(n=300, d=2, seed=0):
    return torch.randn(n, d, dtype=F64, generator=torch.Generator().manual_seed(seed))


def loader(x, size=37):
    return [(part, torch.zeros(len(part))) for part in x.split(size)]


def are_inputs(points, x):
    return bool((points.unsqueeze(1) == x).all(-1).any(-1).all())


def test_centres_are_as_many_as_asked_and_depend_on_the_seed_alone():
    x = inputs()
    first, again, other = (kmeans_inducing_points(x, 20, seed=s) for s in (0, 0, 1))
    assert first.shape == (20, 2)
    assert first.dtype == F64
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_seeds_without_iterations_are_inputs():
    x = inputs()
    seeds = kmeans_inducing_points(x, 20, num_iterations=0)
    assert are_inputs(seeds, x)


def test_lloyd_iterations_lower_the_quantisation_error():
    x = inputs()
    errors = [torch.cdist(kmeans_inducing_points(x, 20, num_iterations=k), x).amin(0).square().sum() for k in (0, 20)]
    assert errors[1] < errors[0]


def test_greedy_points_are_pivots_of_the_cholesky_factor():
    x = torch.unique(inputs(60), dim=0)
    kernel = gpytorch.kernels.RBFKernel().to(F64)
    chosen = greedy_inducing_points(x, 10, kernel)
    with torch.no_grad():
        covariance = kernel(x).to_dense()
        rest = covariance.clone()
        for point in chosen:  # plain conditioning, one point at a time
            variance = rest.diagonal()
            pivot = int((x == point).all(-1).nonzero()[0])
            assert float(variance[pivot]) == pytest.approx(float(variance.max()), rel=1e-9)
            rest = rest - rest[:, pivot : pivot + 1] @ rest[pivot : pivot + 1] / rest[pivot, pivot]


def test_greedy_stops_with_a_warning_when_nothing_is_left_to_explain():
    x = torch.linspace(0, 1e-3, 40, dtype=F64).unsqueeze(-1)
    with pytest.warns(UserWarning, match="already explain the prior"):
        points = greedy_inducing_points(x, 30, gpytorch.kernels.RBFKernel().to(F64))
    assert 1 <= len(points) < 30


@pytest.mark.parametrize("max_points", [1000, 50])
def test_a_loader_serves_as_well_as_a_tensor(max_points):
    x = inputs()
    points = kmeans_inducing_points(loader(x), 20, num_iterations=0, max_points=max_points)
    assert points.shape == (20, 2)
    assert are_inputs(points, x)


def test_the_sample_of_a_loader_is_uniform():
    # Each of 200 inputs is kept with probability 1/4; the first half as often as the second: |z| < 4.5.
    x = torch.arange(200, dtype=F64).unsqueeze(-1)
    early = total = 0
    for seed in range(40):
        kept = kmeans_inducing_points(loader(x), 50, num_iterations=0, max_points=50, seed=seed)
        early, total = early + int((kept < 100).sum()), total + len(kept)
    z = (early - total / 2) / (total / 4 * (150 / 199)) ** 0.5
    assert abs(z) < 4.5


def test_too_few_distinct_inputs_are_an_error_that_says_how_many_there_are():
    x = torch.ones(30, 2)
    x[:3] = torch.eye(3)[:, :2]
    with pytest.raises(ValueError, match="got 4"):
        kmeans_inducing_points(x, 5)
    with pytest.raises(ValueError, match=r"index \(2, 0\)"):
        kmeans_inducing_points(torch.tensor([[0.0], [1.0], [torch.nan]]), 2)
    with pytest.raises(ValueError, match="no batch"):
        kmeans_inducing_points([], 2)


def test_inputs_that_are_no_tensors():
    with pytest.raises(TypeError, match=r"inputs must be a torch\.Tensor; got float"):
        kmeans_inducing_points([[0.0], [1.0]], 2)
