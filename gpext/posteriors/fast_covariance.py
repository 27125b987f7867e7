r"""The posterior covariance V to six digits or more, for derivatives: in a third of the time of all its digits.

In the terms of :mod:`gpext.posteriors.dense`, V1 = P^-1 (I - B1^-1) P^-1 where sites have some precision, by the
inverse from the Cholesky factor that there is. Of the others, the index set b,

    W = L1^-1 P K_:b,      V1_:b = P^-1 L1^-T W,      V1_bb = K_bb - W' W

instead of two triangular solves and a product of size N. Rounding is multiplied by the condition of B1, which is at
most its trace, and by 1 / (tau v); b has those of which that would leave less than six digits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpext.posteriors.dense import DensePosterior
from gpext.posteriors.low_rank import LowRankPosterior
from gpext.posteriors.neighbour import NeighbourPosterior

_ROUNDING = 1e-10  # per unit of the trace of B1: six digits are left of tau v above it


def fast_covariance(posterior: DensePosterior | LowRankPosterior | NeighbourPosterior) -> Tensor:
    """Return V (N, N) of one posterior; with all its digits if most sites have too little precision, or not dense.

    Example:
        >>> import torch
        >>> from gpext.posteriors import condition_dense
        >>> from gpext.sites import GaussianSites
        >>> one = torch.ones(2)
        >>> fast_covariance(condition_dense(0 * one, torch.eye(2), GaussianSites(one, one)))
        tensor([[0.5000, 0.0000],
                [0.0000, 0.5000]], dtype=torch.float64)
    """
    if isinstance(posterior, NeighbourPosterior):
        return posterior.covariance.to_dense()
    if not isinstance(posterior, DensePosterior):
        return posterior.covariance
    K, tau = posterior.prior_covariance, posterior.sites.precision.clamp_min(0)
    least = _ROUNDING * (tau * K.diagonal()).sum()
    blunt = tau * K.diagonal() <= least
    if bool(2 * blunt.sum() > len(tau)):
        return posterior.covariance
    inverse = torch.cholesky_inverse(posterior.factor.whole)
    given = 1 - inverse.diagonal()  # tau v
    blunt = blunt | (given <= least)
    index = blunt.nonzero().squeeze(-1)
    if 2 * len(index) > len(tau):
        return posterior.covariance
    scale = torch.where(blunt, 1.0, posterior.factor.root).reciprocal()
    variance = given * scale.square()
    if len(index):
        whitened = posterior.factor.whiten(K[:, index])
        inner = K[index][:, index] - whitened.mT @ whitened
        columns = posterior.factor.given(whitened).index_copy_(0, index, 0.5 * (inner + inner.mT))
    V = inverse.mul_(-scale.unsqueeze(-1)).mul_(scale)
    V.diagonal().copy_(variance)
    if len(index):
        V[:, index] = columns
        V[index] = columns.mT
    if posterior.negative is not None:
        V.addmm_(posterior.negative.whitened.mT, posterior.negative.whitened)
    return V
