r"""A Gaussian prior by nearest neighbours: each value depends on a few of those before it [Vecchia 1988].

    p(f) = prod_i N(f_i | mu_i + a_i'(f_N(i) - mu_N(i)), d_i),    a_i = K_NN^-1 k_Ni,    d_i = k_ii - k_iN a_i
    K~^-1 = B' D^-1 B,    B = I - A,    log|K~| = sum_i log d_i

Of all Gaussian densities with this sparsity it has the smallest Kullback-Leibler divergence from N(mu, K). With all
values before each as neighbours it is exact. With inducing inputs it is the prior of what they leave,

    f = mu + Phi z + r,    z ~ N(0, I),    r by neighbours with K - Phi Phi' in place of K        [Gyger et al. 2025]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from gpext.linalg.dissection import Dissection
from gpext.linalg.neighbours import previous_neighbours
from gpext.linalg.regions import regions

Nearest = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Indices of points (n,), an order of these (n,), a datum at each of all points (P,) -> neighbours of points (n, m)."""


@dataclass(frozen=True)
class NeighbourGraph:
    """The neighbours of P points, and the point of each of N data; data at equal inputs share one."""

    points: Tensor  # in a space where near points are strongly correlated (P, d)
    rows: Tensor  # each point and its neighbours (P, E); places that are not used repeat the point
    order: Tensor  # of the points (P,)
    first: Tensor  # a datum at each point (P,)
    point: Tensor  # of each datum (N,)
    region: Tensor  # the number from 0 of the region of each point (P,), whose points have no neighbours elsewhere

    @classmethod
    def of(
        cls,
        inputs: Tensor,
        number: int,
        order: Tensor,
        region_size: int | None = None,
        nearest: Nearest | None = None,
    ) -> NeighbourGraph:
        """Return the graph of data at inputs.

        Args:
            inputs: (N, d), in a space where near inputs are strongly correlated.
            number: of neighbours of a point.
            order: of the data (N,), of which a point takes its first.
            region_size: the largest number of points of a region; None for one region.
            nearest: returns the neighbours of points; None for the nearest in this space.
        """
        points, point = inputs.detach().unique(dim=0, return_inverse=True)
        rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        earliest = torch.full_like(order[: len(points)], len(order)).scatter_reduce_(0, point, rank, "amin")
        sequence = earliest.argsort()
        own, first = torch.arange(len(points), device=order.device), order[earliest]
        rows = own.unsqueeze(-1).repeat(1, 1 + min(number, len(points) - 1))
        region = torch.zeros_like(own)
        size = len(points) if region_size is None else region_size
        for i, part in enumerate(regions(points, points[:0], size)):
            index = part.points
            inside = earliest[index].argsort()
            if nearest is None:
                near = index[previous_neighbours(points[index], inside, number)]
            else:
                near = nearest(index, inside, first)
            rows[index, 1 : 1 + near.size(-1)], region[index] = near, i
        return cls(points, rows, sequence, first, point, region)

    @cached_property
    def dissection(self) -> Dissection:
        """The tree of one latent value a point."""
        return Dissection.of(self.points, self.rows, region=self.region)

    def joint_dissection(self, latents: int) -> Dissection:
        """Return the tree of D latent values a point, coupled there: value d of point p has the index d P + p."""
        if latents not in self._joint:
            size = len(self.points)
            shift = size * torch.arange(latents, device=self.rows.device)
            rows = (self.rows + shift.view(-1, 1, 1)).flatten(0, 1)
            groups = torch.arange(size, device=self.rows.device).unsqueeze(-1) + shift
            self._joint[latents] = Dissection.of(
                self.points.repeat(latents, 1), rows, groups, region=self.region.repeat(latents)
            )
        return self._joint[latents]

    @cached_property
    def _joint(self) -> dict[int, Dissection]:
        return {}

    @property
    def is_neighbour(self) -> Tensor:
        """Whether each place of `rows` holds a neighbour (P, E - 1)."""
        return self.rows[:, 1:] != self.rows[:, :1]

    @cached_property
    def generations(self) -> tuple[Tensor, ...]:
        """The points in groups: the neighbours of a group are in groups before it."""
        rows, order = self.rows[:, 1:].cpu(), self.order.tolist()
        before = rows.tolist()
        age = [0] * len(order)
        for i in order:
            age[i] = 1 + max((age[j] for j in before[i] if j != i), default=0)
        by_age = torch.tensor(age, device="cpu")
        groups = by_age.argsort(stable=True)
        sizes = torch.bincount(by_age)[1:].tolist()
        return tuple(group.to(self.rows.device) for group in groups.split(sizes))

    def sum_over_data(self, values: Tensor) -> Tensor:
        """Return the sums (..., P) over the data at each point of values (..., N)."""
        return values.new_zeros(*values.shape[:-1], len(self.rows)).index_add_(-1, self.point, values)


