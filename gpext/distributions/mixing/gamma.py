"""torch's Gamma with draws from a generator."""

from __future__ import annotations

import torch
from gpytorch.distributions import base_distributions
from torch import Tensor


class Gamma(base_distributions.Gamma):
    """Gamma whose `sample` takes a generator.

    Example:
        >>> import torch
        >>> Gamma(2.0, 1.0).sample((3,), generator=torch.Generator().manual_seed(0)).shape
        torch.Size([3])
    """

    def sample(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws of shape sample_shape + batch_shape; positive even where they underflow."""
        with torch.no_grad():
            shape = self._extended_shape(torch.Size(sample_shape))
            draws = torch._standard_gamma(self.concentration.expand(shape), generator=generator)
            return (draws / self.rate).clamp_min(torch.finfo(draws.dtype).tiny)
