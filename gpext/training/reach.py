"""A limit to line searches: positive parameters that nearly vanish in one step are not worth an inference.

Behind a softplus a step of 200 takes a noise from 1e-10 to 1e-97, where the inference takes all the steps it may and
finds nothing. Such a point is rejected before it is evaluated, and the line search steps back; so is one outside the
bounds of a constraint that no transform enforces, as BoTorch's models have.
"""

from __future__ import annotations

import torch
from gpytorch.mlls import MarginalLogLikelihood

from gpext.training.diagnostics import trained_constraints

_FALL = 1e-8  # of the value at the best point so far, in one step


class Reach:
    """The positive parameters of an objective at its best point so far."""

    def __init__(self, mll: MarginalLogLikelihood) -> None:
        # found once: a walk through all modules takes a tenth of an evaluation of a hundred data
        self._constrained = list(trained_constraints(mll))
        self.keep()

    def keep(self) -> None:
        """Remember the current parameters as the best."""
        self._best = [
            constraint.transform(parameter.detach()).clone() for _, parameter, constraint in self._constrained
        ]

    def check(self) -> None:
        """Raise LinAlgError, from which a line search steps back, where a parameter is out of reach or of bounds."""
        for (name, parameter, constraint), best in zip(self._constrained, self._best, strict=True):
            if not constraint.enforced and not constraint.check_raw(parameter):
                raise torch.linalg.LinAlgError(f"{name} left the bounds of {constraint}.")
            value = constraint.transform(parameter.detach())
            if bool(((best > 0) & (value >= 0) & (value < _FALL * best)).any()):
                raise torch.linalg.LinAlgError(f"{name} fell more than {1 / _FALL:.0e} times in one step.")
