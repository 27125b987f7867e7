r"""Derivatives of a sparse variational bound in closed form, down to the blocks of the prior.

A bound sum_i F_i(m_i, v_i) - KL(q(v) || N(0, I)) depends on the kernel and the mean function through K_zz, K_zx, k_ii
and mu_i only. Its derivatives there need g_i = dF_i/dm_i and tau_i = -2 dF_i/dv_i and a few products of matrices
(:mod:`gpext.posteriors.inducing`); automatic differentiation starts at the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from gpext.likelihoods import AugmentedLikelihood
from gpext.posteriors import InducingPosterior, back_substitute, cross_gradient, inducing_gradient


@dataclass(frozen=True)
class PriorBlocks:
    """The prior at the inducing points and a batch of inputs, in the autograd graph."""

    inducing_covariance: Tensor  # K_zz + jitter I (..., M, M)
    cross_covariance: Tensor  # K_zx (..., M, N)
    variance: Tensor  # k_ii + jitter (..., N)
    mean: Tensor  # mu_i (..., N)


@dataclass(frozen=True)
class LocalTerms:
    """F_i(m_i, v_i) and its derivatives in the marginals; `values` is in the graph of the likelihood's parameters."""

    values: Tensor  # F_i (..., N)
    mean_gradient: Tensor  # dF_i/dm_i (..., N)
    precision: Tensor  # -2 dF_i/dv_i (..., N)

    @property
    def total(self) -> Tensor:
        """sum_i F_i (...), float64, outside the graph."""
        return self.values.detach().double().sum(-1)


def local_terms(
    likelihood: AugmentedLikelihood, y: Tensor, mean: Tensor, variance: Tensor, *, exact: bool, gradient: bool
) -> LocalTerms:
    """Return the augmented bound on E[log p(y_i | f_i)] at N(mean, variance), or (`exact`) the expectation itself."""
    mean, variance = (t.detach().requires_grad_(gradient) for t in (mean, variance))
    with torch.set_grad_enabled(gradient):
        marginals = MultivariateNormal(mean, DiagLinearOperator(variance))
        values = likelihood.expected_log_prob(y, marginals) if exact else likelihood.augmented_bound(y, marginals)
        if not gradient:
            return LocalTerms(values, torch.zeros_like(mean), torch.zeros_like(mean))
        by_mean, by_variance = torch.autograd.grad(values.sum(), (mean, variance), retain_graph=True)
    return LocalTerms(values, by_mean, -2 * by_variance)


def backpropagate(
    prior: PriorBlocks,
    chol: Tensor,
    whitened: Tensor,
    posterior: InducingPosterior,
    local: LocalTerms,
    *,
    weight: float,
) -> None:
    """Add weight times the derivatives of sum_i F_i at fixed q(v) to the `.grad` of every parameter behind it."""
    with torch.no_grad():
        g, tau = weight * local.mean_gradient, weight * local.precision
        back = back_substitute(chol, posterior, whitened.dtype)
        vector = (whitened @ g.unsqueeze(-1)).squeeze(-1).double()
        gram = ((whitened * tau.unsqueeze(-2)) @ whitened.mT).double()
        inducing = inducing_gradient(chol, posterior, vector, gram).to(whitened.dtype)
        cross = cross_gradient(back, whitened, g, tau)
    push_back(
        (prior.inducing_covariance, inducing),
        (prior.cross_covariance, cross),
        (prior.variance, -0.5 * tau),
        (prior.mean, g),
        (local.values, torch.full_like(local.values, weight)),
    )


def push_back(*pairs: tuple[Tensor, Tensor]) -> None:
    """Push each gradient back through its tensor, if that depends on a parameter."""
    live = [(tensor, gradient) for tensor, gradient in pairs if tensor.requires_grad]
    if live:
        tensors, gradients = zip(*live, strict=True)
        torch.autograd.backward(tensors, gradients)
