r"""A Gaussian prior with the exact covariances of every clique of a filled neighbour graph.

A factor of the posterior's precision by nested dissection fills in: a front of own points o and boundary b is dense.
A prior may have all of these entries at no greater cost of the factor, instead of those of neighbours alone:

    p(f) = prod_fronts N(f_o | mu_o + A (f_b - mu_b), E),    A = K_ob K_bb^-1,    E = K_oo - A K_bo
    K~^-1 = W' W,    W = L_o^-1 [I  -A] of each front,  E = L_o L_o'

The fronts' own and boundary points are the cliques of a triangulated graph, and each boundary is within the clique of
the parent: so K~ is K in every clique, and of all Gaussian densities whose precision has these entries this one has the
smallest Kullback-Leibler divergence from N(mu, K), and the largest entropy [Dempster 1972; Dawid & Lauritzen 1993]. Its
conditioning sets are boundaries, a few hundred points, where nearest neighbours would be a few tens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from gpext.linalg.dissection import Dissection
from gpext.linalg.front_batches import Batch
from gpext.linalg.products import times
from gpext.linalg.sparse_factor import SparseFactor, eliminate, hand_down, parents_of, take_up
from gpext.operators.neighbour_covariance import Evaluate, NeighbourGraph, Regressions


@dataclass(frozen=True)
class CliqueGraph(NeighbourGraph):
    """Neighbours, and what a factor of their precision fills in; the covariances are those of each front's own points.

    They are K_oo and K_ob of one front after the other, (..., T) of all.
    """

    block_dims = 1

    @classmethod
    def fill(cls, graph: NeighbourGraph) -> CliqueGraph:
        """Return the same graph, filled."""
        return cls(graph.points, graph.rows, graph.order, graph.first, graph.point, graph.region)

    def covariances(self, points: Tensor, root: Tensor, evaluate: Evaluate) -> Tensor:
        """Return K_oo and K_ob (..., T), less what a root explains; see :meth:`NeighbourGraph.covariances`."""
        found = []
        for batch in self.dissection.batches:
            clique = _clique(batch).clamp(max=len(points) - 1)  # any, for what is missing
            s = batch.own.size(-1)
            blocks = evaluate(points[clique], s)
            if root.size(-1):
                explained = root[..., clique[:, :s], :] @ root[..., clique, :].mT
                blocks = blocks - explained.to(blocks)
            found.append(blocks.flatten(-3))
        return torch.cat(found, -1)

    def variances(self, blocks: Tensor) -> Tensor:
        """See :meth:`NeighbourGraph.variances`."""
        return blocks[..., self._places]

    def padded(self, blocks: Tensor, jitter: float) -> Tensor:
        """See :meth:`NeighbourGraph.padded`."""
        return blocks + jitter * torch.zeros_like(blocks).index_fill(-1, self._places, 1.0)

    def regress(self, blocks: Tensor) -> CliqueRegressions:
        """See :meth:`NeighbourGraph.regress`."""
        return CliqueRegressions.of(self, blocks)

    def joint_dissection(self, latents: int) -> Dissection:
        """Return the same tree, of D latent values a point; see :meth:`NeighbourGraph.joint_dissection`."""
        if latents not in self._joint:
            self._joint[latents] = self.dissection.repeat(latents)
        return self._joint[latents]

    def cliques(self, blocks: Tensor) -> Iterator[tuple[Batch, Tensor]]:
        """Yield for each batch, from the root to the leaves, the covariances of own and boundary (..., B, S, S).

        Those of points that a front lacks are independent, of variance one.
        """
        batches, lead = self.dissection.batches, blocks.shape[:-1]
        waiting: dict[int, Tensor] = {}  # K_bb of batches to come
        for j, part in reversed(list(enumerate(self._split(blocks)))):
            batch = batches[j]
            (count, s), width = batch.own.shape, part.size(-1)
            K = blocks.new_zeros(*lead, count, batch.size, batch.size)
            K[..., :s, :width] = part
            K[..., s:width, :s] = part[..., s:].mT
            if width > s:
                K[..., s:width, s:width] = waiting.pop(j)
            K = _isolated(K, _clique(batch) == len(self.points))
            hand_down(K, batches, j, waiting)
            yield batch, K

    def _split(self, blocks: Tensor) -> list[Tensor]:
        """Return K_oo and K_ob (..., B, s, s + b) of each batch of fronts."""
        shapes = [(*batch.own.shape, batch.own.size(-1) + batch.boundary.size(-1)) for batch in self.dissection.batches]
        sizes = [count * s * width for count, s, width in shapes]
        return [part.unflatten(-1, shape) for part, shape in zip(blocks.split(sizes, -1), shapes, strict=True)]

    @cached_property
    def _places(self) -> Tensor:
        """The place of each point's variance among the covariances (P,)."""
        device = self.points.device
        places, start = torch.empty(len(self.points) + 1, dtype=torch.long, device=device), 0
        for batch in self.dissection.batches:
            count, s = batch.own.shape
            size = s + batch.boundary.size(-1)
            front = s * size * torch.arange(count, device=device).unsqueeze(-1)
            places[batch.own] = start + front + (size + 1) * torch.arange(s, device=device)
            start += count * s * size
        return places[:-1]


