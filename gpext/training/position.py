"""The stored state of training by minibatches, and the schema that it must satisfy to be resumed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpext.schema import Anything, Each, GeneratorState, Items, Number, Numbers, Record, Schema, like_record

_COUNT = Number(whole=True, least=0)
_POSITIVE = Number(least=math.nextafter(0.0, 1.0))


def position(batches: dict[str, Any], optimizers: Sequence[torch.optim.Optimizer], objective: float) -> dict[str, Any]:
    """Return the state from which training resumes, besides the model: that of its minibatches and optimisers.

    `stepped` lists the parameters for which an optimiser has a state: those that have had a gradient.
    """
    states = [optimizer.state_dict() for optimizer in optimizers]
    known = [{key: each[key] for key in ("state", "param_groups")} for each in states]
    stored = [{**each, "stepped": sorted(each["state"])} for each in known]
    return {"batches": batches, "optimizers": stored, "objective": objective}


def load_optimizers(optimizers: Sequence[torch.optim.Optimizer], stored: Sequence[dict[str, Any]]) -> None:
    """Restore the state of optimisers from a stored one that has been checked."""
    for optimizer, each in zip(optimizers, stored, strict=True):
        optimizer.load_state_dict({key: each[key] for key in ("state", "param_groups")})


@dataclass(frozen=True)
class PositionSchema(Schema):
    """The schema of the result of :func:`position`, for these optimisers."""

    optimizers: Sequence[torch.optim.Optimizer]

    def check(self, value: Any, name: str) -> None:
        """See :meth:`gpext.schema.Schema.check`."""
        batches = Record({"generator": GeneratorState(torch.device("cpu")), "num_drawn": _COUNT})
        optimizers = Items(tuple(_OptimizerSchema(each) for each in self.optimizers))
        Record({"batches": batches, "optimizers": optimizers, "objective": Anything()}).check(value, name)
        # There is no objective before the first step in the hyperparameters.
        is_nan = isinstance(value["objective"], float) and math.isnan(value["objective"])
        if any(each["stepped"] for each in value["optimizers"]) or not is_nan:
            Number().check(value["objective"], f"{name}['objective']")


@dataclass(frozen=True)
class _OptimizerSchema(Schema):
    """The state of an optimiser of this class and these parameters: Adam, or one that has no state."""

    optimizer: torch.optim.Optimizer

    def check(self, value: Any, name: str) -> None:
        """See :meth:`gpext.schema.Schema.check`."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        groups = [like_record(group, lr=_POSITIVE) for group in self.optimizer.state_dict()["param_groups"]]
        stepped = value.get("stepped") if isinstance(value, dict) else None
        Each(_Index(len(parameters))).check(stepped, f"{name}['stepped']")
        known = {index: _adam(parameters[index]) for index in stepped or ()}
        Record({"state": Record(known), "param_groups": Items(tuple(groups)), "stepped": Anything()}).check(value, name)


@dataclass(frozen=True)
class _Index(Schema):
    """A whole number from 0 to below a length."""

    length: int

    def check(self, value: Any, name: str) -> None:
        """See :meth:`gpext.schema.Schema.check`."""
        _COUNT.check(value, name)
        if value >= self.length:
            raise ValueError(f"{name} must be the number of one of {self.length} parameters; got {value}.")


def _adam(parameter: Tensor) -> Record:
    """Return the schema of Adam's state of a parameter."""
    moments = Numbers(tuple(parameter.shape), parameter.dtype)
    return Record({"step": Numbers((), None), "exp_avg": moments, "exp_avg_sq": moments})
