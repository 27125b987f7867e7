"""Orderings and nearest previous neighbours, against their definitions."""

import pytest
import torch

from gpext.linalg import neighbours
from gpext.linalg.neighbours import (
    maximin_order,
    nearest_to_each,
    previous_neighbours,
    strongest,
    strongest_before,
)
from tests.members import F64


def points(n, d=2, seed=0):
    return torch.rand(n, d, generator=torch.Generator().manual_seed(seed), dtype=F64)


@pytest.mark.parametrize(("n", "d", "k"), [(1, 2, 3), (2, 1, 3), (7, 2, 20), (300, 2, 7), (200, 5, 3)])
def test_neighbours_are_the_nearest_of_those_before(n, d, k):
    x = points(n, d)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1))
    found = previous_neighbours(x, order, k)
    assert found.shape == (n, min(k, n - 1))
    distance = torch.cdist(x, x)
    for place, i in enumerate(order.tolist()):
        before = order[:place]
        expected = before[distance[i, before].argsort()][:k]
        assert torch.equal(found[i, : len(expected)], expected)
        assert bool((found[i, len(expected) :] == i).all())


def test_each_of_a_maximin_order_is_the_farthest_from_those_before():
    x = points(200)
    order = maximin_order(x, torch.Generator().manual_seed(0))
    assert torch.equal(order.sort().values, torch.arange(200))
    assert int(order[0]) == int((x - x.mean(0)).norm(dim=-1).argmin())
    for place in range(1, 199):
        distance = torch.cdist(x[order[place:]], x[order[:place]]).amin(-1)
        assert float(distance[0]) >= float(distance.max()) - 1e-12


def test_a_large_set_continues_at_random(monkeypatch):
    monkeypatch.setattr(neighbours, "_SPREAD", 50)
    order = maximin_order(points(120), torch.Generator().manual_seed(0))
    assert torch.equal(order.sort().values, torch.arange(120))
    assert torch.equal(order, maximin_order(points(120), torch.Generator().manual_seed(0)))


def test_equal_points_are_last():
    x = torch.cat([points(20), points(20)])
    order = maximin_order(x, torch.Generator().manual_seed(0))
    assert len({*(order[:20] % 20).tolist()}) == 20


@pytest.mark.parametrize(("n", "k"), [(1, 3), (2, 3), (7, 20), (90, 4)])
def test_the_strongest_are_the_nearest_where_strength_falls_with_distance(n, k, monkeypatch):
    monkeypatch.setattr(neighbours, "_ENTRIES", 5 * n)
    x = points(n)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1))
    found = strongest_before(lambda rows, columns: torch.exp(-torch.cdist(x[rows], x[columns])), order, k)
    assert torch.equal(found, previous_neighbours(x, order, k))


def test_the_strongest_of_all(monkeypatch):
    monkeypatch.setattr(neighbours, "_ENTRIES", 100)
    x, every = points(60), torch.arange(60)
    found = strongest(lambda rows, columns: -torch.cdist(x[rows], x[columns]), every[40:], every[:40], 5)
    assert torch.equal(found, torch.cdist(x[40:], x[:40]).argsort(-1)[:, :5])
    assert strongest(lambda rows, columns: torch.cdist(x[rows], x[columns]), every[:0], every, 5).shape == (0, 5)


@pytest.mark.parametrize(("n", "k"), [(1, 3), (2, 3), (7, 20), (90, 4)])
def test_the_nearest_on_all_sides(n, k):
    x = points(n)
    apart = torch.cdist(x, x).fill_diagonal_(torch.inf)
    assert torch.equal(nearest_to_each(x, k), apart.argsort(-1)[:, : min(k, n - 1)])
