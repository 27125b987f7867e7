r"""The nearest neighbours of a model's data, and the prior and predictions that they make.

Inputs are near each other in units of the lengthscales l at which neighbours were chosen, |x / l - x' / l|. These stay
as they are while the hyperparameters are trained, so that the objective is smooth; :meth:`NeighbourChoice.choose` takes
the current ones. Or the most correlated are the nearest, by the kernel at that time, as suits a period, of which
distances do not tell; or those of the nearest that together tell most of a value. The order is by distances all the
same.

In many columns most data have neighbours across any plane, and a factor of the posterior's precision is nearly dense.
Then the neighbours of a datum are those of its own region, a box of a few thousand data: regions are independent but
for what inducing inputs explain, as in the partially independent conditional of Snelson & Ghahramani [2007], and a
factor takes O(N R^2) operations with R data a region. New values depend on the data nearest to them of all regions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import pad

from gpext.checks import whole_number
from gpext.kernels import dense_covariance
from gpext.kernels.columns import stationary_kernels
from gpext.linalg.neighbours import (
    Ordering,
    nearest_to_each,
    ordered,
    previous_neighbours,
    strongest,
    strongest_before,
)
from gpext.linalg.sparse_factor import columns_at
from gpext.linalg.telling import most_telling
from gpext.operators.clique_covariance import CliqueGraph
from gpext.operators.neighbour_covariance import (
    Nearest,
    NeighbourGraph,
    NeighbourLinearOperator,
    less_explained,
    regress,
)
from gpext.posteriors import NeighbourJointPosterior, NeighbourPosterior, NeighbourPrior
from gpext.variational.correlations import correlations

RegionSize = int | Literal["auto"] | None
NeighboursBy = Literal["distance", "correlation", "information"]
Prior = Callable[[Tensor], MultivariateNormal]
Root = Callable[[Tensor], Tensor]

_AT_ONCE = 2**23  # entries of covariances evaluated at a time, where no derivatives are
_REGION = 2000  # data of a region, where there are several by "auto"
_MOVED = 1.25  # of the ratios of lengthscales, a change by which neighbours are not worth another choice
_CANDIDATES = 2  # times the number of neighbours, the nearest of which those that tell most are chosen
_WIDER = 1.2  # times the number of neighbours, the nearest on all sides that a filled graph connects with each datum
_FEW_COLUMNS = 3  # up to which separators are small, and a few nearest data tell most of a new value
_PREDICTING = 80  # data that a new value depends on in more columns
_OTHERS = 0.2  # of all neighbours, a share that has to differ for another choice by the kernel
_DEARER = 2.0  # times the operations of a factor by regions, from which on that of the whole is not worth it
_DEARER_IN_MANY = 0.5  # filled in, in more than three columns: there regions are dense blocks, of cheaper operations


class _NewValues(NamedTuple):
    """S new values f_* = mu_* + phi'z + a'r_N + s, as posteriors take them."""

    nearest: Tensor  # the points N (S, E)
    weights: Tensor  # a (..., S, E)
    root: Tensor  # phi (..., S, M)
    rest: Tensor  # the variances of s (..., S)
    covariance: Callable[[], Tensor]  # returns the covariance of s (..., S, S)


class NeighbourChoice(Module):
    """A choice of the neighbours of each datum; the lengthscales that decide it are part of the state dict.

    Args:
        number: of neighbours of a datum.
        num_columns: d, of the inputs.
        ordering: "maximin", coarse grids before finer ones; "random"; "coordinate", along the widest axis; or "middle",
            from the mean of the inputs outwards. The last two have neighbours on one side: in the plane a factor takes
            a third to a half of the operations. With `fill_in`, nearest data by distance are on all sides.
        seed: of the random parts of an ordering.
        region_size: the largest number of data of a region, within which neighbours are chosen; None for one region;
            "auto" for regions of 2000 where a factor of the whole would take more than twice the operations. That
            is never so up to 2828 data, nor with 2000 neighbours or more.
        by: "distance" in lengthscales; "correlation"; or "information", those of twice as many nearest that together
            tell most of each value.
        num_data: N, for neighbours by the kernel, which are part of the state dict.
        fill_in: whether the prior has all entries that a factor of the posterior's precision fills in; see
            :mod:`gpext.operators.clique_covariance`. Then each datum is connected with the 1.2 k nearest to it.
        to_predict: the number of data that a new value depends on; None for `number`, or twice that with `fill_in`, in
            more than three columns no less than 80.

    Raises:
        TypeError, ValueError: a number or a size that is not positive, or an unknown ordering or `by`.
    """

    scale: Tensor  # l (d,); zero before the first choice
    chosen: Tensor | None  # of the points, by the kernel (N, m); zero before the first choice

    def __init__(
        self,
        number: int,
        num_columns: int,
        ordering: Ordering = "maximin",
        seed: int = 0,
        region_size: RegionSize = "auto",
        by: NeighboursBy = "distance",
        num_data: int = 0,
        *,
        fill_in: bool = True,
        to_predict: int | None = None,
    ) -> None:
        super().__init__()
        if by not in get_args(NeighboursBy):
            raise ValueError(f"neighbours_by must be one of {get_args(NeighboursBy)}; got {by!r}.")
        self.by, self.fill_in = by, fill_in
        self.number = whole_number("neighbours", number, 1)
        usual = self.number
        if fill_in:
            usual = max(2 * self.number, 0 if num_columns <= _FEW_COLUMNS else _PREDICTING)
        self.to_predict = usual if to_predict is None else whole_number("prediction_neighbours", to_predict, 1)
        if ordering not in get_args(Ordering):
            raise ValueError(f"ordering must be one of {get_args(Ordering)}; got {ordering!r}.")
        automatic = region_size is None or region_size == "auto"
        kind = "a whole number, None or 'auto'"
        self.region_size = region_size if automatic else whole_number("region_size", region_size, 1, kind=kind)
        self.ordering, self.seed = ordering, seed
        self.register_buffer("scale", torch.zeros(num_columns, dtype=torch.float64, device="cpu"))
        self._graph: tuple[Tensor, Tensor, NeighbourGraph] | None = None
        self.register_buffer("chosen", None)
        self.reset(num_data)

    def reset(self, num_data: int) -> None:
        """Forget neighbours by the kernel; others, of so many data, are chosen when they are needed."""
        if self.by != "distance":
            width = max(min(self.number, num_data - 1), 0)
            self.chosen = torch.zeros(num_data, width, dtype=torch.int32, device=self.scale.device)

    def choose(self, model: Module, x: Tensor, root_of: Root | None = None) -> bool:
        """Take the model's current lengthscales, or its kernel, and return whether neighbours have changed.

        Lengthscales whose ratios have changed by less than a quarter are not taken, nor neighbours by the kernel
        unless a fifth of them are others.

        Args:
            model: the process, with kernels in its modules.
            x: its inputs (N, d).
            root_of: see :meth:`prior`.
        """
        old, new = self.scale, lengthscales_of(model, x)
        if not bool(old.any()):
            self.scale = new
            self.reset(len(x))
            return True
        ratio = new / old
        has_moved = float(ratio.max() / ratio.min()) >= _MOVED  # else distances are in nearly the same order
        if not has_moved and self.chosen is None:
            return False
        before, chosen = self.graph(x, model, root_of).rows, self.chosen
        self.scale = new if has_moved else old
        self.reset(len(x))
        changed = (self.graph(x, model, root_of).rows != before)[:, 1:]
        if chosen is None:
            return bool(changed.any())
        if float(changed.double().mean()) > _OTHERS:
            return True
        self.scale, self.chosen = old, chosen
        return False

    def rescale(self, model: Module, x: Tensor) -> None:
        """Take the model's current lengthscales, without finding the neighbours by them yet."""
        self.scale = lengthscales_of(model, x)
        self.reset(len(x))

    def graph(self, x: Tensor, model: Module | None = None, root_of: Root | None = None) -> NeighbourGraph:
        """Return the neighbours of data at inputs (N, d); by the kernel those of a model, unless they are known."""
        kept = self._graph
        if kept is None or kept[0] is not x or not torch.equal(kept[1], self.scale) or not self._has_chosen(kept[2]):
            points = self.scaled(x.detach())
            number, nearest = self.number, None
            if self.chosen is not None:
                nearest = self._nearest_of(self.chosen, x, model, root_of)
            elif self.fill_in:
                number, nearest = self._on_all_sides(points)
            by_order = not self.fill_in or self.chosen is not None
            order = ordered(points, self.ordering, self.seed) if by_order else torch.arange(len(x), device=x.device)
            graph = self._graph_of(points, order, number, nearest)
            kept = (x, self.scale, CliqueGraph.fill(graph) if self.fill_in else graph)
            self._graph = kept
            if self.chosen is not None and not self._has_chosen(kept[2]):
                rows = kept[2].rows[:, 1:].to(self.chosen)
                self.chosen = pad(rows, (0, self.chosen.size(-1) - rows.size(-1), 0, len(self.chosen) - len(rows)))
        return kept[2]

    def _has_chosen(self, graph: NeighbourGraph) -> bool:
        """Return whether a graph is that of the neighbours chosen by the kernel, if any are."""
        if self.chosen is None:
            return True
        rows = graph.rows[:, 1:]
        return torch.equal(self.chosen[: len(rows), : rows.size(-1)].to(rows), rows)

    def _on_all_sides(self, points: Tensor) -> tuple[int, Nearest]:
        """Return a number of neighbours, and what returns the nearest of points on all sides, whatever their order."""
        number = math.ceil(_WIDER * self.number)

        def nearest_of(index: Tensor, order: Tensor, first: Tensor) -> Tensor:
            return index[nearest_to_each(points[first[index]], number)]

        return number, nearest_of

    def _nearest_of(self, chosen: Tensor, x: Tensor, model: Module | None, root_of: Root | None) -> Nearest:
        """Return what returns the neighbours of points by the kernel, those of the last choice if there was one."""
        if bool(chosen.any()):
            return lambda index, order, first: chosen[index].to(index)
        assert model is not None

        def strongest_of(index: Tensor, order: Tensor, first: Tensor) -> Tensor:
            points = x[first[index]]
            strength = correlations(model.forward, points, _root_at(points, root_of))
            return index[strongest_before(strength, order, self.number)]

        def telling_of(index: Tensor, order: Tensor, first: Tensor) -> Tensor:
            points = x[first[index]]
            near = previous_neighbours(self.scaled(points), order, _CANDIDATES * self.number)
            own = torch.arange(len(points), device=near.device)
            return index[_most_telling(model.forward, points, _root_at(points, root_of), own, near, self.number)]

        return telling_of if self.by == "information" else strongest_of

    def _graph_of(self, points: Tensor, order: Tensor, number: int, nearest: Nearest | None) -> NeighbourGraph:
        if self.region_size != "auto":
            return NeighbourGraph.of(points, number, order, self.region_size, nearest)
        graph = NeighbourGraph.of(points, number, order, nearest=nearest)
        count = len(graph.points)
        many = self.fill_in and points.size(-1) > _FEW_COLUMNS
        by_regions = count * _REGION**2 / 6
        most = (_DEARER_IN_MANY if many else _DEARER) * by_regions
        # A dense factor may be cheap enough, and is asked first: several latents have no use for the tree of one.
        if number >= _REGION or count**3 / 6 <= _DEARER * by_regions or graph.dissection.work <= most:
            return graph
        return NeighbourGraph.of(points, number, order, _REGION, nearest)

    def scaled(self, x: Tensor) -> Tensor:
        """Return inputs, float64, in a space of equal lengthscales, the shortest one unchanged.

        So points of a grid that are equally far remain so, and rounding of lengthscales does not choose among them.
        """
        return x.double() / (self.scale / self.scale.min())

    def ensure_scale(self, model: Module, x: Tensor) -> None:
        """Take the model's current lengthscales if there are none yet, by which neighbours are chosen."""
        if not bool(self.scale.any()):
            self.choose(model, x)

    def prior(self, model: Module, x: Tensor, root_of: Root | None, *, several: bool) -> MultivariateNormal:
        """Return the nearest-neighbour prior at inputs (N, d), of `several` latents or of one.

        Args:
            model: the process, whose `forward` is the exact prior at any inputs.
            x: (N, d).
            root_of: Phi at any inputs, so that Phi Phi' is the part of the covariance that inducing inputs explain.
            several: whether `forward` returns a batch of latents.
        """
        self.ensure_scale(model, x)
        graph, forward = self.graph(x, model, root_of), model.forward
        points = x[graph.first]
        root = _root_at(points, root_of)
        blocks = graph.covariances(points, root, lambda groups, rows: _blocks(forward, groups, several, rows))
        covariance = NeighbourLinearOperator(blocks, None if root_of is None else root, graph=graph)
        return MultivariateNormal(forward(x).mean, covariance)

    def predict(
        self,
        forward: Prior,
        x: Tensor,
        root_of: Root | None,
        posterior: NeighbourPosterior | NeighbourJointPosterior,
        new: Tensor,
    ) -> MultivariateNormal:
        """Return the posterior at new inputs (S, d), each of which depends on the data nearest to it.

        With R = K - Phi Phi' and a = R_NN^-1 r_N*, f_* = mu_* + phi'z + a'r_N + s, and s has the covariance that the
        exact prior leaves: variances are those of the nearest-neighbour prior, and covariances are exact where all data
        are neighbours.

        Raises:
            ValueError: a batch of inputs.
        """
        several = posterior.prior_mean.dim() > 1
        found = self._new_values(
            forward, x, root_of, posterior.regressions.graph, posterior.jitter, new, several=several
        )
        return posterior.predict(forward(new).mean, *found)

    def predict_given(
        self, forward: Prior, x: Tensor, root_of: Root | None, prior: NeighbourPrior, latent: Tensor, new: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return means and variances (..., S) at new inputs (S, d) given the values f (..., N) at the data.

        Raises:
            ValueError: a batch of inputs.
        """
        found = self._new_values(forward, x, root_of, prior.graph, prior.jitter, new, several=False)
        return prior.predict_given(latent, forward(new).mean, found.nearest, found.weights, found.root, found.rest)

    def _new_values(
        self,
        forward: Prior,
        x: Tensor,
        root_of: Root | None,
        graph: NeighbourGraph,
        jitter: float,
        new: Tensor,
        *,
        several: bool,
    ) -> _NewValues:
        if new.dim() > 2:
            raise ValueError(
                f"a model with neighbours predicts at one set of inputs, (S, d), not a batch; got {tuple(new.shape)}."
            )
        points = x[graph.first]
        number = min(self.to_predict, len(points))
        every = torch.cat([new, points])
        root = _root_at(every, root_of)
        nearest = self._nearest_to(every.detach(), len(new), forward, root.detach(), number)
        itself = torch.arange(len(new), device=x.device)

        def regressed(which: Tensor) -> tuple[Tensor, Tensor]:
            near = nearest[which]
            blocks = _blocks(forward, torch.cat([new[which].unsqueeze(-2), points[near]], -2), several).double()
            blocks = less_explained(blocks, root, torch.cat([which.unsqueeze(-1), near + len(new)], -1))
            among = blocks[..., 1:, 1:] + jitter * torch.eye(number, dtype=blocks.dtype, device=x.device)
            return regress(torch.linalg.cholesky(among), blocks[..., 1:, 0], blocks[..., 0, 0])

        found = [regressed(which) for which in itself.split(_AT_ONCE // (number + 1) ** 2 + 1)]
        weights, rest = torch.cat([a for a, _ in found], -2), torch.cat([d for _, d in found], -1)
        rest = rest.clamp_min(0)  # negative by rounding alone

        def covariance() -> Tensor:
            used, at = nearest.unique(return_inverse=True)
            K = dense_covariance(forward(torch.cat([new, points[used]])).lazy_covariance_matrix).double()
            explained = root[..., torch.cat([itself, used + len(new)]), :]
            K = K - explained @ explained.mT
            unit = torch.eye(len(new), dtype=weights.dtype, device=x.device)
            unit = unit.expand(*weights.shape[:-2], -1, -1)
            rows = torch.cat([unit, -columns_at(at.view(nearest.shape), weights, len(used)).mT], -1)
            return rows @ K @ rows.mT

        return _NewValues(nearest, weights, root[..., itself, :], rest, covariance)

    def _nearest_to(self, every: Tensor, num_new: int, forward: Prior, root: Tensor, number: int) -> Tensor:
        """Return the points (S, number) nearest to S new inputs, or those of which the kernel says so.

        Args:
            every: the new inputs and then the points (S + P, d).
            num_new: S.
            forward: the exact prior.
            root: Phi of all of them (S + P, M).
            number: of points.
        """
        places = torch.arange(len(every), device=every.device)
        if self.by == "correlation":
            return strongest(correlations(forward, every, root), places[:num_new], places[num_new:], number)
        from scipy.spatial import KDTree

        telling = self.by == "information"
        sought = min(_CANDIDATES * number, len(every) - num_new) if telling else number
        scaled = self.scaled(every).cpu().numpy()
        _, found = KDTree(scaled[num_new:]).query(scaled[:num_new], sought)
        near = torch.as_tensor(found, dtype=torch.long, device=every.device).view(num_new, sought)
        if not telling:
            return near
        return _most_telling(forward, every, root, places[:num_new], near + num_new, number) - num_new


@torch.no_grad()
def lengthscales_of(module: Module, x: Tensor) -> Tensor:
    """Return the smallest lengthscale of each column of inputs (N, d) among a module's kernels, the mean of batches.

    Columns of no stationary kernel count as much as the shortest; without any stationary kernel all count alike.
    """
    scale = torch.full((x.size(-1),), math.inf, dtype=torch.float64, device=x.device)
    for _, kernel, columns in stationary_kernels(module, x.size(-1)):
        lengthscale = kernel.lengthscale.detach().double().flatten(0, -2).mean(0)
        columns = columns.to(x.device)
        scale[columns] = torch.minimum(scale[columns], lengthscale.expand(len(columns)))
    least = scale.min()
    return torch.where(scale.isfinite(), scale, least if bool(least.isfinite()) else torch.ones_like(least))


def _blocks(forward: Prior, points: Tensor, several: bool, rows: int | None = None) -> Tensor:
    """Return the covariances (..., P, R, E) of the first `rows` of groups of inputs (P, E, d), of all for None.

    Args:
        forward: the exact prior.
        points: the groups.
        several: whether it is of several latents, or of one.
        rows: R.
    """
    together = len(points) if torch.is_grad_enabled() else _AT_ONCE // points.size(-2) ** 2 + 1
    if several:
        points = points.unsqueeze(1)  # for the latents
    found = []
    for part in points.split(together):
        covariance = forward(part).lazy_covariance_matrix
        found.append(dense_covariance(covariance if rows is None else covariance[..., :rows, :]))
    blocks = torch.cat(found)
    return blocks.squeeze(1) if several and blocks.size(1) == 1 else blocks.movedim(0, -3)


def _root_at(x: Tensor, root_of: Root | None) -> Tensor:
    """Return Phi at inputs (P, d), float64 (P, M); without inducing inputs (P, 0)."""
    return x.new_zeros(len(x), 0, dtype=torch.float64) if root_of is None else root_of(x).double()


@torch.no_grad()
def _most_telling(forward: Prior, x: Tensor, root: Tensor, values: Tensor, near: Tensor, number: int) -> Tensor:
    """Return those (V, m) of the nearest (V, C) that tell most of values (V,), all by their places among inputs (P, d).

    A value among its own nearest stands for none, and so it does in what is returned.
    """
    found = []
    groups = torch.cat([values.unsqueeze(-1), near], -1)
    for group in groups.split(_AT_ONCE // groups.size(-1) ** 2 + 1):
        blocks = less_explained(_blocks(forward, x[group], several=True), root, group).double()
        blocks = (blocks.unsqueeze(0) if blocks.dim() == 3 else blocks).transpose(0, 1)
        places = most_telling(blocks, group[:, 1:] != group[:, :1], min(number, near.size(-1)))
        found.append(group[:, 1:].gather(-1, places))
    return torch.cat(found)