@dataclass(frozen=True)
class CliqueRegressions(Regressions):
    """W of every batch of fronts, float64. Products are W V of each, at its own and boundary (..., B, s, s + b)."""

    graph: CliqueGraph
    blocks: Tensor  # the covariances of the graph (..., T)
    rows: tuple[Tensor, ...]  # of W (..., B, s, s + b), zero where a front lacks a point
    variance: Tensor  # the squared diagonals of L_o (..., P)
    positive: Tensor  # whether every K_bb and E is (), bool

    @classmethod
    def of(cls, graph: CliqueGraph, blocks: Tensor) -> CliqueRegressions:
        """Return them, given the covariances of the graph (..., T)."""
        size = len(graph.points)
        rows: list[Tensor] = []
        positive = torch.ones((), dtype=torch.bool, device=blocks.device)
        variance = blocks.new_ones(*blocks.shape[:-1], size + 1)
        for batch, K in graph.cliques(blocks):
            s, width = batch.own.size(-1), batch.own.size(-1) + batch.boundary.size(-1)
            L_b, fails = torch.linalg.cholesky_ex(K[..., s:width, s:width])
            X = torch.linalg.solve_triangular(L_b, K[..., s:width, :s], upper=False)
            L_o, fails_too = torch.linalg.cholesky_ex(K[..., :s, :s] - X.mT @ X)
            d = L_o.diagonal(dim1=-2, dim2=-1)
            positive = positive & (fails == 0).all() & (fails_too == 0).all() & (d > 0).all()
            A = torch.linalg.solve_triangular(L_b.mT, X, upper=True).mT
            unit = torch.eye(s, dtype=K.dtype, device=K.device).expand(*A.shape[:-2], s, s)
            W = torch.linalg.solve_triangular(L_o, torch.cat([unit, -A], -1), upper=False)
            rows.append(W * (batch.own < size).unsqueeze(-1))
            variance[..., batch.own] = d.square()
        return cls(graph, blocks, tuple(reversed(rows)), variance[..., :size], positive)

    @classmethod
    def stack(cls, parts: Sequence[CliqueRegressions]) -> CliqueRegressions:
        """See :meth:`Regressions.stack`."""
        rows = tuple(torch.stack(each) for each in zip(*(part.rows for part in parts), strict=True))
        blocks, variance = (torch.stack([getattr(part, name) for part in parts]) for name in ("blocks", "variance"))
        return cls(parts[0].graph, blocks, rows, variance, torch.stack([part.positive for part in parts]).all())

    def whitened(self, columns: Tensor) -> Tensor:
        """See :meth:`Regressions.whitened`."""
        x = pad(columns, (0, 0, 0, 1))
        found = x.new_empty(*torch.broadcast_shapes(x.shape[:-2], self.variance.shape[:-1]), *x.shape[-2:])
        for batch, W in self._batches:
            found[..., batch.own, :] = W @ x[..., _clique(batch), :]
        return found[..., :-1, :]

    def precision_times(self, vector: Tensor) -> Tensor:
        """See :meth:`Regressions.precision_times`."""
        x = pad(vector, (0, 1))
        found = x.new_zeros(*torch.broadcast_shapes(x.shape[:-1], self.variance.shape[:-1]), x.size(-1))
        for batch, W in self._batches:
            clique = _clique(batch)
            moved = times(W.mT, times(W, x[..., clique]))
            found.index_add_(-1, clique.flatten(), moved.flatten(-2))
        return found[..., :-1]

    @cached_property
    def precision_diagonal(self) -> Tensor:
        """The diagonal of K~^-1 (..., P)."""
        return self._sums(W.square().sum(-2) for _, W in self._batches)

    def covariance_times(self, vector: Tensor) -> Tensor:
        """Return K~ vector = W^-1 W^-T vector (..., P)."""
        x = self._spread(vector)
        for batch, W in self._batches:
            s, b = batch.own.size(-1), batch.boundary.size(-1)
            own, lower = x[..., batch.own].unsqueeze(-1), self._own(batch, W)
            whitened = torch.linalg.solve_triangular(lower.mT, own, upper=True)
            x[..., batch.own] = whitened.squeeze(-1)
            if b:
                moved = (W[..., s:].mT @ whitened).flatten(-3)
                x.index_add_(-1, batch.boundary.flatten(), moved, alpha=-1)
        return self.half_times(x[..., :-1])

    def half_times(self, normal: Tensor) -> Tensor:
        """See :meth:`Regressions.half_times`."""
        x = self._spread(normal)
        for batch, W in reversed(self._batches):
            s = batch.own.size(-1)
            right = x[..., batch.own] - times(W[..., s:], x[..., batch.boundary])
            found = torch.linalg.solve_triangular(self._own(batch, W), right.unsqueeze(-1), upper=False)
            x[..., batch.own] = found.squeeze(-1)
        return x[..., :-1]

    def factorise(self, diagonal: Tensor) -> SparseFactor:
        """See :meth:`Regressions.factorise`."""
        tree = self.graph.dissection
        added = pad(diagonal, (0, 1), value=1.0)  # 1 for what is missing
        lead = torch.broadcast_shapes(diagonal.shape[:-1], self.variance.shape[:-1])

        def parts(j: int) -> Tensor:
            batch, W = tree.batches[j], self.rows[j]
            F = (W.mT @ W).expand(*lead, -1, -1, -1)
            missing = batch.size - W.size(-1)
            F = pad(F, (0, missing, 0, missing)) if missing else F.contiguous()
            F.diagonal(dim1=-2, dim2=-1)[..., : batch.own.size(-1)].add_(added[..., batch.own])
            return F

        return eliminate(tree, self._ones(lead), parts)

    def factorise_joint(self, blocks: Tensor) -> SparseFactor:
        """See :meth:`Regressions.factorise_joint`."""
        latents = blocks.size(-1)
        tree = self.graph.joint_dissection(latents)
        unit = torch.eye(latents, dtype=blocks.dtype, device=blocks.device).expand(*blocks.shape[:-3], 1, -1, -1)
        added = torch.cat([blocks, unit], -3)
        lead = torch.broadcast_shapes(blocks.shape[:-3], self.variance.shape[:-2])

        def parts(j: int) -> Tensor:
            batch, W, own = tree.batches[j], self.rows[j], self.graph.dissection.batches[j].own
            F = added.new_zeros(*lead, len(own), batch.size, batch.size)
            precision = W.mT @ W
            precision = precision.expand(*precision.shape[:-4], latents, *precision.shape[-3:])
            for d in range(latents):
                _of_latent(F, d, latents, W.size(-1)).add_(precision[..., d, :, :, :])
            _of_points(F, own.size(-1), latents).add_(added[..., own, :, :].movedim(-3, -1))
            return F

        return eliminate(tree, self._ones(lead), parts)

    def inverse(self, factor: SparseFactor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See :meth:`Regressions.inverse`."""
        lead, size = factor.positive_definite.shape, self.variance.size(-1)
        variance, products = self.variance.new_empty(*lead, size + 1), list(self.rows)
        for j, (batch, Z) in zip(reversed(range(len(self.rows))), factor.inverse_entries(), strict=True):
            width = self.rows[j].size(-1)
            variance[..., batch.own] = Z.diagonal(dim1=-2, dim2=-1)[..., : batch.own.size(-1)]
            products[j] = self.rows[j] @ Z[..., :width, :width]
        return variance[..., :size], tuple(products)

    def inverse_joint(self, factor: SparseFactor, latents: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See :meth:`Regressions.inverse_joint`."""
        lead, size = factor.positive_definite.shape, self.variance.size(-1)
        blocks, products = self.variance.new_empty(*lead, latents, latents, size + 1), list(self.rows)
        for j, (_, Z) in zip(reversed(range(len(self.rows))), factor.inverse_entries(), strict=True):
            W, own = self.rows[j], self.graph.dissection.batches[j].own
            each = torch.stack([_of_latent(Z, d, latents, W.size(-1)) for d in range(latents)], -4)
            products[j] = W @ each
            blocks[..., own] = _of_points(Z, own.size(-1), latents).movedim(-4, -2)
        return blocks[..., :size], tuple(products)

    def plus(self, products: tuple[Tensor, ...], left: Tensor, right: Tensor) -> tuple[Tensor, ...]:
        """See :meth:`Regressions.plus`."""
        left, right = pad(left, (0, 0, 0, 1)), pad(right, (0, 0, 0, 1))
        found = []
        for (batch, W), product in zip(self._batches, products, strict=True):
            clique = _clique(batch)
            found.append(product + (W @ right[..., clique, :]) @ left[..., clique, :].mT)
        return tuple(found)

    def plus_gram(self, products: tuple[Tensor, ...], root: Tensor) -> tuple[Tensor, ...]:
        """See :meth:`Regressions.plus_gram`."""
        return self.plus(products, root, root) if root.size(-1) else products

    def share(self, products: tuple[Tensor, ...]) -> Tensor:
        """See :meth:`Regressions.share`."""
        return self._sums((W * product).sum(-2) for (_, W), product in zip(self._batches, products, strict=True))

    def by_covariance(self, products: tuple[Tensor, ...]) -> Tensor:
        """Return the derivative in the graph's covariances (..., T); see :meth:`Regressions.by_covariance`.

        It is W'Y of a front, in the covariances of its clique, where a symmetric matrix does not tell it from Y'W:
        with G = W V W' - I, Y = G W / 2 + [0  (W V)_b K_bb^-1]. That in K_bb belongs to covariances of the parent.
        """
        half: list[Tensor] = []  # Y
        for (_, K), W, product in zip(
            self.graph.cliques(self.blocks), reversed(self.rows), reversed(products), strict=True
        ):
            s, width = W.shape[-2:]
            unit = torch.eye(s, dtype=W.dtype, device=W.device)
            Y = 0.5 * (product @ W.mT - unit) @ W
            if width > s:
                chol = torch.linalg.cholesky(K[..., s:width, s:width])
                Y[..., s:] += torch.cholesky_solve(product[..., s:].mT, chol).mT
            half.append(Y)
        rests: dict[int, Tensor] = {}
        waited_for = parents_of(self.graph.dissection.batches)
        found = []
        for j, (batch, W) in enumerate(self._batches):
            s, width = W.shape[-2:]
            by_K, missing = W.mT @ half.pop(), batch.size - width
            by_K = pad(by_K, (0, missing, 0, missing)) if missing else by_K
            take_up(by_K, batch, rests, waited_for)
            by_rows = by_K[..., :s, :width].clone()
            by_rows[..., s:] += by_K[..., s:width, :s].mT
            rests[j] = by_K[..., s:width, s:width].contiguous()
            found.append(by_rows.flatten(-3))
        return torch.cat(found, -1)

    @property
    def _batches(self) -> list[tuple[Batch, Tensor]]:
        """The batches of fronts, and W of each."""
        return list(zip(self.graph.dissection.batches, self.rows, strict=True))

    def _own(self, batch: Batch, W: Tensor) -> Tensor:
        """Return L_o^-1 (..., B, s, s), with ones for points that a front lacks."""
        s = batch.own.size(-1)
        missing = (batch.own == self.variance.size(-1)).to(W.dtype)
        return W[..., :s] + torch.diag_embed(missing)

    def _ones(self, lead: torch.Size) -> Tensor:
        return torch.ones(lead, dtype=torch.bool, device=self.variance.device)

    def _spread(self, vector: Tensor) -> Tensor:
        shape = torch.broadcast_shapes(vector.shape, self.variance.shape)
        return pad(vector.expand(shape), (0, 1))

    def _sums(self, entries: Iterator[Tensor]) -> Tensor:
        """Return the sums (..., P) over the entries (..., B, s + b) of all cliques that belong to each point."""
        index = torch.cat([_clique(batch).flatten() for batch, _ in self._batches])
        values = torch.cat([each.flatten(-2) for each in entries], -1)
        found = values.new_zeros(*values.shape[:-1], self.variance.size(-1) + 1)
        return found.index_add_(-1, index, values)[..., :-1]


def _clique(batch: Batch) -> Tensor:
    """Return the own points and the boundary of each front (B, s + b)."""
    return torch.cat([batch.own, batch.boundary], -1)


def _isolated(K: Tensor, missing: Tensor) -> Tensor:
    """Return covariances (..., B, S, S), of missing ones (B, s + b) those of independent values of variance one."""
    if not bool(missing.any()):
        return K
    missing = pad(missing, (0, K.size(-1) - missing.size(-1)), value=True)
    K = K.masked_fill(missing.unsqueeze(-1) | missing.unsqueeze(-2), 0.0)
    return K + torch.diag_embed(missing.to(K.dtype))


def _of_latent(matrices: Tensor, latent: int, latents: int, size: int) -> Tensor:
    """Return a view of the entries (..., B, size, size) of one of D latents of a front's points."""
    end = latents * size
    return matrices[..., latent:end:latents, latent:end:latents]


def _of_points(matrices: Tensor, size: int, latents: int) -> Tensor:
    """Return a view of the entries (..., B, D, D, size) of the latents of each of a front's first points."""
    end = latents * size
    each = matrices[..., :end, :end].unflatten(-1, (size, latents)).unflatten(-3, (size, latents))
    return each.diagonal(dim1=-4, dim2=-2)
