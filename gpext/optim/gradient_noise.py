r"""The noise of gradients in Langevin dynamics: its share of all noise, and the added noise that compensates it.

V is the covariance of gradients at the same parameters, M = R R' the preconditioner, R given as a Cholesky factor or,
of a diagonal M, as the roots of its entries. See :mod:`gpext.optim.sgld`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpext.checks import check_tensor


def checked_covariance(V: Tensor, size: int) -> Tensor:
    """Return V (P, P) on the CPU in float64.

    Raises:
        TypeError: it is not a tensor.
        ValueError: its shape does not fit, or it is not a covariance.
    """
    check_tensor("gradient_noise", V)
    V = V.detach().double().cpu().clone()
    if V.shape != (size, size):
        raise ValueError(f"expected gradient_noise ({size}, {size}) for {size} numbers; got {tuple(V.shape)}.")
    if not torch.allclose(V, V.mT):
        raise ValueError("gradient_noise is not symmetric.")
    values = torch.linalg.eigvalsh(V)
    if size and float(values[0]) < -1e-8 * float(values.abs().max()):
        raise ValueError(f"gradient_noise must be a covariance; got one with an eigenvalue of {float(values[0]):.3g}.")
    return V


def compensated(noise: Tensor, eps: Tensor, V: Tensor, root: Tensor, *, averaged: bool) -> Tensor:
    """Return (I - C)^1/2 noise (P,); as step sizes are equal unless M is diagonal, D = diag(eps) and M commute.

    C = D^1/2 v D^1/2 / 4 with v = R' V R; with averaged noise entries are divided by 4 - (eps_i + eps_j) / 2, not 4:
    with contractions I - D / 2 the stationary covariance is I where 4 Q - (D Q + Q D) / 2 = D - D^2 / 4 - D v D / 4 for
    Q, the covariance of either xi times its weight.

    Args:
        noise: (P,).
        eps: the step sizes (P,).
        V: (P, P).
        root: R (P, P) or (P,).
        averaged: whether the noise is averaged over neighbouring steps.
    """
    scaled = eps.sqrt().unsqueeze(-1) * _seen(V, root) * eps.sqrt()
    C = scaled / (4 - 0.5 * (eps.unsqueeze(-1) + eps)) if averaged else 0.25 * scaled
    values, axes = torch.linalg.eigh(C)
    return axes @ ((1 - values).clamp_min(0).sqrt() * (axes.mT @ noise))


def largest_share(V: Tensor, root: Tensor) -> float:
    """Return lambda_max(M^1/2 V M^1/2) for V (P, P) and R (P, P) or (P,)."""
    return float(torch.linalg.eigvalsh(_seen(V, root))[-1])


def _seen(V: Tensor, root: Tensor) -> Tensor:
    """Return R' V R (P, P)."""
    R = root.diag() if root.dim() == 1 else root
    return R.mT @ V @ R
