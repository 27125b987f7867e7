r"""Is phi the Laplace transform of a probability density? A numerical check of Bernstein's condition [GWO20 Eq. 8].

phi is completely monotone when :math:`(-1)^k \varphi^{(k)}(r) \ge 0` for every k and r > 0; with phi(0) = 1 it is then
the transform of a probability measure p(w). The derivatives are scaled so that they are moments under the tilted
density, :math:`D_k = (-r)^k \varphi^{(k)}(r) / (k! \varphi(r)) = E[(r w)^k] / k!`: dimensionless, and nonnegative.
A completely monotone function is also log-convex, 2 D_2 >= D_1^2 (the variance of r w), which catches functions with
corners, whose higher derivatives vanish almost everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

_ORDERS = 5
_TOLERANCE = 1e-8  # on D_k, relative to its natural size; rounding in five nested derivatives stays below 1e-10


def check_completely_monotone(log_phi: Callable[[Tensor], Tensor]) -> None:
    """Raise unless log_phi looks like the logarithm of a completely monotone phi with phi(0) = 1.

    Tested on r in 10^-6 .. 10^6, ten points a decade, derivatives of orders 1 to 5, in float64. Points where phi
    underflows are left out. A numerical check can refuse what is wrong, not prove what is right.

    Args:
        log_phi: elementwise function of a tensor; parameters inside it may have batch shapes that broadcast.

    Raises:
        ValueError: naming the order and the point where the condition fails.

    Example:
        >>> import torch
        >>> check_completely_monotone(lambda r: 1 - torch.sqrt(1 + r))  # nothing is raised
    """
    at_zero = log_phi(torch.zeros(1, 1, dtype=torch.float64))
    if not bool(at_zero.isfinite().all()):  # 0/0 in the formula; the limit may exist
        at_zero = log_phi(torch.full((1, 1), 1e-30, dtype=torch.float64))
    if not bool(((at_zero.double().exp() - 1).abs() < 1e-7).all()):
        raise ValueError(
            f"phi(0) must be 1; got {at_zero.exp().flatten()[0].item():.8g}. "
            "Divide phi by phi(0) and move the factor into the log_constant of the likelihood."
        )
    grid = torch.logspace(-6, 6, 121, dtype=torch.float64)
    with torch.enable_grad():
        r = grid.view(-1, 1, 1)
        base = log_phi(r).detach().double()
        if base.shape[:1] + base.shape[-1:] != (len(grid), 1):
            raise ValueError(f"phi must be elementwise; it made {tuple(base.shape)} of a tensor of {tuple(r.shape)}.")
        r = r.broadcast_to(base.shape).clone().requires_grad_(True)
        usable = base > math.log(1e-55)  # the fifth derivative of a logarithm has phi^5 in a denominator
        # phi(r) / phi(r0) around each grid point r0: no underflow, whatever phi(r0) is
        derivative = torch.exp(log_phi(r) - torch.where(usable, base, torch.zeros_like(base))).double()
        scaled = []
        for order in range(1, _ORDERS + 1):
            if not derivative.requires_grad:
                raise ValueError(
                    "phi must depend on r by torch functions that autograd can follow; its derivative in r was not to "
                    "be had (a constant phi, numpy, or detach() inside)."
                )
            (derivative,) = torch.autograd.grad(
                derivative.sum(), r, create_graph=order < _ORDERS, materialize_grads=True
            )
            scaled.append((-r.detach()) ** order * derivative.detach() / math.factorial(order))
            if not derivative.requires_grad and order < _ORDERS:  # a constant derivative: the rest is zero
                scaled += [torch.zeros_like(base)] * (_ORDERS - order)
                break
    mean = scaled[0].clamp_min(0)
    for order, value in enumerate(scaled, start=1):
        size = (mean**order / math.factorial(order)).clamp_min(1.0)
        lost = (~value.isfinite() & usable).flatten(1).any(-1)
        if bool(lost.any()):
            raise ValueError(
                f"the derivative of phi of order {order} is not finite at r = {grid[lost][0].item():.3g}: write phi "
                "with functions that autograd differentiates five times, such as torch.logsumexp in place of "
                "torch.logaddexp."
            )
        _refuse(value < -_TOLERANCE * size, grid, usable, value, order, "(-1)^k phi^(k)(r) must not be negative")
    log_convexity = 2 * scaled[1] - scaled[0].square()
    size = scaled[0].square().clamp_min(1.0)
    _refuse(
        log_convexity < -_TOLERANCE * size,
        grid,
        usable,
        log_convexity,
        2,
        "phi must be log-convex: phi phi'' >= phi'^2",
    )


def _refuse(bad: Tensor, grid: Tensor, usable: Tensor, value: Tensor, order: int, rule: str) -> None:
    """Raise at the worst point of an order, if any is bad."""
    bad = (bad & usable).flatten(1)
    if bool(bad.any()):
        worst = torch.where(bad, value.flatten(1), torch.inf).amin(-1)
        index = int(worst.argmin())
        raise ValueError(
            f"phi is not completely monotone: at order k = {order}, r = {grid[index].item():.3g}, {rule}; got "
            f"{worst[index].item():.3g} (scaled by r^k / (k! phi)). Such a phi is no scale mixture of Gaussians."
        )
