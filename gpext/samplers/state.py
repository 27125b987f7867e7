"""Where chains are: all that it takes to go on, exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from gpext.schema import Anything, Record, Schema, like

State = TypeVar("State", "ChainState", "WalkState")


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
    Record({name: Anything() for name in expected}).check(dict(found), "the record of what the draws are of")
    for name, own in expected.items():
        known = found[name]
        if isinstance(own, list):
            if not isinstance(known, list) or not all(isinstance(part, str | int) for part in known):
                raise ValueError(f"expected a list for {name}, of which the draws are; got {known!r:.60}.")
        else:
            like(own).check(known, f"{name}, of which the draws are,")
        if math.isclose(known, own, rel_tol=1e-9) if isinstance(own, float) else known == own:
            continue
        if isinstance(own, list):
            own, known = ([part for part in a if part not in b] for a, b in ((own, known), (known, own)))
        raise ValueError(
            f"expected draws that this sampler can go on with, {name} {own}; got {known}. Build the sampler as it was "
            "built for them, or begin anew, in another directory."
        )


def as_stored(state: ChainState | WalkState) -> dict[str, Any]:
    """Return a state as a dictionary of its fields, to be written."""
    return {field.name: getattr(state, field.name) for field in fields(state)}


def restored(
    kind: type[State], stored: object, origin: Mapping[str, Any], entries: Mapping[str, Schema], where: str
) -> State:
    """Return the state that was stored, once it is known to be one that chains of this sampler can go on from.

    Args:
        kind: of state.
        stored: as :func:`as_stored`.
        origin: what this sampler's draws are of.
        entries: the schemas of its fields.
        where: it was stored.

    Raises:
        ValueError: it is something else; the entry is named.
    """
    if not isinstance(stored, dict) or not isinstance(stored.get("origin"), dict):
        raise ValueError(f"{where} must be a dictionary with an entry 'origin', itself one; got {stored!r:.60}.")
    check_origin(stored["origin"], origin)
    Record({"origin": Anything(), **entries}).check(stored, where)
    return kind(**stored)
