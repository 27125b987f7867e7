"""Where chains are: all that it takes to go on, exactly."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
