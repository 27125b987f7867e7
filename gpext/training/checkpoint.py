"""Where training by minibatches stands, on disk: written by one rank for all of them, whole or not at all."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor

from gpext.callers import warn_caller
from gpext.files import load, save
from gpext.parallel import Ranks, mark

_SECONDS = 60.0  # between two checkpoints
_FILE = "fit.pt"
_KEYS = ("mll", "ranks")
_CURE = "Repeat the call that wrote it, or give another directory."


class CheckpointWarning(UserWarning):
    """A checkpoint could not be written; training goes on, and the last one written stays."""


class Checkpoint:
    """A file that training goes on from.

    Args:
        directory: made if need be; all ranks wait for rank 0, which alone reads and writes it.
        mll: the objective, whose parameters and buffers are kept.
        ranks: who trains.
        data: of this rank, by which the run is known again.
        settings: numbers, likewise.
    """

    def __init__(
        self,
        directory: str | Path,
        mll: MarginalLogLikelihood,
        ranks: Ranks,
        data: Sequence[Tensor],
        settings: dict[str, float],
    ) -> None:
        self._path, self._mll, self._ranks = Path(directory) / _FILE, mll, ranks
        numbers = {name: float(value) for name, value in settings.items()}
        self._run = {"data": mark([each.double() for each in data]), **numbers}
        self._written = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether it is time for another, as rank 0 sees it."""
        return self._ranks.rank == 0 and time.monotonic() - self._written > _SECONDS

    def read(self) -> dict[str, Any] | None:
        """Put the parameters back, and return this rank's state, if something was written.

        Raises:
            ValueError: the file is damaged, or of another number of ranks, another model, other data or settings;
                nothing has changed then.
        """

        def found() -> dict[str, Any] | None:
            return load(self._path, _KEYS) if self._ranks.rank == 0 and self._path.exists() else None

        content = self._ranks.gather(self._ranks.together(found))[0]
        if content is None:
            return None
        if len(content["ranks"]) != self._ranks.size:
            raise ValueError(
                f"{self._path} was written by {len(content['ranks'])} ranks; there are {self._ranks.size} now. Start "
                "as many, or give another directory."
            )
        state = content["ranks"][self._ranks.rank]
        self._ranks.together(lambda: self._check(content["mll"], state["run"]))
        self._mll.load_state_dict(content["mll"])
        return state

    def _check(self, saved: dict[str, Tensor], run: dict[str, float]) -> None:
        """Refuse a checkpoint of another run: it would be taken for this one, and this one's data never seen."""
        shapes, own = ({k: tuple(t.shape) for k, t in each.items()} for each in (saved, self._mll.state_dict()))
        if shapes != own:
            other = sorted(f"{k} {each[k]}" for each in (shapes, own) for k in each if shapes.get(k) != own.get(k))
            raise ValueError(f"{self._path} is of another model: they differ in {', '.join(other)}. {_CURE}")
        for name, value in run.items():
            if not math.isclose(value, self._run[name], rel_tol=1e-9, abs_tol=1e-9):
                raise ValueError(
                    f"{self._path} is of another run: its {name.replace('_', ' ')} has the mark {value:.9g}, this "
                    f"one's {self._run[name]:.9g}. {_CURE}"
                )

    def write(self, state: dict[str, Any]) -> None:
        """Write the parameters and the states of all ranks."""
        states = self._ranks.gather(_on_cpu({**state, "run": self._run}))
        if self._ranks.rank == 0:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                save({"mll": self._mll.state_dict(), "ranks": states}, self._path)
            except OSError as error:
                warn_caller(f"no checkpoint was written: {error}.", CheckpointWarning)
        self._ranks.any(False)  # no rank goes on, or home, before it is there
        self._written = time.monotonic()


def _on_cpu(item: Any) -> Any:
    """Return the same with its tensors on the CPU: another rank may not have this one's device."""
    if isinstance(item, Tensor):
        return item.cpu()
    if isinstance(item, dict):
        return {key: _on_cpu(value) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return type(item)(_on_cpu(value) for value in item)
    return item
