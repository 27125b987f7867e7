r"""Areas of a polygon within the cells of a rectangular grid, exactly and for all cells at once.

By Green's theorem the part of a polygon below y and left of x has the area

    F(x, y) = -+ sum_edges sign(dx_e) int_{x' <= x} max(y - Y_e(x'), 0) dx'

where Y_e is the height of the edge at x' and the sign that of the orientation; cells are second differences of F.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpext.checks import check_finite, check_tensor

_EDGES = 2**20  # numbers at once
_TOLERANCE = 1e-9  # of a cell's area, or of the extent of a polygon: rounding


def check_polygon(vertices: Tensor) -> Tensor:
    """Return the vertices (V, 2) of a polygon in float64.

    Raises:
        TypeError: something else than a tensor.
        ValueError: another shape, fewer than three vertices, or numbers that are not finite.
    """
    check_tensor("polygon", vertices)
    check_finite("polygon", vertices)
    if vertices.dim() != 2 or vertices.size(-1) != 2 or len(vertices) < 3:
        raise ValueError(f"expected a polygon (V, 2) of three or more vertices; got shape {tuple(vertices.shape)}.")
    return vertices.double()


def polygon_fractions(vertices: Tensor, x_edges: Tensor, y_edges: Tensor) -> Tensor:
    """Return the fraction of each cell's area that is inside a polygon (n_x, n_y), float64.

    A window with a hole has the fractions of its outline less those of the hole.

    Args:
        vertices: in order, in either direction (V, 2); the last is joined to the first.
        x_edges: of the cells (n_x + 1,), increasing.
        y_edges: likewise (n_y + 1,).

    Raises:
        TypeError, ValueError: no such polygon, or one that crosses itself so that its area has no sign.

    Example:
        >>> import torch
        >>> triangle = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0]])
        >>> polygon_fractions(triangle, torch.arange(3.0), torch.arange(3.0))
        tensor([[1.0000, 0.5000],
                [0.5000, 0.0000]], dtype=torch.float64)
    """
    vertices = check_polygon(vertices)
    origin = torch.stack([x_edges[0], y_edges[0]]).double()
    x, y = x_edges.double() - origin[0], y_edges.double() - origin[1]
    start = vertices - origin
    end = start.roll(-1, 0)
    total = x.new_zeros(len(x), len(y))
    at_once = max(_EDGES // total.numel(), 1)
    for p, q in zip(start.split(at_once), end.split(at_once), strict=True):
        total = total + _below(p, q, x, y)
    signed = total.diff(dim=0).diff(dim=1)
    fractions = torch.sign(signed.sum()) * signed / (x.diff().unsqueeze(-1) * y.diff())
    if bool(((fractions < -_TOLERANCE) | (fractions > 1 + _TOLERANCE)).any()):
        raise ValueError(
            "the polygon crosses itself: parts of it have opposite orientations, or are counted twice. Give its "
            "outline in order; the fractions of several polygons can be added."
        )
    return torch.where(fractions < _TOLERANCE, 0.0, torch.where(fractions > 1 - _TOLERANCE, 1.0, fractions))


def _below(p: Tensor, q: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the sum over edges from p to q (E, 2) of sign(dx) int max(y - Y, 0), for all x and y (n_x, n_y)."""
    swap = p[:, :1] > q[:, :1]
    left, right = torch.where(swap, q, p), torch.where(swap, p, q)
    width = right[:, 0] - left[:, 0]
    slope = torch.where(width > 0, (right[:, 1] - left[:, 1]) / torch.where(width > 0, width, 1.0), 0.0)
    reach = (x - left[:, :1]).clamp_min(0).minimum(width.unsqueeze(-1)).unsqueeze(-1)  # (E, n_x, 1)
    first = y - left[:, 1, None, None]  # y - Y at the left end (E, 1, n_y)
    last = first - slope[:, None, None] * reach
    high, low = torch.maximum(first, last).clamp_min(0), torch.minimum(first, last)
    gap = high - low
    # The mean of the positive part of a linear function from `low` to `high`.
    partial = torch.where(gap > 0, high.square() / (2 * torch.where(gap > 0, gap, 1.0)), 0.0)
    mean = torch.where(low >= 0, 0.5 * (high + low), partial)
    sign = torch.where(swap, -1.0, 1.0).unsqueeze(-1)
    return (sign * reach * mean).sum(0)


def inside_polygon(points: Tensor, vertices: Tensor) -> Tensor:
    """Return whether points (N, 2) are in a polygon, or on its boundary up to rounding, (N,).

    A point is inside if a ray from it crosses an odd number of edges.
    """
    points, p = points.double(), vertices.double()
    extent = p.amax(0) - p.amin(0)
    found = [_inside(part, p, float(extent.max())) for part in points.split(max(_EDGES // len(p), 1))]
    return torch.cat(found) if found else points.new_zeros(0, dtype=torch.bool)


def _inside(points: Tensor, p: Tensor, extent: float) -> Tensor:
    x, y = points[:, :1], points[:, 1:]
    edge = p.roll(-1, 0) - p
    rises = (p[:, 1] > y) != (p.roll(-1, 0)[:, 1] > y)  # (N, V)
    height = torch.where(edge[:, 1] == 0, 1.0, edge[:, 1])
    crossed = rises & (x < p[:, 0] + edge[:, 0] * (y - p[:, 1]) / height)
    odd = crossed.sum(-1) % 2 == 1
    length = edge.square().sum(-1)
    along = ((x - p[:, 0]) * edge[:, 0] + (y - p[:, 1]) * edge[:, 1]) / torch.where(length > 0, length, 1.0)
    along = along.clamp(0, 1)
    apart = (x - p[:, 0] - along * edge[:, 0]).square() + (y - p[:, 1] - along * edge[:, 1]).square()
    return odd | (apart.amin(-1).sqrt() <= _TOLERANCE * extent)
