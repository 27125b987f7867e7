r"""Derivatives of a sparse variational bound in closed form, down to the blocks of the prior.

A bound sum_i F_i(m_i, v_i) - KL(q(v) || N(0, I)) depends on the kernel and the mean function through K_zz, K_zx, k_ii
and mu_i only. Its derivatives there need g_i = dF_i/dm_i and tau_i = -2 dF_i/dv_i and a few products of matrices
(:mod:`gpext.posteriors.inducing`); automatic differentiation starts at the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest

import torch
from torch import Tensor

from gpext.inference import LocalTerms
from gpext.posteriors import InducingPosterior, prior_gradients
from gpext.variational.prior_blocks import CrossBlocks


def backpropagate(
    inducing_covariance: Tensor,
    cross: CrossBlocks,
    chol: Tensor,
    whitened: Tensor,
    posterior: InducingPosterior,
    local: LocalTerms,
    weight: float,
) -> None:
    """Add weight times the derivatives of sum_i F_i at fixed q(v) to the `.grad` of every parameter behind it.

    Args:
        inducing_covariance: K_zz (..., M, M), in the graph.
        cross: K_zx, k_ii and mu_i, in the graph.
        chol: the factor of K_zz.
        whitened: A (..., M, N).
        posterior: q(v).
        local: F_i and its derivatives.
        weight: the factor.
    """
    with torch.no_grad():
        g, tau = weight * local.mean_gradient, weight * local.precision
        inducing, by_cross = prior_gradients(chol, posterior, whitened, g, tau)
    push_back(
        (inducing_covariance, inducing.to(whitened.dtype)),
        (cross.covariance, by_cross),
        (cross.variance, -0.5 * tau),
        (cross.mean, g),
        (local.values, torch.full_like(local.values, weight)),
    )


@contextmanager
def gradients_apart(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Hide the `.grad` of parameters while others are made; then add to it what has been put in the list that is given.

    After an error `.grad` is what it was.
    """
    before = [p.grad for p in parameters]
    sums: list[Tensor] = []
    for p in parameters:
        p.grad = None
    try:
        yield sums
    except BaseException:
        sums = []
        raise
    finally:
        for p, old, new in zip_longest(parameters, before, sums):
            p.grad = old if new is None else new if old is None else old + new


def push_back(*pairs: tuple[Tensor, Tensor]) -> None:
    """Push each gradient back through its tensor, if that depends on a parameter; over shared dimensions its sum."""
    live = [(tensor, gradient.sum_to_size(tensor.shape)) for tensor, gradient in pairs if tensor.requires_grad]
    if live:
        tensors, gradients = zip(*live, strict=True)
        torch.autograd.backward(tensors, gradients)
