"""phi(r) = (1 + r/nu)^(-(nu+1)/2): the Student-t, mixed by w ~ Gamma((nu+1)/2, rate nu) [GWO20 Tab. 1]."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.augmentations.radial import RadialFunction


@dataclass(frozen=True)
class StudentTRadial(RadialFunction):
    """The radial function of a Student-t density of unit scale.

    Args:
        deg_free: degrees of freedom nu > 0, broadcastable against the argument.
    """

    deg_free: Tensor

    def log_phi(self, r: Tensor) -> Tensor:
        """Return -(nu + 1)/2 log(1 + r/nu)."""
        return -0.5 * (self.deg_free + 1) * torch.log1p(r / self.deg_free)

    def mean(self, r: Tensor) -> Tensor:
        """Return (nu + 1) / (2 (nu + r)): the tilted Gamma((nu+1)/2, rate nu + r) has this mean."""
        return 0.5 * (self.deg_free + 1) / (self.deg_free + r)

    def strip(self) -> Tensor:
        """Return sqrt(nu): 1 + z^2/nu vanishes at z = i sqrt(nu)."""
        return self.deg_free.sqrt()
