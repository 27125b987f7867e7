r"""A Gaussian prior by nearest neighbours: each value depends on a few of those before it [Vecchia 1988].

    p(f) = prod_i N(f_i | mu_i + a_i'(f_N(i) - mu_N(i)), d_i),    a_i = K_NN^-1 k_Ni,    d_i = k_ii - k_iN a_i
    K~^-1 = B' D^-1 B,    B = I - A,    log|K~| = sum_i log d_i

Of all Gaussian densities with this sparsity it has the smallest Kullback-Leibler divergence from N(mu, K). With all
values before each as neighbours it is exact. With inducing inputs it is the prior of what they leave,

    f = mu + Phi z + r,    z ~ N(0, I),    r by neighbours with K - Phi Phi' in place of K        [Gyger et al. 2025]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from gpext.linalg.dissection import Dissection
from gpext.linalg.gathered import gathered_gram, gathered_times
from gpext.linalg.neighbours import previous_neighbours
from gpext.linalg.products import times
from gpext.linalg.regions import regions
from gpext.linalg.sparse_factor import SparseFactor, entries_at, factorise_sparse

Nearest = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Indices of points (n,), an order of these (n,), a datum at each of all points (P,) -> neighbours of points (n, m)."""

Evaluate = Callable[[Tensor, int | None], Tensor]
"""Groups of inputs (G, E, d), a number s -> covariances (..., G, s, E) of the first s of each, of all for None."""

Products = Any
"""Entries of V K~^-1, of a covariance V, as many and in such an order as suit the :class:`Regressions`."""


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

    block_dims = 3
    """Of the covariances that a prior is made from, beside those of a batch: (P, E, E)."""

    def covariances(self, points: Tensor, root: Tensor, evaluate: Evaluate) -> Tensor:
        """Return the covariances of each point and its neighbours (..., P, E, E), less what a root explains.

        Args:
            points: inputs (P, d).
            root: Phi (..., P, M).
            evaluate: returns covariances (..., G, E, E) of groups of inputs (G, E, d).
        """
        return less_explained(evaluate(points[self.rows], None), root, self.rows)

    def variances(self, blocks: Tensor) -> Tensor:
        """Return the variances of points (..., P) among their covariances."""
        return blocks[..., 0, 0]

    def padded(self, blocks: Tensor, jitter: float) -> Tensor:
        """Return covariances with the jitter added to the variances."""
        return blocks + jitter * torch.eye(blocks.size(-1), dtype=blocks.dtype, device=blocks.device)

    def regress(self, blocks: Tensor) -> Regressions:
        """Return the regressions of values, float64, given their covariances."""
        return LocalRegressions.of(self, blocks)


class Regressions(ABC):
    """The regression of values on those that they depend on, float64: K~^-1 = W' W with W = D^(-1/2) B."""

    graph: NeighbourGraph
    variance: Tensor  # of each value, given those that it depends on (..., P); their product is the determinant of K~
    positive: Tensor  # whether every one is (), bool

    @classmethod
    @abstractmethod
    def stack(cls, parts: Sequence[Any]) -> Any:
        """Return a batch of regressions with the same graph, the first dimension."""

    @abstractmethod
    def whitened(self, columns: Tensor) -> Tensor:
        """Return W columns (..., P, R)."""

    @abstractmethod
    def precision_times(self, vector: Tensor) -> Tensor:
        """Return K~^-1 vector (..., P)."""

    @property
    @abstractmethod
    def precision_diagonal(self) -> Tensor:
        """The diagonal of K~^-1 (..., P)."""

    @abstractmethod
    def covariance_times(self, vector: Tensor) -> Tensor:
        """Return K~ vector (..., P)."""

    @abstractmethod
    def half_times(self, normal: Tensor) -> Tensor:
        """Return W^-1 normal (..., P): of standard normal numbers, draws from N(0, K~)."""

    @abstractmethod
    def factorise(self, diagonal: Tensor) -> SparseFactor:
        """Return a factor of Q = K~^-1 + diag(diagonal), given (..., P)."""

    @abstractmethod
    def factorise_joint(self, blocks: Tensor) -> SparseFactor:
        """Return a factor of D latents' Q = blockdiag_d(K~_d^-1) + blocks, given (..., P, D, D), of any signs.

        Value d of point p has the index d P + p.
        """

    @abstractmethod
    def inverse(self, factor: SparseFactor, diagonal: Tensor) -> tuple[Tensor, Products]:
        """Return the diagonal of Q^-1 (..., P), and its products, given what was factorised."""

    @abstractmethod
    def inverse_joint(self, factor: SparseFactor, blocks: Tensor) -> tuple[Tensor, Products]:
        """Return the covariances of D latents of each point (..., D, D, P), and the products of each latent's Q^-1.

        Given what was factorised.
        """

    @abstractmethod
    def plus(self, products: Products, left: Tensor, right: Tensor) -> Products:
        """Return the products of V + left right', given (..., P, R) each, of a few columns."""

    @abstractmethod
    def plus_gram(self, products: Products, root: Tensor) -> Products:
        """Return the products of V + root root', given (..., P, M)."""

    @abstractmethod
    def share(self, products: Products) -> Tensor:
        """Return the diagonal of V K~^-1 (..., P)."""

    @abstractmethod
    def by_covariance(self, products: Products) -> Tensor:
        r"""Return the derivative of :math:`-(\log|K~| + \mathrm{tr}(K~^{-1} V)) / 2` in the graph's covariances."""


