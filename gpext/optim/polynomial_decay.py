"""The step sizes of Langevin dynamics, falling until the noise of the gradients is negligible."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from gpext.optim.sgld import SGLD


class PolynomialDecay(LRScheduler):
    """Step sizes a (b + t)^-gamma, which stay once the noise of the gradients is negligible [FE15 Eq. 7].

    Args:
        optimizer: whose `lr` to set.
        a: positive.
        b: positive.
        gamma: in [0, 1]; draws converge for gamma in (1/2, 1], and at 0 the step size stays.
        freeze_below: the ratio of :meth:`SGLD.noise_ratio` at which to stop; 0 never to.

    Raises:
        ValueError: a number outside its range.

    Example:
        >>> import torch
        >>> from gpext.optim import SGLD
        >>> optimizer = SGLD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        >>> schedule = PolynomialDecay(optimizer, a=0.1, b=1.0, gamma=0.5)
        >>> round(optimizer.param_groups[0]["lr"], 3)
        0.1
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, a: float, b: float, gamma: float, *, freeze_below: float = 0.0
    ) -> None:
        check_decay(a, b, gamma, freeze_below)
        self.a, self.b, self.gamma, self.freeze_below = a, b, gamma, freeze_below
        self.frozen_at: int | None = None  # the step from which on the size stays
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Return the step sizes of this step."""
        current = [group["lr"] for group in self.optimizer.param_groups]
        if self.frozen_at is None and isinstance(self.optimizer, SGLD) and freezes(self.optimizer, self.freeze_below):
            self.frozen_at = self.last_epoch
        if self.frozen_at is not None:
            return current
        return [decayed(self.last_epoch, self.a, self.b, self.gamma)] * len(current)


def check_decay(a: float, b: float, gamma: float, freeze_below: float) -> None:
    """Raise ValueError if a number of the schedule is outside its range."""
    if not (a > 0 and b > 0 and 0 <= gamma <= 1 and freeze_below >= 0):
        raise ValueError(
            f"expected a, b > 0, gamma in [0, 1] and freeze_below >= 0; got {a}, {b}, {gamma}, {freeze_below}."
        )


def decayed(step: int, a: float, b: float, gamma: float) -> float:
    """Return the step size a (b + t)^-gamma."""
    return a * (b + step) ** -gamma


def freezes(optimizer: SGLD, below: float) -> bool:
    """Return whether the noise of the gradients is negligible: whether its ratio is below this one."""
    return below > 0 and optimizer.noise_ratio() < below
