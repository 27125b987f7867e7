r"""A point process on a grid: counts in cells, with the area of each cell inside the window as exposure.

A Poisson process of intensity lambda(s) has counts n_c ~ Poisson(int_c lambda(s) ds). With an intensity lambda = e^f
that is constant in a cell of area A_c inside the window, these are data of `Offset(PoissonLikelihood(), log A)`: a
log-Gaussian Cox process if f is a Gaussian process [Moller, Syversveen & Waagepetersen 1998]. Variation within a cell
is neglected: cells should be small beside the lengthscales of f.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpext.checks import check_finite, check_tensor, whole_number
from gpext.point_process.polygons import inside_polygon, polygon_fractions


@dataclass(frozen=True)
class Grid:
    """Cells of a box in one, two or more dimensions, and what share of each is inside the window of observation.

    Results are vectors (M,) over the cells that have a part inside, in the order of `fractions.flatten()`, the first
    coordinate slowest. Make one by :meth:`regular` or :meth:`of_edges`.

    Attributes:
        edges: of the cells along each coordinate, D vectors (n_d + 1,).
        fractions: of each cell's volume inside the window (n_1, ..., n_D), from 0 to 1.
        polygon: the window (V, 2), if it is one.

    Example:
        >>> import torch
        >>> grid = Grid.regular([(0.0, 1.0), (0.0, 1.0)], (2, 2))
        >>> grid.count(torch.tensor([[0.1, 0.1], [0.9, 0.9], [0.8, 0.9]]))
        tensor([1., 0., 0., 2.])
    """

    edges: tuple[Tensor, ...] = field(repr=False)
    fractions: Tensor = field(repr=False)
    polygon: Tensor | None = field(default=None, repr=False)

    @classmethod
    def regular(
        cls,
        window: Sequence[tuple[float, float]],
        shape: Sequence[int],
        *,
        polygon: Tensor | None = None,
        mask: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Grid:
        """Return a grid of equal cells.

        Args:
            window: lowest and highest value of each coordinate, D pairs.
            shape: number of cells along each (n_1, ..., n_D).
            polygon: as for :meth:`of_edges`.
            mask: likewise.
            dtype: torch's default by default.

        Raises:
            TypeError, ValueError: as :meth:`of_edges`, or not as many numbers as pairs.

        Example:
            >>> import torch
            >>> grid = Grid.regular([(0, 2), (0, 1)], (4, 2))
            >>> grid.count(torch.tensor([[0.1, 0.1], [0.2, 0.3], [2.0, 1.0]])).tolist()
            [2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
            >>> grid.exposure.sum()
            tensor(2.)
        """
        if len(window) != len(shape):
            raise ValueError(f"expected a number of cells for each of {len(window)} coordinates; got {len(shape)}.")
        numbers = [whole_number("a number of cells", n, 1) for n in shape]
        edges = [torch.linspace(low, high, n + 1, dtype=dtype) for (low, high), n in zip(window, numbers, strict=True)]
        return cls.of_edges(edges, polygon=polygon, mask=mask)

    @classmethod
    def of_edges(cls, edges: Sequence[Tensor], *, polygon: Tensor | None = None, mask: Tensor | None = None) -> Grid:
        """Return a grid of given edges; the whole box is the window unless a polygon or a mask says otherwise.

        Args:
            edges: of the cells along each coordinate, D increasing vectors (n_d + 1,).
            polygon: the outline of the window (V, 2), in two dimensions.
            mask: which cells are in the window (n_1, ..., n_D), bool, or the fraction of each that is.

        Raises:
            TypeError: something else than tensors.
            ValueError: edges that do not increase, a polygon that crosses itself or is not in two dimensions, a mask of
                another shape, fractions outside [0, 1], both a polygon and a mask, or no cell inside.
        """
        if len(edges) == 0:
            raise ValueError("expected the edges of the cells along one coordinate or more; got none.")
        for axis in edges:
            check_tensor("edges", axis)
            check_finite("edges", axis)
            if axis.dim() != 1 or len(axis) < 2 or bool((axis.diff() <= 0).any()):
                raise ValueError(f"edges must be increasing vectors of two or more numbers; got {axis.tolist()}.")
        axes = [a if a.is_floating_point() else a.to(torch.get_default_dtype()) for a in edges]
        like = axes[0]
        shape = torch.Size([len(axis) - 1 for axis in axes])
        fractions = like.new_ones(shape)
        if polygon is not None and mask is not None:
            raise ValueError("give a polygon or a mask, not both; polygon_fractions makes a mask of a polygon.")
        if polygon is not None:
            if len(shape) != 2:
                raise ValueError(f"a polygon needs a grid in two dimensions; this one has {len(shape)}.")
            fractions = polygon_fractions(polygon, *axes).to(like)
            polygon = polygon.to(like)
        if mask is not None:
            check_tensor("mask", mask)
            check_finite("mask", mask)
            fractions = mask.to(like)
            if mask.shape != shape:
                raise ValueError(f"expected a mask {tuple(shape)}, one value of each cell; got {tuple(mask.shape)}.")
            if bool(((fractions < 0) | (fractions > 1)).any()):
                low, high = float(fractions.min()), float(fractions.max())
                raise ValueError(f"fractions of cells must be from 0 to 1; got {low:g} to {high:g}.")
        if not bool((fractions > 0).any()):
            raise ValueError("no cell has a part inside the window.")
        return cls(tuple(axes), fractions, polygon)

    @property
    def shape(self) -> torch.Size:
        """The number of cells along each coordinate."""
        return self.fractions.shape

    @property
    def is_inside(self) -> Tensor:
        """Whether each cell has a part inside the window (n_1, ..., n_D)."""
        return self.fractions > 0

    @property
    def inputs(self) -> Tensor:
        """The centres (M, D) of the cells that have a part inside."""
        centres = torch.meshgrid(*(0.5 * (axis[1:] + axis[:-1]) for axis in self.edges), indexing="ij")
        return torch.stack([self.take(centre) for centre in centres], -1)

    @property
    def exposure(self) -> Tensor:
        """The volumes inside the window (M,): lengths, areas, or products with durations."""
        sizes = torch.meshgrid(*(axis.diff() for axis in self.edges), indexing="ij")
        return self.take(self.fractions * math.prod(sizes[1:], start=sizes[0]))

    def take(self, values: Tensor) -> Tensor:
        """Return the values (..., M) of the cells inside, of a map (..., n_1, ..., n_D) such as a covariate."""
        dims = len(self.shape)
        if values.shape[-dims:] != self.shape:
            raise ValueError(f"expected a map (..., {', '.join(map(str, self.shape))}); got {tuple(values.shape)}.")
        return values.flatten(-dims)[..., self.is_inside.flatten()]

    def place(self, values: Tensor) -> Tensor:
        """Return a map (..., n_1, ..., n_D) of values (..., M), nan outside the window."""
        inside = self.is_inside.flatten()
        size = int(inside.sum())
        if values.dim() == 0 or values.size(-1) != size:
            raise ValueError(f"expected a value of each of {size} cells, (..., {size}); got {tuple(values.shape)}.")
        placed = torch.full((*values.shape[:-1], len(inside)), torch.nan, dtype=values.dtype, device=values.device)
        placed[..., inside] = values
        return placed.unflatten(-1, self.shape)

    def count(self, points: Tensor) -> Tensor:
        """Return the number of points in each cell (M,); a point on an edge belongs to the cell above it.

        Args:
            points: (N, D), or (N,) in one dimension; there may be none.

        Raises:
            TypeError: something else than a tensor.
            ValueError: another number of coordinates, numbers that are not finite, or a point outside the window.
        """
        check_tensor("points", points)
        check_finite("points", points)
        dims = len(self.edges)
        places = points.unsqueeze(-1) if points.dim() == 1 and dims == 1 else points
        if places.dim() != 2 or places.size(-1) != dims:
            raise ValueError(f"expected points (N, {dims}); got shape {tuple(points.shape)}.")
        index = torch.zeros(len(places), dtype=torch.long, device=points.device)
        outside = torch.zeros(len(places), dtype=torch.bool, device=points.device)
        for axis, column in zip(self.edges, places.unbind(-1), strict=True):
            # In the coarser of two dtypes: a boundary such as 0.7 is the same number in it.
            dtype = torch.float32 if torch.float32 in (axis.dtype, column.dtype) else axis.dtype
            edges, column = axis.to(dtype), column.to(dtype).contiguous()
            outside |= (column < edges[0]) | (column > edges[-1])
            cell = torch.searchsorted(edges, column, right=True) - 1
            index = index * (len(axis) - 1) + cell.clamp(0, len(axis) - 2)
        inside = self.is_inside.flatten()
        outside |= ~inside[index]
        if self.polygon is not None:
            outside |= ~inside_polygon(places, self.polygon)
        if bool(outside.any()):
            first = int(outside.nonzero()[0])
            place = ", ".join(f"{float(c):g}" for c in places[first])
            raise ValueError(
                f"points must be inside the window; {int(outside.sum())} are not, the first at index {first}: "
                f"({place})."
            )
        return torch.bincount(index, minlength=len(inside))[inside].to(self.fractions.dtype)
