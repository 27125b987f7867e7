"""Where chains are: all that it takes to go on, exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class ChainState:
    """C chains over latent values between two sweeps, a batch with one generator; plain enough for torch.load."""

    latent: Tensor  # f (C, ..., N), float64
    raw: Tensor  # hyperparameters in unconstrained space (C, P), float64
    widths: Tensor  # of the slices (P,)
    generator_state: Tensor
    warmup_left: int  # sweeps
    since_draw: int  # sweeps since the last draw that was kept
    num_draws: int  # kept so far
    walkers: tuple[dict[str, Any], ...] = ()  # what Langevin steps go on from, a chain each, if there are any
    origin: dict[str, Any] = field(default_factory=dict)  # what the draws are of, see `check_origin`

    def on(self, device: torch.device | str) -> ChainState:
        """Return it with what is computed with on a device."""
        moved = {name: getattr(self, name).to(device) for name in ("latent", "raw", "widths")}
        return replace(self, **moved)


@dataclass(frozen=True)
class WalkState:
    """C chains over hyperparameters alone, between two steps; plain enough for torch.load(weights_only=True)."""

    walkers: tuple[dict[str, Any], ...]  # what each goes on from, its generator included
    warmup_left: int  # steps
    since_draw: int  # steps since the last draw that was kept
    num_draws: int  # kept so far
    origin: dict[str, Any]  # what the draws are of, see `check_origin`


def check_origin(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuse draws of another posterior, or by another sampler: they cannot be gone on with.

    Args:
        found: what draws are of, by name: words, numbers, and floats that are marks of data.
        expected: what this sampler's are of.

    Raises:
        ValueError: they differ.
    """
    for name, own in expected.items():
        known = found[name]
        if math.isclose(known, own, rel_tol=1e-9) if isinstance(own, float) else known == own:
            continue
        if isinstance(own, list):
            own, known = ([part for part in a if part not in b] for a, b in ((own, known), (known, own)))
        raise ValueError(
            f"expected draws that this sampler can go on with, {name} {own}; got {known}. Build the sampler as it was "
            "built for them, or begin anew, in another directory."
        )
