"""Slice sampling in one coordinate, with stepping out and shrinkage, of a batch of chains at once [Neal 2003, Sec. 4].

No step size to tune and no rejection. The interval's width matters to cost alone; it may adapt while warming up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpext.schema import Numbers, Record

_MOST_STEPS_OUT = 50  # of both sides together, shared out at random beforehand, which keeps the move reversible
_MOST_SHRINKS = 200  # an interval has by then shrunk to rounding; the old value is always inside

_FIRST_WIDTH = 1.0  # of a slice, in unconstrained space; softplus and log make that about a factor e
_WIDTH_RATE = 0.1  # of its adaptation, step by step of the warm-up
_WIDTHS = 3.0  # a slice this many times the mean move wide finds its place in few evaluations

# (values (C,), which chains are asked for (C,) bool) -> log density (C,); what the others get does not matter
LogDensity = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class SliceWidths:
    """The widths of the first intervals of all coordinates, which adapt while warming up."""

    widths: Tensor  # (P,), on the CPU

    @classmethod
    def first(cls, size: int) -> SliceWidths:
        """Return those of so many coordinates before the first step."""
        return cls(torch.full((size,), _FIRST_WIDTH, dtype=torch.float64, device="cpu"))

    @classmethod
    def restored(cls, stored: object, size: int, where: str) -> SliceWidths:
        """Return those of so many coordinates that were stored.

        Raises:
            ValueError: it is something else.
        """
        Record({"widths": Numbers((size,), torch.float64)}).check(stored, where)
        assert isinstance(stored, dict)  # checked by the record
        return cls(**stored)

    def adapted(self, before: Tensor, after: Tensor) -> SliceWidths:
        """Return those after a step of the warm-up from coordinates (C, P) to others."""
        return SliceWidths(self.widths.lerp(_WIDTHS * (after - before).abs().mean(0).cpu(), _WIDTH_RATE))


def slice_step(
    value: Tensor, log_density: LogDensity, width: float, *, generator: torch.Generator | None = None
) -> Tensor:
    """Return the next value of each of C chains (C,), which leaves the density invariant.

    Args:
        value: where the chains are (C,).
        log_density: of the coordinate given all else, up to a constant of each chain; -inf where there is none.
        width: of the first interval.
        generator: for the random numbers.

    Raises:
        ValueError: the log density of a chain is not finite where it is.
    """

    def uniform() -> Tensor:
        return torch.rand(value.shape, dtype=value.dtype, device=value.device, generator=generator)

    everywhere = torch.ones_like(value, dtype=torch.bool)
    here = log_density(value, everywhere)
    if not bool(here.isfinite().all()):
        raise ValueError(
            f"slice sampling must begin where the density is finite and not zero; got log densities {here.tolist()} at "
            f"{value.tolist()}."
        )
    level = here + (1 - uniform()).log()  # log of a uniform draw on (0, density]

    low = value - width * uniform()
    high = low + width
    left = (uniform() * (_MOST_STEPS_OUT + 1)).floor()
    for edge, direction, most in ((low, -width, left), (high, width, _MOST_STEPS_OUT - left)):
        stepping, taken = most > 0, torch.zeros_like(value)
        while bool(stepping.any()):
            stepping = stepping & (log_density(edge, stepping) > level)
            edge += direction * stepping  # in place: low and high themselves
            taken += stepping
            stepping = stepping & (taken < most)

    result, searching = value.clone(), everywhere
    for _ in range(_MOST_SHRINKS):
        proposal = low + (high - low) * uniform()
        inside = searching & (log_density(proposal, searching) >= level)
        result = torch.where(inside, proposal, result)
        searching = searching & ~inside
        if not bool(searching.any()):
            break
        low = torch.where(searching & (proposal < value), proposal, low)
        high = torch.where(searching & (proposal >= value), proposal, high)
    return result


def slice_sweep(
    coordinates: Sequence[int],
    raw: Tensor,
    widths: Tensor,
    log_density: Callable[[Tensor, int, Any], Tensor],
    given: Sequence[Any],
    generator: torch.Generator,
) -> Tensor:
    """Return hyperparameters (C, P) after a slice in each of some coordinates.

    Args:
        coordinates: which, one after another.
        raw: (C, P).
        widths: of the slices (P,).
        log_density: (raw (P,), coordinate, what is given in a chain) -> log density ().
        given: of each chain.
        generator: for the random numbers.
    """
    for j in coordinates:

        def along(values: Tensor, which: Tensor, j: int = j, raw: Tensor = raw) -> Tensor:
            out = torch.full_like(values, -torch.inf)
            for chain in which.nonzero().flatten().tolist():
                trial = raw[chain].clone()
                trial[j] = values[chain]
                out[chain] = log_density(trial, j, given[chain])
            return out

        moved = slice_step(raw[:, j].clone(), along, float(widths[j]), generator=generator)
        raw = raw.clone()
        raw[:, j] = moved
    return raw
