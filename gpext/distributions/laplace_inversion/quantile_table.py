r"""Quantiles of many tilted mixing densities of one phi at once: from a table in the tilt and the normal score.

log w is a smooth function of the score of its probability and of log c. Its values on a grid, solved for one by one,
are interpolated by Lagrange polynomials of degree 7 in both coordinates. The steps below leave 7e-9 in the cdf at most,
found over the families of `contour`; of every table a hundred values are checked.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpext.distributions.laplace_inversion.inversion_contour import Contour
from gpext.distributions.laplace_inversion.quantiles import solve
from gpext.distributions.laplace_inversion.radial_transform import RadialTransform
from gpext.distributions.laplace_inversion.saddle_model import SaddleModel

_NODES = 8  # of a stencil
_MOST_NODES = 10_000  # of a grid
_TILT_STEP, _SCORE_STEP = 0.1, 0.15
_CHUNK = 8192
_BELOW = 0.01  # share of the tilts, the smallest ones, that the table need not reach: it is logarithmic
_WORTH = 1.5  # draws an entry of the table, from which on making it pays
_CHECKED = 100
_TOLERANCE = 1e-8  # of the cdf


def interpolated(transform: RadialTransform, tilt: Tensor, score: Tensor) -> tuple[Tensor, Tensor] | None:
    """Quantiles of the scores (n,) at the finite tilts (n,), float64, and which of them were left out.

    None if a table is not worth its making or not exact to 1e-8 in the cdf: a hundred of the quantiles are compared
    with the inversion of phi at the very tilt.
    """
    place = tilt.log() if bool((tilt != tilt[0]).any()) else torch.zeros_like(tilt)
    lowest = place.kthvalue(1 + int(_BELOW * len(place))).values
    left_out = place < lowest
    place = torch.where(left_out, lowest, place)
    tilts, scores = _Grid.over(place, _TILT_STEP), _Grid.over(score, _SCORE_STEP)
    if tilts is None or scores is None or len(tilts.nodes) * len(scores.nodes) * _WORTH > len(tilt):
        return None
    squares = tilt[:1].square() if len(tilts.nodes) == 1 else torch.exp(2 * tilts.nodes)
    squares, nodes = torch.broadcast_tensors(squares.unsqueeze(-1), scores.nodes)
    table, failed = solve(transform, squares.flatten(), nodes.flatten(), elementwise=True)
    if bool(failed.any()):
        return None
    table = table.log()
    parts = zip(place.split(_CHUNK), score.split(_CHUNK), strict=True)
    w = torch.cat([_interpolate(table, tilts, scores, *part) for part in parts]).exp_()

    kept = (~left_out).nonzero().squeeze(-1)
    some = kept[torch.linspace(0, len(kept) - 1, _CHECKED, device=w.device).long()]
    r = tilt[some].square()
    laws = Contour.through(transform, r, w[some], SaddleModel.reference(transform, r), 24).laws()
    exact = bool(((laws.cdf - torch.special.ndtr(score[some])).abs() < _TOLERANCE).all())
    return (w, left_out) if exact else None


class _Grid:
    """Equidistant nodes around some values, with room for a stencil."""

    def __init__(self, nodes: Tensor, step: float) -> None:
        self.nodes, self.step, self.width = nodes, step, min(_NODES, len(nodes))

    @classmethod
    def over(cls, values: Tensor, step: float) -> _Grid | None:
        """The grid for these values; None if they are not finite or too far apart."""
        first, last = (float(v) for v in values.aminmax())
        if first == last:
            return cls(values[:1], step)
        if not (last - first) / step < _MOST_NODES:
            return None
        start = first - _NODES / 2 * step
        num = math.ceil((last - start) / step) + _NODES // 2
        return cls(start + step * torch.arange(num, dtype=values.dtype, device=values.device), step)

    def stencil(self, values: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The first node for each value, int32, and the weights of the nodes from there on."""
        if self.width == 1:
            return torch.zeros_like(values, dtype=torch.int32), [torch.ones_like(values)]
        place = (values - self.nodes[0]) / self.step
        first = (place - (self.width / 2 - 1)).clamp_(0, len(self.nodes) - self.width).int()
        offsets = [place - first - k for k in range(self.width)]
        before, after = [torch.ones_like(place)], [torch.ones_like(place)]
        for k in range(self.width - 1):
            before.append(before[-1] * offsets[k])
            after.append(after[-1] * offsets[-1 - k])
        signed = [
            (-1) ** (self.width - 1 - k) * math.factorial(k) * math.factorial(self.width - 1 - k)
            for k in range(self.width)
        ]
        return first, [before[k] * after[self.width - 1 - k] / signed[k] for k in range(self.width)]


def _interpolate(table: Tensor, tilts: _Grid, scores: _Grid, t: Tensor, score: Tensor) -> Tensor:
    row, tilt_weights = tilts.stencil(t)
    column, score_weights = scores.stencil(score)
    entry = row * len(scores.nodes) + column
    total = torch.zeros_like(t)
    for i, outer in enumerate(tilt_weights):
        inner = torch.zeros_like(t)
        for j, weight in enumerate(score_weights):
            # A shifted view costs nothing; shifted indices would.
            inner.addcmul_(table[i * len(scores.nodes) + j :].index_select(0, entry), weight)
        total.addcmul_(inner, outer)
    return total
