r"""The log evidence of Gaussian noise on the full data, from one Cholesky factor and one inverse [R&W Eqs. 5.8, 5.9].

    log N(y | mu, C),   C = K + diag(n),   n_i = sigma^2 / w_i
    d/dC = (a a' - C^-1) / 2,   a = C^-1 (y - mu),   d/dmu = a

It is what :class:`gpext.mlls.LatentMarginalLogLikelihood` gives, which takes several times as long because it finds out
by derivatives of the likelihood that one Newton step is exact. A density to the power w is a density of w times less
noise:

    N(y | f, sigma^2)^w = N(y | f, sigma^2 / w) sqrt((2 pi sigma^2)^(1 - w) / w)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import GaussianLikelihood
from linear_operator.utils.errors import NotPSDError
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpext.estimators.rows import unweighted
from gpext.inference import EP, KL, Laplace, Rule
from gpext.kernels import dense_covariance
from gpext.likelihoods import Weighted
from gpext.linalg.triangles import solve_whole
from gpext.mlls import LatentMarginalLogLikelihood

_MARGIN = 30  # of the noise above rounding errors


class _LogDensity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, covariance: Tensor, noise: Tensor, residual: Tensor) -> Tensor:
        whole = covariance.clone()
        whole.diagonal().add_(noise)
        chol, info = torch.linalg.cholesky_ex(whole)
        if int(info):
            raise NotPSDError("the covariance of the targets is not positive definite at these hyperparameters.")
        weights = solve_whole(chol, residual.unsqueeze(-1)).squeeze(-1)  # a
        ctx.save_for_backward(chol, weights)
        log_det = 2 * chol.diagonal().log().sum()
        return -0.5 * (residual @ weights + log_det + len(residual) * math.log(2 * math.pi))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        chol, weights = ctx.saved_tensors
        by_covariance = torch.cholesky_inverse(chol).addr_(weights, weights, alpha=-1).mul_(-0.5 * gradient)
        return by_covariance, by_covariance.diagonal(), -gradient * weights


class GaussianEvidence(LatentMarginalLogLikelihood):
    """log p(y) per datum of a process with Gaussian noise, of rows with weights or without; differentiable once."""

    def log_evidence(self, function_dist: MultivariateNormal, target: Tensor) -> Tensor:
        """Return log p(y) of targets (N,), or of targets and weights (N, 2).

        Raises:
            NotPSDError: the covariance of the targets has no Cholesky factor, or rounding errors above the noise.
        """
        noise = unweighted(self.likelihood).noise
        value = noise.new_zeros(())
        if isinstance(self.likelihood, Weighted):
            target, weights = target.unbind(-1)
            value = 0.5 * ((1 - weights) * (2 * math.pi * noise).log() - weights.log()).sum()
            noise = noise / weights
        covariance = dense_covariance(function_dist.lazy_covariance_matrix)
        with torch.no_grad():
            rounding = torch.finfo(covariance.dtype).eps * len(target) * covariance.diagonal().max()
            if bool(_MARGIN * rounding > noise.min()):
                raise NotPSDError("the noise is less than the rounding errors of the covariance.")
        return value + _LogDensity.apply(covariance, noise.expand(len(target)), target - function_dist.mean)


def has_closed_form(likelihood: Any, rule: Rule) -> bool:
    """Return whether the evidence under a rule is that of Gaussian noise, for which the rule is exact."""
    return type(unweighted(likelihood)) is GaussianLikelihood and isinstance(rule, EP | KL | Laplace)