@dataclass(frozen=True)
class LocalRegressions:
    """a_i, d_i of every point, float64."""

    graph: NeighbourGraph
    weights: Tensor  # the rows of B (..., P, E), 1 for the point itself
    variance: Tensor  # d (..., P)
    chol: Tensor  # of K_NN (..., P, E - 1, E - 1), of one where there is no neighbour
    positive: Tensor  # whether every d_i is (), bool

    @classmethod
    def of(cls, graph: NeighbourGraph, blocks: Tensor) -> LocalRegressions:
        """Return them, given the covariances of each point and its neighbours (..., P, E, E)."""
        among, missing = blocks[..., 1:, 1:].clone(), ~graph.is_neighbour
        across = blocks[..., 1:, 0].masked_fill(missing, 0.0)
        among.masked_fill_(missing.unsqueeze(-1) | missing.unsqueeze(-2), 0.0)
        among.diagonal(dim1=-2, dim2=-1).masked_fill_(missing, 1.0)
        chol, info = torch.linalg.cholesky_ex(among)
        a, variance = regress(chol, across, blocks[..., 0, 0])
        positive = (info == 0).all() & (variance > 0).all()
        return cls(graph, torch.cat([torch.ones_like(variance).unsqueeze(-1), -a], -1), variance, chol, positive)

    def residual(self, f: Tensor) -> Tensor:
        """Return B f (..., P)."""
        return (self.weights * f[..., self.graph.rows]).sum(-1)

    @cached_property
    def precision_diagonal(self) -> Tensor:
        """The diagonal of K~^-1 (..., P)."""
        return self.sum_over_rows(self.weights.square() / self.variance.unsqueeze(-1))

    def precision_times(self, vector: Tensor) -> Tensor:
        """Return K~^-1 vector (..., P)."""
        return self.sum_over_rows(self.weights * (self.residual(vector) / self.variance).unsqueeze(-1))

    def sum_over_rows(self, entries: Tensor) -> Tensor:
        """Return the sums (..., P) over the entries (..., P, E) of all rows that belong to each point."""
        flat = self.graph.rows.flatten()
        return entries.new_zeros(entries.shape[:-1]).index_add_(-1, flat, entries.flatten(-2))

    def covariance_times(self, vector: Tensor) -> Tensor:
        """Return K~ vector = B^-1 D B^-T vector (..., P)."""
        x, rows = self._spread(vector), self.graph.rows
        for group in reversed(self.graph.generations):
            moved = (self.weights[..., group, 1:] * x[..., group].unsqueeze(-1)).flatten(-2)
            x.index_add_(-1, rows[group, 1:].flatten(), -moved)
        return self.half_times(x * self.variance.sqrt())

    def half_times(self, normal: Tensor) -> Tensor:
        """Return B^-1 D^(1/2) normal (..., P): of standard normal numbers, draws from N(0, K~)."""
        x, rows = self._spread(normal * self.variance.sqrt()), self.graph.rows
        for group in self.graph.generations:
            x[..., group] -= (self.weights[..., group, 1:] * x[..., rows[group, 1:]]).sum(-1)
        return x

    def _spread(self, vector: Tensor) -> Tensor:
        return vector.expand(*torch.broadcast_shapes(vector.shape, self.variance.shape)).clone()

    def by_covariance(self, product: Tensor) -> Tensor:
        r"""Return the derivative of :math:`-\sum_i (\log d_i + b_i' S_i b_i / d_i) / 2` in the blocks (..., P, E, E).

        Args:
            product: S_i b_i (..., P, E).
        """
        b, d = self.weights, self.variance
        by_variance = 0.5 * ((product * b).sum(-1) / d - 1) / d
        by_weights = torch.where(self.graph.is_neighbour, product[..., 1:], 0.0) / d.unsqueeze(-1)
        half = 0.5 * by_variance.unsqueeze(-1) * b
        half[..., 1:] += 0.5 * torch.cholesky_solve(by_weights.unsqueeze(-1), self.chol).squeeze(-1)
        outer = half.unsqueeze(-1) * b.unsqueeze(-2)
        return outer + outer.mT


