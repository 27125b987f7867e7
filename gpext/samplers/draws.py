"""Draws of any sampler: by name, how they came about, and whether the chains agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from gpext.samplers.exporting import to_arviz
from gpext.samplers.split_r_hat import largest_r_hat
from gpext.samplers.state import ChainState
from gpext.samplers.status import SamplingStatus
from gpext.samplers.storage import Chunks
from gpext.samplers.targets.chain_target import ChainTarget

if TYPE_CHECKING:
    import arviz

NUM_DRAWS = 200  # that predictions average over by default
WELL_MIXED = 1.01  # split R-hat, as [Vehtari et al. 2021] recommend


@dataclass(frozen=True)
class Draws:
    """Draws of C chains, S each.

    Attributes:
        chunks: the draws, some of them on disk.
        states: of the chains, from which `run(..., resume=)` continues; chains that move together share one.
        status: how it ended.
        message: one sentence on how it went.
        seconds: time spent on the last run.
        r_hat: the largest split R-hat of all that is drawn; nan with fewer than four draws.
        acceptance: of proposals, a chain (C,); nan where nothing is rejected.
    """

    target: ChainTarget = field(repr=False)
    chunks: Chunks = field(repr=False)
    states: tuple[ChainState, ...] = field(repr=False)
    status: SamplingStatus
    message: str
    seconds: float
    r_hat: float
    acceptance: Tensor = field(repr=False)

    @property
    def num_chains(self) -> int:
        """C."""
        return sum(state.num_chains for state in self.states)

    @property
    def num_draws(self) -> int:
        """S."""
        return self.chunks.num_draws

    @cached_property
    def raw(self) -> Tensor:
        """Draws of the hyperparameters that moved (C, S, P), in the coordinates of the target, without bounds."""
        nothing = torch.cat([state.raw for state in self.states]).unsqueeze(1)[:, :0].cpu()
        return torch.cat([nothing, *(chunk.raw for chunk in self.chunks)], 1)

    @cached_property
    def hyperparameters(self) -> dict[str, Tensor]:
        """Draws of the hyperparameters that moved (C, S, *shape), constrained, by parameter name without `raw_`."""
        return self.target.constrained(self.raw)

    @property
    def draws(self) -> dict[str, Tensor]:
        """All that is drawn (C, S, *shape) by name."""
        return self.hyperparameters

    def to_arviz(self) -> arviz.InferenceData:
        """Return the draws for ArviZ: its diagnostics, tables and plots; a `DataTree` from ArviZ 1.0 on.

        Raises:
            ImportError: ArviZ is not installed.
        """
        return to_arviz({"posterior": self.draws})

    def chosen(self, num_draws: int) -> Tensor:
        """Return the numbers of at most so many draws, evenly spaced: that of draw s of chain c is c S + s.

        Raises:
            ValueError: there are none.
        """
        if num_draws < 1:
            raise ValueError(f"num_draws must be at least 1; got {num_draws}.")
        total = self.num_draws * self.num_chains
        if not total:
            raise ValueError("there are no draws to predict from; continue with run(..., resume=draws).")
        return torch.linspace(0, total - 1, min(num_draws, total), dtype=torch.float64, device="cpu").round().long()

    def take(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the latent values (S', ..., N) and coordinates (S', P) of the draws with these numbers (S',)."""
        chain, draw = numbers // self.num_draws, numbers % self.num_draws
        places, latent, raw, start = [], [], [], 0
        for chunk in self.chunks:
            here = ((draw >= start) & (draw < start + chunk.size)).nonzero().squeeze(-1)
            at = chain[here], draw[here] - start
            places.append(here)
            latent.append(chunk.latent[at].double())
            raw.append(chunk.raw[at])
            start += chunk.size
        order = torch.cat(places).argsort()
        return torch.cat(latent)[order], torch.cat(raw)[order]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run."""

    chunks: Chunks
    states: Sequence[ChainState]
    status: SamplingStatus | None  # None where it ended because it was done
    note: str
    seconds: float


Kind = TypeVar("Kind", bound=Draws)


def conclude(kind: type[Kind], name: str, target: ChainTarget, outcome: Outcome, acceptance: Tensor) -> Kind:
    """Return the draws of a run, with a message.

    Args:
        kind: of draws.
        name: of the sampler.
        target: what was sampled.
        outcome: of the run.
        acceptance: of proposals, a chain (C,).
    """
    chunks, status = outcome.chunks, outcome.status
    r_hat = largest_r_hat(chunks)
    if status is None:
        status = SamplingStatus.MIXED if r_hat < WELL_MIXED else SamplingStatus.NOT_MIXED
    accepted = "" if bool(acceptance.isnan().all()) else f"acceptance {acceptance.nanmean().item():.2f}, "
    message = (
        f"{name}, {len(acceptance)} chains of {chunks.num_draws} draws in {outcome.seconds:.1f} s, {accepted}largest "
        f"split R-hat {r_hat:.4f}: {status.value}"
        + (f" ({outcome.note})" if outcome.note else "")
        + (f"; jitter {target.jitter:g}." if target.jitter else ".")
    )
    return kind(target, chunks, tuple(outcome.states), status, message, outcome.seconds, r_hat, acceptance)
