"""What is stored of a Langevin chain, entry by entry, and which entries there are only after so many steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gpext.optim import SGLD, PolynomialDecay
from gpext.optim.sgld import WINDOW
from gpext.schema import (
    Anything,
    Each,
    Flag,
    GeneratorState,
    Items,
    Nothing,
    Number,
    Numbers,
    Record,
    Schema,
    like_record,
)

_CPU = torch.device("cpu")
_COUNT = Number(whole=True, least=0)
_POSITIVE = Number(least=5e-324)


@dataclass(frozen=True)
class LangevinSchema(Schema):
    """The state of a chain over P parameters, see :class:`gpext.samplers.sgld.Langevin`.

    Attributes:
        size: P.
        pairs: of estimates of the gradient, from which on their covariance is known to the optimiser.
    """

    size: int
    pairs: int

    def check(self, value: Any, name: str) -> None:
        """See :meth:`gpext.schema.Schema.check`."""
        P = self.size
        whole = {
            "place": Numbers((P,), torch.float64),
            "generator": GeneratorState(_CPU),
            "M": Numbers((P, P), torch.float64),
            "step_size": Anything(),
            "freeze_below": Number(least=0.0),
            "averaged": Flag(),
            "compensated": Flag(),
            "pairs": _COUNT,
            "V": Numbers((P, P), torch.float64),
            "warmup": _COUNT,
            "steps": _COUNT,
            "optimizer": Anything(),
            "schedule": Anything(),
        }
        Record(whole).check(value, name)
        if value["step_size"] is not None:
            Items((_POSITIVE, _POSITIVE, Number(least=0.0))).check(value["step_size"], f"{name}['step_size']")
        optimizer, schedule = self._after(value) if value["steps"] else (Nothing(), Nothing())
        optimizer.check(value["optimizer"], f"{name}['optimizer']")
        schedule.check(value["schedule"], f"{name}['schedule']")

    def _after(self, value: dict[str, Any]) -> tuple[Schema, Schema]:
        """Return the schemas of the optimiser and its schedule after the first step."""
        like_new = SGLD([torch.zeros(self.size, dtype=torch.float64)], lr=1.0)
        schedule: Schema = Nothing()
        if value["step_size"] is not None:
            new = PolynomialDecay(like_new, 1.0, 1.0, 0.0).state_dict()
            frozen = isinstance(value["schedule"], dict) and value["schedule"].get("frozen_at") is not None
            schedule = like_record(new, frozen_at=_COUNT if frozen else Nothing())
        groups = [like_record(group, lr=_POSITIVE) for group in like_new.state_dict()["param_groups"]]
        vector, matrix = (Numbers((self.size,) * order, torch.float64) for order in (1, 2))
        langevin = {
            "matrix": matrix,
            "is_identity": Flag(),
            "averaged": Flag(),
            "compensated": Flag(),
            "generator": GeneratorState(_CPU),
            "xi": vector if value["averaged"] else Nothing(),
            "gradient_noise": matrix if value["pairs"] >= self.pairs else Nothing(),
            "window": Each(vector, value["steps"] % WINDOW),
            "covariance": matrix if value["steps"] >= WINDOW else Nothing(),
        }
        entries = {"state": Record({}), "param_groups": Items(tuple(groups)), "langevin": Record(langevin)}
        return Record(entries), schedule
