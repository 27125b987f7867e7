r"""A cover of the density of J(1, c) by strips of equal area, for a grid of tilts [Marsaglia & Tsang 1984].

    p(x | c) = cosh(c) e^{-c^2 x / 2} p(x | 0)
    p(x | 0) = sum_n (-1)^n sqrt(2 / (pi x^3)) (2n + 1) exp(-(2n + 1)^2 / (2x))
             = sum_n (-1)^n (pi / 2) (2n + 1) exp(-(2n + 1)^2 pi^2 x / 8)

A strip is an interval times a bound of the density there: draw a strip, all being equally likely, a point of its
interval, and accept it with probability density / bound. Left of the mode the bound is the density at the right edge,
right of it at the left edge; at the other edge it is smallest, which decides nearly always. The last strip is the tail,
bounded by the first term of the second series.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

NUM_STRIPS = 256
TILTS_PER_UNIT = 32
LARGEST_TILT = 6.0  # above it one inverse Gaussian covers the density nearly as well
_SLACK = 1 + 1e-6  # on every bound: the mode is known to 1e-5
_TERMS = 4  # of either series: the next one is below 1e-25 of the first


@dataclass(frozen=True)
class Strips:
    """For tilt j and strip k the entry j NUM_STRIPS + k, all float64 (J NUM_STRIPS,)."""

    left: Tensor
    width: Tensor  # zero for the tail
    squeeze: Tensor  # the smallest density / bound there; negative where it is not known
    weight: Tensor  # density / bound = weight p(x | 0) e^{-c_j^2 x / 2}, in the tail times e^{(pi^2 / 8 + c_j^2 / 2) x}

    def to(self, device: torch.device) -> Strips:
        """The same on another device."""
        return Strips(*(t.to(device) for t in (self.left, self.width, self.squeeze, self.weight)))


def density(x: Tensor) -> Tensor:
    """p(x | 0) for x > 0, to rounding."""
    near = x < 0.75
    odd = torch.arange(1, 2 * _TERMS, 2, dtype=x.dtype, device=x.device)
    signed = odd * torch.tensor([1.0, -1.0], dtype=x.dtype, device=x.device).repeat(_TERMS // 2)
    small = torch.where(near, x, 0.75)  # the first series ends in powers of e^{-1 / (2 x)}, the second in those of e^-x
    rate = torch.where(near, 0.5 / small, math.pi**2 / 8 * x)
    scale = torch.where(near, (2 / math.pi * small**-3).sqrt(), math.pi / 2)
    return scale * (torch.exp(-odd.square() * rate.unsqueeze(-1)) @ signed)


@lru_cache(maxsize=1)
def strips() -> Strips:
    """The strips for c = 0, 1/32, ..., 6, on the CPU; made at the first use, in some 0.3 s."""
    squares = torch.arange(0, LARGEST_TILT, 1 / TILTS_PER_UNIT, dtype=torch.float64).square()  # (J,)
    x = torch.linspace(0.1, 0.5, 4001, dtype=torch.float64).unsqueeze(-1)
    mode = x[(density(x).log() - 0.5 * squares * x).argmax(0), 0]
    area = torch.full_like(squares, 1.01 / NUM_STRIPS)
    while True:
        table, needed = _cover(squares, mode, area / torch.cosh(squares.sqrt()))
        if bool((needed <= NUM_STRIPS).all()):
            return table
        area = area * (needed / NUM_STRIPS).clamp_min(1)


def _cover(squares: Tensor, mode: Tensor, area: Tensor) -> tuple[Strips, Tensor]:
    """The first strips of this area (J,) from the mode to both sides, and how many are needed; p without cosh(c)."""
    rate = math.pi**2 / 8 + 0.5 * squares

    def height(x: Tensor) -> Tensor:
        return density(x) * torch.exp(-0.5 * squares * x)

    def march(direction: int) -> tuple[Tensor, Tensor, Tensor]:
        """Edges (S + 1, J) and heights there from the mode outwards, and which of the (S, J) strips are needed."""
        edges, heights, needed = [mode], [height(mode)], []
        while True:
            edge = edges[-1]
            tail = math.pi / 2 / rate * torch.exp(-rate * edge)
            needed.append(edge > 0 if direction < 0 else tail > area)
            if len(needed) > NUM_STRIPS or not bool(needed[-1].any()):
                return torch.stack(edges), torch.stack(heights), torch.stack(needed[:-1])
            step = torch.where(needed[-1], area / heights[-1], 0.0)
            edges.append((edge + direction * step).clamp_min(0))
            # At 0 the density is 0; 1e-3 stands for it.
            heights.append(height(edges[-1].clamp_min(1e-3)))

    left, left_height, left_needed = march(-1)
    right, right_height, right_needed = march(1)
    starts = torch.cat([left[1:], right[:-1]])
    widths = torch.cat([left[:-1] - left[1:], right[1:] - right[:-1]])
    lowest = torch.cat([left_height[1:], right_height[1:]])
    needed = torch.cat([left_needed, right_needed])
    tail = torch.exp(-rate * right[-1]) / (area * rate)
    columns = (
        torch.cat([starts, right[-1:]]),
        torch.cat([widths, 0 * area.unsqueeze(0)]),
        torch.cat([lowest * widths / area, -area.new_ones(1, len(area))]) / _SLACK,
        torch.cat([widths / area, tail.unsqueeze(0)]) / _SLACK,
    )
    needed = torch.cat([needed, torch.ones_like(needed[:1])])
    # The needed ones first; what is left over has weight and squeeze zero: it rejects.
    order = (~needed).long().argsort(stable=True, dim=0)[:NUM_STRIPS]
    used = needed.gather(0, order)
    chosen = [torch.where(used, column.gather(0, order), 0.0).T.flatten() for column in columns]
    return Strips(*chosen), needed.sum(0)
