r"""Stochastic gradient Langevin dynamics as an optimiser: its iterates are draws [Welling & Teh 2011, FE15 Eq. 5].

    theta <- theta - eps / 2 M g + N(0, eps M),      g = d(-log posterior)/dtheta, or an unbiased estimate

The loss is the negative log posterior itself, not divided by the number of data. M preconditions all parameters
together. With gradients of covariance V the noise they add is eps^2 / 4 M V M beside eps M: the step size may stop
falling where that no longer counts [FE15 Eq. 7],

    eps / 4 lambda_max(M^1/2 V M^1/2) < 0.002

Two departures, each an option, both for a Gaussian posterior of covariance S:

    averaged noise [Leimkuhler & Matthews 2013]: sqrt(eps) M^1/2 (xi_t + xi_{t+1}) / 2 in place of N(0, eps M). With
    exact gradients the draws have the covariance S itself, at any step size with which they stay bounded; those of
    Eq. 5 are wider, for M = S by the factor 1 / (1 - eps / 4).

    compensated noise, for V that is known: M^1/2 (I - C) M^1/2 in place of M in the noise, where with v = M^1/2 V M^1/2
    C = eps / 4 v in Eq. 5, and C = eps / (4 - eps) v with averaged noise. The draws have the covariance that exact
    gradients would leave: in Eq. 5 for any M, with averaged noise for M = S. Where C is not below I there is more noise
    in the gradients than there may be, and what is too much stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

_WINDOW = 100  # gradients that make one estimate of V


class SGLD(torch.optim.Optimizer):
    """Langevin steps; every iterate is a draw once the step size is small.

    Args:
        params: parameters, or groups of them with an `lr` of their own where M is diagonal.
        lr: eps, positive.
        preconditioner: M: None for the identity, a diagonal (P,), or a symmetric positive definite matrix (P, P), over
            all P numbers of all groups in their order.
        averaged: average the noise of neighbouring steps.
        gradient_noise: V (P, P) of gradients at the same parameters, if it is known.
        compensated: whether to compensate it; else it serves the freeze rule alone.
        generator: for the noise, on the CPU; seeded with 0 by default.

    Raises:
        ValueError: a learning rate that is not positive, or a preconditioner or V that does not fit.

    Example:
        >>> theta = torch.zeros(2, requires_grad=True)
        >>> optimizer = SGLD([theta], lr=0.1)
        >>> (0.5 * theta.square().sum()).backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        preconditioner: Tensor | None = None,
        *,
        averaged: bool = False,
        gradient_noise: Tensor | None = None,
        compensated: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        if not lr > 0:
            raise ValueError(f"lr must be positive; got {lr}.")
        super().__init__(params, {"lr": lr})
        self.generator = torch.Generator().manual_seed(0) if generator is None else generator
        self.averaged, self.compensated = averaged, compensated
        self._xi: Tensor | None = None  # of the last step, where noise is averaged
        self._window: list[Tensor] = []
        self._covariance: Tensor | None = None  # of the last full window
        self.set_preconditioner(preconditioner)
        self.set_gradient_noise(gradient_noise)

    def set_preconditioner(self, preconditioner: Tensor | None) -> None:
        """Replace M.

        Raises:
            ValueError: it does not fit, or is not positive definite.
        """
        size = sum(p.numel() for p in self._parameters)
        if preconditioner is None:
            preconditioner = torch.ones(size, dtype=torch.float64)
        if preconditioner.shape not in (torch.Size([size]), torch.Size([size, size])):
            raise ValueError(
                f"expected a preconditioner ({size},) or ({size}, {size}) for {size} numbers; got "
                f"{tuple(preconditioner.shape)}."
            )
        self._matrix = preconditioner.detach().double().cpu().clone()
        if self._matrix.dim() == 1:
            if not bool((self._matrix > 0).all()):
                raise ValueError("the diagonal of the preconditioner must be positive.")
            self._root = self._matrix.sqrt()
            return
        if len({group["lr"] for group in self.param_groups}) > 1:
            raise ValueError("a full preconditioner ties all parameters together: all groups need the same lr.")
        root, info = torch.linalg.cholesky_ex(self._matrix)
        if int(info) != 0:
            raise ValueError("the preconditioner is not positive definite.")
        self._root = root

    def set_gradient_noise(self, gradient_noise: Tensor | None) -> None:
        """Replace V.

        Args:
            gradient_noise: covariance of gradients at the same parameters (P, P), half that of the difference of two;
                None where it is not known.

        Raises:
            ValueError: it does not fit, or is not symmetric.
        """
        if gradient_noise is not None:
            size = len(self._matrix)
            gradient_noise = gradient_noise.detach().double().cpu().clone()
            if gradient_noise.shape != (size, size):
                raise ValueError(
                    f"expected gradient_noise ({size}, {size}) for {size} numbers; got {tuple(gradient_noise.shape)}."
                )
            if not torch.allclose(gradient_noise, gradient_noise.mT):
                raise ValueError("gradient_noise is not symmetric.")
        self._gradient_noise = gradient_noise

    @property
    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; parameters without a gradient count as having one of zero.

        Args:
            closure: clears gradients, evaluates the loss, calls backward and returns the loss.

        Raises:
            FloatingPointError: a gradient is not finite; nothing has moved.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = self._parameters
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        g = torch.cat([each.flatten().double().cpu() for each in gradients])
        if not bool(g.isfinite().all()):
            raise FloatingPointError("a gradient is NaN or infinite; no parameter has moved.")
        eps, noise = self._eps(), self._noise(len(g))
        if self.compensated and self._gradient_noise is not None:
            noise = self._compensated(noise, eps, self._gradient_noise)
        if self._matrix.dim() == 1:
            move = -0.5 * eps * self._matrix * g + eps.sqrt() * self._root * noise
        else:
            move = -0.5 * eps * (self._matrix @ g) + eps.sqrt() * (self._root @ noise)
        for p, part in zip(parameters, move.split([p.numel() for p in parameters]), strict=True):
            p.add_(part.view(p.shape).to(p))
        self._remember(g)
        return loss

    def _eps(self) -> Tensor:
        """Return the step size of every number (P,)."""
        sizes = [(sum(p.numel() for p in group["params"]), group["lr"]) for group in self.param_groups]
        return torch.cat([torch.full((size,), lr, dtype=torch.float64) for size, lr in sizes])

    def _noise(self, size: int) -> Tensor:
        """Return xi (P,), or half the sum of that and the one before."""
        xi = torch.randn(size, dtype=torch.float64, generator=self.generator)
        if not self.averaged:
            return xi
        before = torch.randn(size, dtype=torch.float64, generator=self.generator) if self._xi is None else self._xi
        self._xi = xi
        return 0.5 * (before + xi)

    def _compensated(self, noise: Tensor, eps: Tensor, V: Tensor) -> Tensor:
        """Return (I - C)^1/2 noise (P,); as all step sizes are one unless M is diagonal, D = diag(eps) and M commute.

        C = D^1/2 v D^1/2 / 4, or, with averaged noise, its entries by 4 - (eps_i + eps_j) / 2: with contractions
        I - D / 2 the stationary covariance is I where 4 Q - (D Q + Q D) / 2 = D - D^2 / 4 - D v D / 4 for Q, that of
        one of both xi times its weight.
        """
        root = self._root.diag() if self._root.dim() == 1 else self._root
        scaled = eps.sqrt().unsqueeze(-1) * (root.mT @ V @ root) * eps.sqrt()
        C = scaled / (4 - 0.5 * (eps.unsqueeze(-1) + eps)) if self.averaged else 0.25 * scaled
        values, axes = torch.linalg.eigh(C)
        return axes @ ((1 - values).clamp_min(0).sqrt() * (axes.mT @ noise))

    def largest_lr(self, share: float = 1.0) -> float:
        """Return the step size at which the noise of the gradients is this share of all noise, inf if there is none.

        Beyond a share of 1 it cannot be compensated. One step size for all parameters is assumed.

        Raises:
            ValueError: V is not known.
        """
        if self._gradient_noise is None:
            raise ValueError("the noise of the gradients is not known: see set_gradient_noise.")
        largest = self._largest(self._gradient_noise)
        if largest <= 0:
            return float("inf")
        return 4 * share / (largest + share) if self.averaged else 4 * share / largest

    def _largest(self, V: Tensor) -> float:
        """Return lambda_max(M^1/2 V M^1/2)."""
        root = self._root.diag() if self._root.dim() == 1 else self._root
        return float(torch.linalg.eigvalsh(root.mT @ V @ root)[-1])

    def _remember(self, g: Tensor) -> None:
        self._window.append(g)
        if len(self._window) == _WINDOW:
            self._covariance = torch.cov(torch.stack(self._window).mT).view(len(g), len(g))
            self._window = []

    def noise_ratio(self) -> float:
        """Return eps / 4 lambda_max(M^1/2 V M^1/2); inf before there is a V.

        V is the one that was given, or, without, the covariance of the last hundred gradients, which contains how they
        moved with the parameters: that is rather too large than too small.
        """
        V = self._covariance if self._gradient_noise is None else self._gradient_noise
        return float("inf") if V is None else 0.25 * max(group["lr"] for group in self.param_groups) * self._largest(V)

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`load_state_dict` needs to go on bit for bit."""
        langevin = {
            "matrix": self._matrix,
            "generator": self.generator.get_state(),
            "xi": self._xi,
            "gradient_noise": self._gradient_noise,
            "window": list(self._window),
            "covariance": self._covariance,
        }
        return {**super().state_dict(), "langevin": langevin}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state."""
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "langevin"})
        saved = state_dict["langevin"]
        self.set_preconditioner(saved["matrix"])
        self.generator.set_state(saved["generator"])
        self.set_gradient_noise(saved["gradient_noise"])
        self._xi = saved["xi"]
        self._window, self._covariance = list(saved["window"]), saved["covariance"]


