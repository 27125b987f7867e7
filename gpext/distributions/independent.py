"""torch's Independent with draws from a generator."""

from __future__ import annotations

import torch
from gpytorch.distributions import base_distributions
from torch import Tensor

from gpext.distributions.drawing import drawn_from


class Independent(base_distributions.Independent):
    """Independent whose `sample` takes a generator.

    Example:
        >>> import torch
        >>> from gpext.distributions import Gamma
        >>> two = Gamma(torch.ones(2), torch.ones(2))
        >>> Independent(two, 1).sample(generator=torch.Generator().manual_seed(0)).shape
        torch.Size([2])
    """

    def sample(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws of shape sample_shape + batch_shape + event_shape; from torch's global generator by default."""
        with drawn_from(generator):
            return super().sample(torch.Size(sample_shape))
