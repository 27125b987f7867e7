r"""E[log sum_k exp(f_k)] by Jensen's inequality [Blei & Lafferty 2006; KMM12 Sec. 4].

    E[log sum_k exp(f_k)] <= log sum_k E[exp(f_k)] = log sum_k exp(m_k + v_k / 2)

The bound on E[log p(y | f)] is jointly concave in (m, v).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpext.bounds.multinomial import MultinomialBound


class LogSumExp(MultinomialBound):
    """Blei & Lafferty's bound: no parameter, no loop; loose where some v_k is large."""

    def expected_log_sum_exp(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return log sum_k exp(m_k + v_k / 2), (..., N)."""
        return torch.logsumexp(mean + 0.5 * variance, -2)
