"""Where the chains of a Gibbs sampler are: all that it takes to go on, exactly."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ChainState:
    """C chains between two sweeps."""

    latent: Tensor  # f (C, ..., N), float64
    raw: Tensor  # hyperparameters in unconstrained space (C, P), float64
    widths: Tensor  # of the slices (P,)
    generator_state: Tensor
    warmup_left: int  # sweeps
    since_draw: int  # sweeps since the last draw that was kept
    num_draws: int  # kept so far
