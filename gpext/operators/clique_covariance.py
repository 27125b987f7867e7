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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from gpext.linalg.dissection import Dissection
from gpext.linalg.front_batches import Batch
from gpext.linalg.gathered import gathered_grams
from gpext.linalg.sparse_factor import SparseFactor, eliminate, hand_down, parents_of, take_up
from gpext.operators.clique_fronts import CliqueFronts, FrontsAlone, FrontsGivenBoundaries
from gpext.operators.neighbour_covariance import Evaluate, NeighbourGraph, Regressions

_DEARER = 3.0  # times the multiplications of a factor, up to which a region is one front


@dataclass(frozen=True)
class CliqueGraph(NeighbourGraph):
    """Neighbours, and what a factor of their precision fills in; the covariances are those of each front's own points.

    They are K_oo and K_ob of one front after the other, (..., T) of all.
    """

    tree: Dissection

    block_dims = 1

    @classmethod
    def fill(cls, graph: NeighbourGraph) -> CliqueGraph:
        """Return the same graph, filled: along its tree, or with all in a region connected where that is as cheap."""
        whole = Dissection.of_regions(graph.region)
        tree = whole if whole.work <= _DEARER * graph.dissection.work else graph.dissection
        return cls(graph.points, graph.rows, graph.order, graph.first, graph.point, graph.region, tree)

    @property
    def dissection(self) -> Dissection:
        """The tree of one latent value a point."""
        return self.tree

    def covariances(self, points: Tensor, root: Tensor, evaluate: Evaluate) -> Tensor:
        """Return K_oo and K_ob (..., T), less what a root explains; see :meth:`NeighbourGraph.covariances`."""
        found = [evaluate(points[clique], s).flatten(-3) for clique, s in self._fronts]
        blocks = torch.cat(found, -1)
        if not root.size(-1):
            return blocks
        explained = [each.flatten(-3) for each in gathered_grams(root, self._fronts)]
        return blocks - torch.cat(explained, -1).to(blocks)

    @cached_property
    def _fronts(self) -> list[tuple[Tensor, int]]:
        """The points of each batch's fronts (B, E), any for those that a front lacks, and the number of its own.

        A batch without own points is left out: no kernel is asked for the covariances of no inputs, whose mean is none.
        """
        last = len(self.points) - 1
        return [
            (_clique(batch).clamp(max=last), batch.own.size(-1))
            for batch in self.dissection.batches
            if batch.own.size(-1)
        ]

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
    """The regressions of every batch of fronts, float64. Products are those of each."""

    graph: CliqueGraph
    blocks: Tensor  # the covariances of the graph (..., T)
    fronts: tuple[CliqueFronts, ...]
    variance: Tensor  # the squared diagonals of L_o (..., P)
    positive: Tensor

    @classmethod
    def of(cls, graph: CliqueGraph, blocks: Tensor) -> CliqueRegressions:
        """Return them, given the covariances of the graph (..., T)."""
        size = len(graph.points)
        fronts: list[CliqueFronts] = []
        for batch, K in graph.cliques(blocks):
            missing = _clique(batch) == size
            if batch.children or batch.boundary.size(-1):
                fronts.append(FrontsGivenBoundaries.of(K, missing, batch.own.size(-1)))
            else:
                fronts.append(FrontsAlone.of(K, missing))
        return cls._of(graph, blocks, tuple(reversed(fronts)))

    @classmethod
    def stack(cls, parts: Sequence[CliqueRegressions]) -> CliqueRegressions:
        """See :meth:`Regressions.stack`."""
        fronts = tuple(type(each[0]).stack(each) for each in zip(*(part.fronts for part in parts), strict=True))
        return cls._of(parts[0].graph, torch.stack([part.blocks for part in parts]), fronts)

    @classmethod
    def _of(cls, graph: CliqueGraph, blocks: Tensor, fronts: tuple[CliqueFronts, ...]) -> CliqueRegressions:
        variance = blocks.new_ones(*blocks.shape[:-1], len(graph.points) + 1)
        for batch, front in zip(graph.dissection.batches, fronts, strict=True):
            variance[..., batch.own] = front.chol.diagonal(dim1=-2, dim2=-1).square()
        positive = torch.stack([front.positive for front in fronts]).all()
        return cls(graph, blocks, fronts, variance[..., :-1], positive)

    def whitened(self, columns: Tensor) -> Tensor:
        """See :meth:`Regressions.whitened`."""
        x = pad(columns, (0, 0, 0, 1))
        found = x.new_empty(*torch.broadcast_shapes(x.shape[:-2], self.variance.shape[:-1]), *x.shape[-2:])
        for batch, front in self._batches:
            found[..., batch.own, :] = front.whitened(x[..., _clique(batch), :])
        return found[..., :-1, :]

    def precision_times(self, vector: Tensor) -> Tensor:
        """See :meth:`Regressions.precision_times`."""
        x = self._spread(vector)
        return self._sums(front.precision_times(x[..., _clique(batch)]) for batch, front in self._batches)

    @cached_property
    def precision_diagonal(self) -> Tensor:
        """The diagonal of K~^-1 (..., P)."""
        return self._sums(front.precision_diagonal() for front in self.fronts)

    def covariance_times(self, vector: Tensor) -> Tensor:
        """Return K~ vector = W^-1 W^-T vector (..., P)."""
        x = self._spread(vector)
        for batch, front in self._batches:
            own, boundary = front.half_transposed_times(x[..., batch.own])
            x[..., batch.own] = own
            x.index_add_(-1, batch.boundary.flatten(), boundary.flatten(-2))
        return self.half_times(x[..., :-1])

    def half_times(self, normal: Tensor) -> Tensor:
        """See :meth:`Regressions.half_times`."""
        x = self._spread(normal)
        for batch, front in reversed(self._batches):
            x[..., batch.own] = front.half_times(x[..., batch.own], x[..., batch.boundary])
        return x[..., :-1]

    def factorise(self, diagonal: Tensor) -> SparseFactor:
        """See :meth:`Regressions.factorise`."""
        tree = self.graph.dissection
        added = pad(diagonal, (0, 1), value=1.0)  # 1 for what is missing
        lead = torch.broadcast_shapes(diagonal.shape[:-1], self.variance.shape[:-1])

        def parts(j: int) -> Tensor:
            batch, precision = tree.batches[j], self.fronts[j].precision()
            width = precision.size(-1)
            F = precision.new_zeros(*lead, len(batch.own), batch.size, batch.size)
            F[..., :width, :width] = precision
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
            batch, own = tree.batches[j], self.graph.dissection.batches[j].own
            F = added.new_zeros(*lead, len(own), batch.size, batch.size)
            precision = self.fronts[j].precision()
            precision = precision.expand(*precision.shape[:-4], latents, *precision.shape[-3:])
            each = _by_latent(F, latents, precision.size(-1))
            each.diagonal(dim1=-3, dim2=-1).add_(precision.movedim(-4, -1))
            of_points = _by_latent(F, latents, own.size(-1)).diagonal(dim1=-4, dim2=-2)
            of_points.add_(added[..., own, :, :].movedim(-3, -1))
            return F

        return eliminate(tree, self._ones(lead), parts)

    def inverse(self, factor: SparseFactor, diagonal: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        """See :meth:`Regressions.inverse`."""
        size, sites, found = self.variance.size(-1), pad(diagonal, (0, 1)), list[Any]()
        variance = self.variance.new_empty(*factor.positive_definite.shape, size + 1)
        for front, (batch, Z) in zip(reversed(self.fronts), factor.inverse_entries(), strict=True):
            width = batch.own.size(-1) + batch.boundary.size(-1)
            variance[..., batch.own] = Z.diagonal(dim1=-2, dim2=-1)[..., : batch.own.size(-1)]
            found.append(front.products(Z[..., :width, :width], sites[..., batch.own]))
        return variance[..., :size], tuple(reversed(found))

    def inverse_joint(self, factor: SparseFactor, blocks: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        """See :meth:`Regressions.inverse_joint`."""
        lead, size, latents = factor.positive_definite.shape, self.variance.size(-1), blocks.size(-1)
        sites, found = pad(blocks, (0, 0, 0, 0, 0, 1)), list[Any]()
        among = self.variance.new_empty(*lead, latents, latents, size + 1)
        for (batch, front), (_, Z) in zip(reversed(self._batches), factor.inverse_entries(), strict=True):
            each = _by_latent(Z, latents, batch.own.size(-1) + batch.boundary.size(-1))
            found.append(front.joint_products(each, sites[..., batch.own, :, :]))
            of_points = _by_latent(Z, latents, batch.own.size(-1)).diagonal(dim1=-4, dim2=-2)
            among[..., batch.own] = of_points.movedim(-4, -2)
        return among[..., :size], tuple(reversed(found))

    def plus(self, products: tuple[Any, ...], left: Tensor, right: Tensor) -> tuple[Any, ...]:
        """See :meth:`Regressions.plus`."""
        left, right = pad(left, (0, 0, 0, 1)), pad(right, (0, 0, 0, 1))
        found = []
        for (batch, front), product in zip(self._batches, products, strict=True):
            clique = _clique(batch)
            found.append(front.plus(product, left[..., clique, :], right[..., clique, :]))
        return tuple(found)

    def plus_gram(self, products: tuple[Any, ...], root: Tensor) -> tuple[Any, ...]:
        """See :meth:`Regressions.plus_gram`."""
        return self.plus(products, root, root) if root.size(-1) else products

    def share(self, products: tuple[Any, ...]) -> Tensor:
        """See :meth:`Regressions.share`."""
        return self._sums(front.share(product) for front, product in zip(self.fronts, products, strict=True))

    def by_covariance(self, products: tuple[Any, ...]) -> Tensor:
        """Return the derivative in the graph's covariances (..., T); see :meth:`Regressions.by_covariance`."""
        cliques = self.graph.cliques(self.blocks)
        halves = [
            front.half_derivative(product, K)
            for (_, K), front, product in zip(cliques, reversed(self.fronts), reversed(products), strict=True)
        ]
        rests: dict[int, Tensor] = {}
        waited_for = parents_of(self.graph.dissection.batches)
        found = []
        for j, (batch, front) in enumerate(self._batches):
            s, width = batch.own.size(-1), batch.own.size(-1) + batch.boundary.size(-1)
            by_K, missing = front.derivative(halves.pop()), batch.size - width
            by_K = pad(by_K, (0, missing, 0, missing)) if missing else by_K
            take_up(by_K, batch, rests, waited_for)
            by_rows = by_K[..., :s, :width].clone()
            by_rows[..., s:] += by_K[..., s:width, :s].mT
            rests[j] = by_K[..., s:width, s:width].contiguous()
            found.append(by_rows.flatten(-3))
        return torch.cat(found, -1)

    @property
    def _batches(self) -> list[tuple[Batch, CliqueFronts]]:
        return list(zip(self.graph.dissection.batches, self.fronts, strict=True))

    def _ones(self, lead: torch.Size) -> Tensor:
        return torch.ones(lead, dtype=torch.bool, device=self.variance.device)

    def _spread(self, vector: Tensor) -> Tensor:
        shape = torch.broadcast_shapes(vector.shape, self.variance.shape)
        return pad(vector.expand(shape), (0, 1))

    def _sums(self, entries: Iterable[Tensor]) -> Tensor:
        """Return the sums (..., P) over the entries (..., B, s + b) of all cliques that belong to each point."""
        index = torch.cat([_clique(batch).flatten() for batch in self.graph.dissection.batches])
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


def _by_latent(matrices: Tensor, latents: int, size: int) -> Tensor:
    """Return a view (..., B, k, D, k, D) of the entries of D latents of the first k points of each front."""
    end = latents * size
    return matrices[..., :end, :end].unflatten(-1, (size, latents)).unflatten(-3, (size, latents))