class PolynomialDecay(LRScheduler):
    """Step sizes a (b + t)^-gamma, which stay once the noise of the gradients is negligible [FE15 Eq. 7].

    Args:
        optimizer: whose `lr` to set.
        a: positive.
        b: positive.
        gamma: in [0, 1]; draws converge for gamma in (1/2, 1], and at 0 the step size stays.
        freeze_below: the ratio of :meth:`SGLD.noise_ratio` at which to stop; 0 never to.

    Raises:
        ValueError: a number outside its range.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, a: float, b: float, gamma: float, *, freeze_below: float = 0.0
    ) -> None:
        if not (a > 0 and b > 0 and 0 <= gamma <= 1 and freeze_below >= 0):
            raise ValueError(
                f"expected a, b > 0, gamma in [0, 1] and freeze_below >= 0; got {a}, {b}, {gamma}, {freeze_below}."
            )
        self.a, self.b, self.gamma, self.freeze_below = a, b, gamma, freeze_below
        self.frozen_at: int | None = None  # the step from which on the size stays
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Return the step sizes of this step."""
        present = [group["lr"] for group in self.optimizer.param_groups]
        if self.frozen_at is not None:
            return present
        if self.freeze_below and isinstance(self.optimizer, SGLD) and self.optimizer.noise_ratio() < self.freeze_below:
            self.frozen_at = self.last_epoch
            return present
        return [self.a * (self.b + self.last_epoch) ** -self.gamma] * len(present)