def regress(chol: Tensor, across: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Return a = K_NN^-1 k_N (..., E) and d = k - k_N' a (...), of values given their neighbours; differentiable.

    Args:
        chol: the Cholesky factors of K_NN (..., E, E).
        across: k_N (..., E).
        own: the variances k (...).
    """
    reduced = torch.linalg.solve_triangular(chol, across.unsqueeze(-1), upper=False)
    a = torch.linalg.solve_triangular(chol.mT, reduced, upper=True).squeeze(-1)
    return a, own - reduced.squeeze(-1).square().sum(-1)


class NeighbourLinearOperator(LinearOperator):
    """K~ + Phi Phi' (..., N, N) of N data.

    Args:
        blocks: the covariances of each point and its neighbours, less Phi Phi' (..., P, E, E).
        root: Phi at the points (..., P, M); None for none.
        graph: the neighbours.
    """

    def __init__(self, blocks: Tensor, root: Tensor | None = None, *, graph: NeighbourGraph) -> None:
        root = blocks.new_zeros(*blocks.shape[:-2], 0) if root is None else root
        super().__init__(blocks, root, graph=graph)
        self.blocks, self.root, self.graph = blocks, root, graph

    @cached_property
    def regressions(self) -> LocalRegressions:
        """The regression of each value on its neighbours', outside the graph of autograd."""
        return LocalRegressions.of(self.graph, self.blocks.detach().double())

    def _size(self) -> torch.Size:
        return torch.Size((*self.blocks.shape[:-3], len(self.graph.point), len(self.graph.point)))

    def _transpose_nonbatch(self) -> NeighbourLinearOperator:
        return self

    def _matmul(self, rhs: Tensor) -> Tensor:
        columns = rhs.unsqueeze(-1) if rhs.dim() == 1 else rhs
        sums = self.graph.sum_over_data(columns.double().mT)  # (..., R, P)
        sums = sums.expand(*torch.broadcast_shapes(sums.shape[:-2], self.batch_shape), *sums.shape[-2:])
        found = self.regressions.covariance_times(sums.movedim(-2, 0)).movedim(0, -2)  # a column at a time
        root = self.root.detach().double()
        found = (found + sums @ root @ root.mT)[..., self.graph.point].mT.to(rhs)
        return found.squeeze(-1) if rhs.dim() == 1 else found

    def _diagonal(self) -> Tensor:
        return (self.blocks[..., 0, 0] + self.root.square().sum(-1))[..., self.graph.point]

    def _expand_batch(self, batch_shape: torch.Size) -> NeighbourLinearOperator:
        blocks, root = (t.expand(*batch_shape, *t.shape[-k:]) for t, k in ((self.blocks, 3), (self.root, 2)))
        return NeighbourLinearOperator(blocks, root, graph=self.graph)
