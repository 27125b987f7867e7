"""The state of chains between two steps: everything needed to resume, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpext.schema import Anything, Record, like


@dataclass(frozen=True)
class ChainState:
    """C chains that share a generator; as :func:`as_stored`, plain enough for torch.load(weights_only=True)."""

    raw: Tensor  # hyperparameters in coordinates without bounds (C, P), float64
    latent: Tensor  # f (C, ..., N), float64; (C, 0) where f is integrated out
    kernel: Any  # state of the transition kernel besides the values: a frozen dataclass
    # The engine fills in the rest.
    generator_state: Tensor = field(default_factory=partial(torch.empty, 0, dtype=torch.uint8, device="cpu"))
    warmup_left: int = 0  # steps
    since_draw: int = 0  # steps since the last draw that was kept
    num_draws: int = 0  # kept so far
    origin: dict[str, Any] = field(default_factory=dict)  # what the draws are of, see `check_origin`

    @property
    def num_chains(self) -> int:
        """C."""
        return self.raw.size(0)

    def on(self, device: torch.device | str) -> ChainState:
        """Return it with its values on a device."""
        return replace(self, raw=self.raw.to(device), latent=self.latent.to(device))


def check_origin(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuse draws of another posterior, or by another sampler: they cannot be resumed.

    Args:
        found: what draws are of, by name: words, numbers, and floats that are fingerprints of data.
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
            f"expected draws that this sampler can resume, {name} {own}; got {known}. Build the sampler as it was "
            "built for them, or begin anew, in another directory."
        )


def as_stored(value: Any) -> Any:
    """Return a state, or a part of one, as dictionaries and tuples, to be written."""
    if is_dataclass(value):
        return {field.name: as_stored(getattr(value, field.name)) for field in fields(value)}
    return tuple(as_stored(part) for part in value) if isinstance(value, tuple) else value
