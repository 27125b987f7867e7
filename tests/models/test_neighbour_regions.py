"""LatentGP with neighbours within regions: independent regions, but for what inducing inputs explain."""

import copy

import pytest
import torch

from gpext.inference import EP, KL, Laplace
from gpext.likelihoods import BernoulliLogitLikelihood, MultinomialLogitLikelihood, PoissonLikelihood
from gpext.variational import neighbour_choice
from gpext.variational.neighbour_choice import NeighbourChoice
from tests.members import F64
from tests.models.test_neighbours import Model, N, data

SIZE = 12


def regions_of(model):
    """The indices of the data of each region."""
    model.variational_strategy.choose_neighbours()
    graph = model.variational_strategy.neighbours.graph(model.variational_strategy.inducing_points)
    region = graph.region[graph.point]
    return [(region == i).nonzero().squeeze(-1) for i in range(int(region.max()) + 1)]


@pytest.mark.parametrize(
    ("make", "kind", "rule"),
    [
        (PoissonLikelihood, "count", Laplace()),
        (BernoulliLogitLikelihood, "binary", EP()),
        (BernoulliLogitLikelihood, "binary", KL()),
        (lambda: MultinomialLogitLikelihood(3), "class", Laplace()),
    ],
)
def test_without_inducing_inputs_regions_are_models_of_their_own(make, kind, rule):
    x, y, _ = data(kind)
    likelihood = make()
    model = Model(x, y, likelihood, rule, neighbours=N - 1, region_size=SIZE)
    parts = regions_of(model)
    assert len(parts) > 2
    assert sum(len(index) for index in parts) == N
    assert max(len(x[index].unique(dim=0)) for index in parts) <= SIZE
    exact = [Model(x[index], y[index], likelihood, rule) for index in parts]
    evidence = sum(part.result.log_evidence for part in exact)
    torch.testing.assert_close(model.result.log_evidence, evidence, rtol=1e-8, atol=1e-8)
    mean = model.result.posterior.mean
    for index, part in zip(parts, exact, strict=True):
        torch.testing.assert_close(mean[index], part.result.posterior.mean, rtol=1e-6, atol=1e-6)


def test_with_inducing_inputs_what_they_leave_is_independent_between_regions():
    x, y, new = data("count")
    options = {"neighbours": N - 1, "inducing_inputs": new}
    model = Model(x, y, PoissonLikelihood(), Laplace(), region_size=SIZE, **options).train()
    whole = Model(x, y, PoissonLikelihood(), Laplace(), **options).train()
    with torch.no_grad():
        found = model(x).lazy_covariance_matrix
        rest = whole(x).lazy_covariance_matrix.to_dense()
        explained = (found.root @ found.root.mT)[found.graph.point][:, found.graph.point]
    expected = explained.clone()
    for index in regions_of(model):
        expected[index.unsqueeze(-1), index] = rest[index.unsqueeze(-1), index]
    torch.testing.assert_close(found.to_dense(), expected, rtol=1e-8, atol=1e-8)


def test_by_default_regions_are_where_the_whole_would_be_dense(monkeypatch):
    monkeypatch.setattr(neighbour_choice, "_REGION", 100)

    def count(columns, neighbours, size=500):
        x = torch.rand(size, columns, generator=torch.Generator().manual_seed(0), dtype=F64)
        choice = NeighbourChoice(neighbours, columns)
        choice.scale = torch.ones(columns, dtype=F64)
        return int(choice.graph(x).region.max()) + 1

    assert count(1, 5) == 1
    assert count(8, 5) > 4
    assert count(8, 100) == 1  # more neighbours than a region has
    assert count(8, 5, size=140) == 1  # a factor of it all is not much dearer


def test_the_default_is_one_region_where_the_dense_factor_is_cheap():
    x, y, _ = data("count")
    model = Model(x, y, PoissonLikelihood(), Laplace(), neighbours=N - 1)
    assert len(regions_of(model)) == 1


def test_copies_have_the_same_regions():
    x, y, new = data("count")
    model = Model(x, y, PoissonLikelihood(), Laplace(), neighbours=5, region_size=SIZE).eval()
    expected = model(new)
    for copied in (copy.deepcopy(model), Model(x, y, PoissonLikelihood(), Laplace(), neighbours=5, region_size=SIZE)):
        torch.testing.assert_close(copied.eval()(new).mean, expected.mean)


def test_bad_sizes():
    x, y, _ = data("count")
    with pytest.raises(ValueError, match="region_size"):
        Model(x, y, PoissonLikelihood(), Laplace(), neighbours=5, region_size=0)
    with pytest.raises(TypeError, match="region_size must be a whole number, None or 'auto'"):
        Model(x, y, PoissonLikelihood(), Laplace(), neighbours=5, region_size="whole")
