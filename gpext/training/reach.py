"""A limit to line searches: positive parameters that nearly vanish in one step are not worth an inference.

Behind a softplus a step of 200 takes a noise from 1e-10 to 1e-97, where the inference takes all the steps it may and
finds nothing. Such a point is rejected before it is evaluated, and the line search steps back.
"""

from __future__ import annotations

import torch
from gpytorch.mlls import MarginalLogLikelihood

from gpext.training.diagnostics import trained_parameters

_FALL = 1e-8  # of the value at the best point so far, in one step


class Reach:
    """The positive parameters of an objective at its best point so far."""

    def __init__(self, mll: MarginalLogLikelihood) -> None:
        self.mll = mll
        self.keep()

    def keep(self) -> None:
        """Remember the current parameters as the best."""
        self._best = trained_parameters(self.mll)

    def check(self) -> None:
        """Raise LinAlgError, from which a line search steps back, if a positive parameter has fallen too far."""
        for name, value in trained_parameters(self.mll).items():
            best = self._best[name]
            if bool(((best > 0) & (value >= 0) & (value < _FALL * best)).any()):
                raise torch.linalg.LinAlgError(f"{name} fell more than {1 / _FALL:.0e} times in one step.")