@dataclass(frozen=True)
class LocalRegressions(Regressions):
    """a_i, d_i of every point, float64. Products are V b_i, their entries at i and its neighbours (..., P, E)."""

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

    @classmethod
    def stack(cls, parts: Sequence[LocalRegressions]) -> LocalRegressions:
        """See :meth:`Regressions.stack`."""
        weights, variance, chol = (
            torch.stack([getattr(part, name) for part in parts]) for name in ("weights", "variance", "chol")
        )
        return cls(parts[0].graph, weights, variance, chol, torch.stack([part.positive for part in parts]).all())

    def residual(self, f: Tensor) -> Tensor:
        """Return B f (..., P)."""
        return (self.weights * f[..., self.graph.rows]).sum(-1)

    def whitened(self, columns: Tensor) -> Tensor:
        """See :meth:`Regressions.whitened`."""
        each = zip(self.weights.unbind(-1), self.graph.rows.unbind(-1), strict=True)
        moved = sum(b.unsqueeze(-1) * columns[..., near, :] for b, near in each)
        return moved / self.variance.sqrt().unsqueeze(-1)

    @cached_property
    def precision_diagonal(self) -> Tensor:
        """The diagonal of K~^-1 (..., P)."""
        return self._sum_over_rows(self.weights.square() / self.variance.unsqueeze(-1))

    def precision_times(self, vector: Tensor) -> Tensor:
        """See :meth:`Regressions.precision_times`."""
        return self._sum_over_rows(self.weights * (self.residual(vector) / self.variance).unsqueeze(-1))

    def _sum_over_rows(self, entries: Tensor) -> Tensor:
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
        """Return B^-1 D^(1/2) normal (..., P); see :meth:`Regressions.half_times`."""
        x, rows = self._spread(normal * self.variance.sqrt()), self.graph.rows
        for group in self.graph.generations:
            x[..., group] -= (self.weights[..., group, 1:] * x[..., rows[group, 1:]]).sum(-1)
        return x

    def _spread(self, vector: Tensor) -> Tensor:
        return vector.expand(*torch.broadcast_shapes(vector.shape, self.variance.shape)).clone()

    def factorise(self, diagonal: Tensor) -> SparseFactor:
        """See :meth:`Regressions.factorise`."""
        return factorise_sparse(self.graph.dissection, self.weights, 1 / self.variance, diagonal)

    def factorise_joint(self, blocks: Tensor) -> SparseFactor:
        """See :meth:`Regressions.factorise_joint`."""
        latents = blocks.size(-1)
        batch = torch.broadcast_shapes(blocks.shape[:-3], self.weights.shape[:-3])
        weights = self.weights.expand(*batch, latents, *self.weights.shape[-2:]).flatten(-3, -2)
        scale = (1 / self.variance).expand(*batch, latents, self.variance.size(-1)).flatten(-2)
        return factorise_sparse(self.graph.joint_dissection(latents), weights, scale, blocks=blocks)

    def inverse(self, factor: SparseFactor, diagonal: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Regressions.inverse`."""
        b = self.weights.expand(*factor.positive_definite.shape, *self.weights.shape[-2:])
        size = b.size(-2)
        variance, product = b.new_empty(*b.shape[:-2], size + 1), torch.empty_like(b)  # and one for what batches lack
        for batch, Z in factor.inverse_entries():
            variance[..., batch.own] = Z.diagonal(dim1=-2, dim2=-1)[..., : batch.own.size(-1)]
            part = batch.parts[0]
            near = entries_at(Z, part.front, part.places)
            product[..., part.groups, :] = times(near, b[..., part.groups, :])
        return variance[..., :size], product

    def inverse_joint(self, factor: SparseFactor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Regressions.inverse_joint`."""
        lead, latents, (size, width) = factor.positive_definite.shape, blocks.size(-1), self.weights.shape[-2:]
        b = self.weights.expand(*lead, latents, size, width).flatten(-3, -2)
        found, product = b.new_empty(*lead, size, latents, latents), torch.empty_like(b)
        for batch, Z in factor.inverse_entries():
            rows, points = batch.parts
            near = entries_at(Z, rows.front, rows.places)
            product[..., rows.groups, :] = times(near, b[..., rows.groups, :])
            found[..., points.groups, :, :] = entries_at(Z, points.front, points.places)
        return found.movedim(-3, -1), product.unflatten(-2, (latents, size))

    def plus(self, products: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """See :meth:`Regressions.plus`."""
        for a, c in zip(left.unbind(-1), right.unbind(-1), strict=True):
            products = products + a[..., self.graph.rows] * self.residual(c).unsqueeze(-1)
        return products

    def plus_gram(self, products: Tensor, root: Tensor) -> Tensor:
        """See :meth:`Regressions.plus_gram`."""
        return products + gathered_times(root, self.graph.rows, self.weights)

    def share(self, products: Tensor) -> Tensor:
        """See :meth:`Regressions.share`."""
        return self._sum_over_rows(products * self.weights / self.variance.unsqueeze(-1))

    def by_covariance(self, products: Tensor) -> Tensor:
        """Return the derivative in the blocks (..., P, E, E); see :meth:`Regressions.by_covariance`."""
        b, d = self.weights, self.variance
        by_variance = 0.5 * ((products * b).sum(-1) / d - 1) / d
        by_weights = torch.where(self.graph.is_neighbour, products[..., 1:], 0.0) / d.unsqueeze(-1)
        half = 0.5 * by_variance.unsqueeze(-1) * b
        half[..., 1:] += 0.5 * torch.cholesky_solve(by_weights.unsqueeze(-1), self.chol).squeeze(-1)
        outer = half.unsqueeze(-1) * b.unsqueeze(-2)
        return outer + outer.mT


def less_explained(blocks: Tensor, root: Tensor, rows: Tensor) -> Tensor:
    """Return blocks (..., P, E, E) less what a root (..., N, M) explains at its rows (P, E)."""
    return blocks - gathered_gram(root.double(), rows).to(blocks) if root.size(-1) else blocks


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
        blocks: the covariances that the graph takes, less Phi Phi': of each point and its neighbours (..., P, E, E).
        root: Phi at the points (..., P, M); None for none.
        graph: the neighbours.
    """

    def __init__(self, blocks: Tensor, root: Tensor | None = None, *, graph: NeighbourGraph) -> None:
        if root is None:
            root = blocks.new_zeros(*blocks.shape[: -graph.block_dims], len(graph.points), 0)
        super().__init__(blocks, root, graph=graph)
        self.blocks, self.root, self.graph = blocks, root, graph

    @cached_property
    def regressions(self) -> Regressions:
        """The regression of each value on those that it depends on, outside the graph of autograd."""
        return self.graph.regress(self.blocks.detach().double())

    def _size(self) -> torch.Size:
        size = len(self.graph.point)
        return torch.Size((*self.root.shape[:-2], size, size))

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
        return (self.graph.variances(self.blocks) + self.root.square().sum(-1))[..., self.graph.point]

    def _expand_batch(self, batch_shape: torch.Size) -> NeighbourLinearOperator:
        blocks, root = (
            t.expand(*batch_shape, *t.shape[-k:]) for t, k in ((self.blocks, self.graph.block_dims), (self.root, 2))
        )
        return NeighbourLinearOperator(blocks, root, graph=self.graph)
