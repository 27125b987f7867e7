r"""The exact expectation: the tightest "bound", to quadrature tolerance."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gpext.augmentations import SechRadial
from gpext.bounds.bound import LocalBound, SoftplusBound
from gpext.bounds.conditional import conditional_log_prob
from gpext.bounds.contracts import HasExpectedLogDensity
from gpext.quadrature import expectation


class Quadrature(SoftplusBound):
    """E_q[log p(y | f)] itself.

    For gpext's likelihoods by their own rules (closed forms where there are some); for any other gpytorch likelihood of
    one latent by adaptive quadrature of `forward(f).log_prob(y)`. The likelihood's parameters must not depend on the
    datum other than through broadcasting against the targets.

    Example:
        >>> import torch
        >>> y, m, v = torch.ones(1), torch.zeros(1), torch.ones(1)
        >>> Quadrature()(y, m, v)  # E[log sigmoid(f)]
        tensor([-0.8061])
    """

    def expected_softplus(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return E[log(1 + e^x)] = m / 2 + E[log cosh(x / 2)] + log 2."""
        one = torch.ones((), dtype=mean.dtype, device=mean.device)
        return 0.5 * mean + math.log(2) - SechRadial(one).expected_log_phi(0.5 * mean, 0.25 * variance)

    def bind(self, likelihood: Any, targets: Tensor) -> LocalBound:
        """Return E_q[log p(y | f)] as a function of the marginals."""
        if isinstance(likelihood, HasExpectedLogDensity):
            return lambda mean, variance: likelihood.expected_log_density(targets, mean, variance)

        def exact(mean: Tensor, variance: Tensor) -> Tensor:
            return expectation(lambda f: conditional_log_prob(likelihood, targets, f), mean, variance)

        return exact
