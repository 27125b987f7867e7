"""Checkpoints of training by minibatches: written by one rank for all of them, completely or not at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpytorch.mlls import MarginalLogLikelihood
from torch import Tensor

from gpext.callers import warn_caller
from gpext.files import Pace, load, save
from gpext.parallel import Ranks, fingerprint
from gpext.schema import Anything, Each, Numbers, Record, Schema, like

_FILE = "fit.pt"
_KEYS = ("mll", "ranks")
_CURE = "Repeat the call that wrote it, or give another directory."


class CheckpointWarning(UserWarning):
    """A checkpoint could not be written; training continues, and the last one written stays."""


class Checkpoint:
    """A file from which training resumes.

    Args:
        directory: created if necessary; all ranks wait for rank 0, which alone reads and writes it.
        mll: the objective, whose parameters and buffers are kept.
        ranks: the processes that train.
        data: of this rank, by which the run is recognised.
        settings: numbers by which the run is recognised.
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
        self._run = {"data": fingerprint([each.double() for each in data]), **numbers}
        self._pace = Pace()

    @property
    def is_due(self) -> bool:
        """Whether another checkpoint is due, by the clock of rank 0."""
        return self._ranks.rank == 0 and self._pace.is_due()

    def read(self, position: Schema) -> tuple[dict[str, Any], list[float]] | None:
        """Restore the parameters, and return this rank's position and trace; None if there is no checkpoint.

        Args:
            position: of a rank, see :mod:`gpext.training.position`.

        Raises:
            ValueError: the file is damaged, or of another number of ranks, another model, other data or settings, or an
                entry, which is named, is not what it should be; nothing has changed then.
        """

        def found() -> dict[str, Any] | None:
            return load(self._path, _KEYS)[0] if self._ranks.rank == 0 and self._path.exists() else None

        content = self._ranks.gather(self._ranks.together(found))[0]
        if content is None:
            return None
        state = self._ranks.together(lambda: self._checked(content, position))
        self._mll.load_state_dict(content["mll"])
        return state["position"], state["trace"].tolist()

    def _checked(self, content: dict[str, Any], position: Schema) -> dict[str, Any]:
        """Return this rank's part of a checkpoint, after checking that it is complete and of this run.

        From the checkpoint of another run, training would ignore this run's data.
        """
        Each(Anything()).check(content["ranks"], f"{self._path}['ranks']")
        if len(content["ranks"]) != self._ranks.size:
            raise ValueError(
                f"{self._path} was written by {len(content['ranks'])} ranks; there are {self._ranks.size} now. Start "
                "as many, or give another directory."
            )
        self._check_model(content["mll"])
        state, where = content["ranks"][self._ranks.rank], f"{self._path}['ranks'][{self._ranks.rank}]"
        trace = Numbers((None,), torch.float64)
        Record({"position": position, "trace": trace, "run": like(self._run)}).check(state, where)
        for name, value in state["run"].items():
            if not math.isclose(value, self._run[name], rel_tol=1e-9, abs_tol=1e-9):
                what = "fingerprint of the data" if name == "data" else name.replace("_", " ")
                raise ValueError(
                    f"{self._path} is of another run: its {what} is {value:.9g}, this one's {self._run[name]:.9g}. "
                    f"{_CURE}"
                )
        return state

    def _check_model(self, saved: Any) -> None:
        """Raise for parameters and buffers that are not of this model, or not finite where its own are."""
        if not isinstance(saved, dict) or not all(isinstance(value, Tensor) for value in saved.values()):
            raise ValueError(f"{self._path}['mll'] must be a dictionary of tensors. {_CURE}")
        found, own = ({k: _kind(t) for k, t in each.items()} for each in (saved, self._mll.state_dict()))
        if found != own:
            other = sorted(f"{k} {each[k]}" for each in (found, own) for k in each if found.get(k) != own.get(k))
            raise ValueError(f"{self._path} is of another model: they differ in {', '.join(other)}. {_CURE}")
        for name, value in self._mll.state_dict().items():
            same = saved[name] == value.cpu()  # a constraint's bound may be infinite
            if not bool((saved[name].isfinite() | same).all()):
                raise ValueError(f"{self._path}['mll']['{name}'] must be finite; got NaN or an infinite number in it.")

    def write(self, position: dict[str, Any], trace: Sequence[float]) -> None:
        """Write the parameters and the positions of all ranks, unless parameters or objective are not finite."""
        is_finite = all(bool(p.isfinite().all()) for p in self._mll.parameters()) and all(map(math.isfinite, trace))
        if self._ranks.any(not is_finite):
            self._warn("the parameters or the objective are NaN or infinite")
            return
        with self._pace.writing():
            values = torch.tensor(trace, dtype=torch.float64, device="cpu")
            states = self._ranks.gather(_on_cpu({"position": position, "trace": values, "run": self._run}))
            if self._ranks.rank == 0:
                try:
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    save({"mll": _on_cpu(dict(self._mll.state_dict())), "ranks": states}, self._path)
                except OSError as error:
                    self._warn(str(error))
            self._ranks.any(False)  # no rank continues, or returns, before the file is there

    def _warn(self, reason: str) -> None:
        if self._ranks.rank == 0:
            warn_caller(f"no checkpoint was written, the last one stays: {reason}.", CheckpointWarning)


def _kind(t: Tensor) -> str:
    """Return the shape and dtype of a tensor, to be compared and shown."""
    return f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"


def _on_cpu(item: Any) -> Any:
    """Return a copy with its tensors on the CPU: another rank may not have this one's device."""
    if isinstance(item, Tensor):
        return item.cpu()
    if isinstance(item, dict):
        return {key: _on_cpu(value) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return type(item)(_on_cpu(value) for value in item)
    return item
