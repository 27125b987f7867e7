"""Derivatives of log p(y | f) in f, datum by datum, by automatic differentiation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpext.bounds import conditional_log_prob, num_latents


def log_prob_derivatives(likelihood: Any, targets: Tensor, f: Tensor, order: int) -> list[Tensor]:
    """Return log p(y_i | f_i) and its derivatives in f_i up to `order`, each (..., N).

    They are in the graph of the likelihood's parameters, and of f if that has one.

    Raises:
        TypeError: the likelihood has several latents a datum.
    """
    if num_latents(likelihood) is not None:
        raise TypeError(
            f"Laplace and Taylor take one latent function per datum; {type(likelihood).__qualname__} has "
            f"{likelihood.num_latents}. Use gpext.inference.KL()."
        )
    wanted = torch.is_grad_enabled()
    with torch.enable_grad():
        f = f if f.requires_grad else f.detach().requires_grad_()
        values = [conditional_log_prob(likelihood, targets, f)]
        for _ in range(order):
            last = values[-1]
            if not last.requires_grad:  # a polynomial has run out
                values.append(torch.zeros_like(f))
                continue
            (following,) = torch.autograd.grad(last.sum(), f, create_graph=True, materialize_grads=True)
            values.append(following)
    return values if wanted else [value.detach() for value in values]


def require_curvature(likelihood: Any, targets: Tensor) -> None:
    """Raise TypeError if log p(y | f) bends nowhere: its modes are kinks, which have no curvature."""
    target = targets.flatten()[:1]
    f = torch.linspace(-3.3, 3.1, 15, dtype=torch.float64, device=targets.device)
    f = torch.cat([f, f + target.double()])
    with torch.no_grad():
        _, slope, bend = log_prob_derivatives(likelihood, target, f, 2)
    if not bool((bend.abs() > 1e-8 * slope.abs()).any()):  # beyond rounding
        raise TypeError(
            f"log p(y | f) of {type(likelihood).__qualname__} has no second derivative in f, so Laplace and Taylor do "
            "not apply; gpext.inference.KL() does."
        )
