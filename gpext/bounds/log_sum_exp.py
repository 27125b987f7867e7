r"""E[log sum_k exp(f_k)] by Jensen's inequality [Blei & Lafferty 2006; KMM12 Sec. 4].

    E[log sum_k exp(f_k)] <= log sum_k E[exp(f_k)] = log sum_k exp(m_k + v_k / 2)

The bound on E[log p(y | f)] is jointly concave in (m, v).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpext.bounds.multinomial import MultinomialBound


class LogSumExp(MultinomialBound):
    """Blei & Lafferty's bound: no parameter, no loop; loose where some v_k is large.

    Example:
        >>> import torch
        >>> from gpext.inference import KL
        >>> from gpext.likelihoods import MultinomialLogitLikelihood
        >>> bound = LogSumExp().bind(MultinomialLogitLikelihood(3), torch.tensor([0]))
        >>> bound(torch.zeros(3, 1), torch.zeros(3, 1))  # -log 3: tight without variance
        tensor([-1.0986], dtype=torch.float64)
    """

    def expected_log_sum_exp(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return log sum_k exp(m_k + v_k / 2), (..., N)."""
        return torch.logsumexp(mean + 0.5 * variance, -2)
