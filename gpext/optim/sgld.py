r"""Stochastic gradient Langevin dynamics as an optimiser: its iterates are draws [Welling & Teh 2011, FE15 Eq. 5].

    theta <- theta - eps / 2 M g + N(0, eps M),      g = d(-log posterior)/dtheta, or an unbiased estimate

The loss is the negative log posterior itself, not divided by the number of data. M preconditions all parameters
together. With gradients of covariance V the noise they add is eps^2 / 4 M V M beside eps M: the step size may stop
falling once that is negligible [FE15 Eq. 7],

    eps / 4 lambda_max(M^1/2 V M^1/2) < 0.002

Two departures, each an option, both for a Gaussian posterior of covariance S:

    averaged noise [Leimkuhler & Matthews 2013]: sqrt(eps) M^1/2 (xi_t + xi_{t+1}) / 2 in place of N(0, eps M). With
    exact gradients the draws have the covariance S itself, at any step size with which they stay bounded; those of
    Eq. 5 are wider, for M = S by the factor 1 / (1 - eps / 4).

    compensated noise, for known V: M^1/2 (I - C) M^1/2 in place of M in the noise, where with v = M^1/2 V M^1/2
    C = eps / 4 v in Eq. 5, and C = eps / (4 - eps) v with averaged noise. The draws have the covariance that exact
    gradients would leave: in Eq. 5 for any M, with averaged noise for M = S. Where C is not below I the gradients
    are too noisy to be compensated, and the excess stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpext.checks import check_tensor
from gpext.optim.gradient_noise import checked_covariance, compensated, largest_share

WINDOW = 100  # gradients per estimate of V


@dataclass(frozen=True)
class Memory:
    """The quantities of earlier steps on which the next one depends."""

    xi: Tensor | None = None  # (P,), of the last step, where noise is averaged
    window: tuple[Tensor, ...] = ()  # gradients (P,), fewer than an estimate of V needs
    covariance: Tensor | None = None  # (P, P), of the last full window


class SGLD(torch.optim.Optimizer):
    """Langevin steps; every iterate is a draw once the step size is small.

    Args:
        params: parameters, or groups of them, with separate `lr` where M is diagonal.
        lr: eps, positive.
        preconditioner: M: None for the identity, a diagonal (P,), or a symmetric positive definite matrix (P, P), over
            all P numbers of all groups in their order.
        averaged: average the noise of neighbouring steps.
        gradient_noise: V (P, P) of gradients at the same parameters, if it is known.
        compensated: whether to compensate it; otherwise only the freeze rule uses it.
        generator: for the noise, on the CPU; seeded from torch's global one by default.

    Raises:
        TypeError: a generator, a preconditioner or V of another type.
        ValueError: a learning rate that is not positive and finite, or a preconditioner or V that does not fit.

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
        if generator is None:
            generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        if not isinstance(generator, torch.Generator):
            raise TypeError(
                f"expected a torch.Generator; got {generator!r}. torch.Generator().manual_seed(n) has a seed."
            )
        self.generator = generator
        self.averaged, self.compensated = averaged, compensated
        self._is_identity = True  # M is, for any number of parameters
        self._gradient_noise: Tensor | None = None
        super().__init__(params, {"lr": lr})
        self.set_preconditioner(preconditioner)
        self.set_gradient_noise(gradient_noise)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with M = I for them; for the others M has to be the identity, too, and V unknown.

        Raises:
            TypeError: parameters that are not real.
            ValueError: M or V is given, or a learning rate is not positive and finite.
        """
        if not self._is_identity or self._gradient_noise is not None:
            raise ValueError(
                "a preconditioner or gradient_noise is over all parameters: make a new SGLD of all of them, with one "
                "that covers the new ones."
            )
        _check_lr(param_group.get("lr", self.defaults["lr"]))
        super().add_param_group(param_group)
        for p in self._parameters:
            if not p.is_floating_point():
                raise TypeError(f"expected parameters of real floating dtypes; got {p.dtype}.")
        self.memory = Memory()
        self.set_preconditioner(None)

    def set_preconditioner(self, preconditioner: Tensor | None) -> None:
        """Replace M.

        Raises:
            TypeError: it is not a tensor.
            ValueError: its shape does not fit, or it is not symmetric and positive definite.
        """
        size = sum(p.numel() for p in self._parameters)
        is_identity = preconditioner is None
        if preconditioner is None:
            preconditioner = torch.ones(size, dtype=torch.float64, device="cpu")
        check_tensor("preconditioner", preconditioner)
        if preconditioner.shape not in (torch.Size([size]), torch.Size([size, size])):
            raise ValueError(
                f"expected a preconditioner ({size},) or ({size}, {size}) for {size} numbers; got "
                f"{tuple(preconditioner.shape)}."
            )
        matrix = preconditioner.detach().double().cpu().clone()
        if matrix.dim() == 1:
            if not bool(((matrix > 0) & matrix.isfinite()).all()):
                raise ValueError("the diagonal of the preconditioner must be positive and finite.")
            root = matrix.sqrt()
        else:
            self._check_one_lr()
            if not torch.allclose(matrix, matrix.mT, equal_nan=True):
                raise ValueError("the preconditioner is not symmetric.")
            root, info = torch.linalg.cholesky_ex(matrix)
            if int(info) != 0 or not bool(root.isfinite().all()):
                raise ValueError("the preconditioner is not positive definite.")
        self._matrix, self._root, self._is_identity = matrix, root, is_identity

    def _check_one_lr(self) -> None:
        if len({float(group["lr"]) for group in self.param_groups}) > 1:
            raise ValueError("a full preconditioner ties all parameters together: all groups need the same lr.")

    def set_gradient_noise(self, gradient_noise: Tensor | None) -> None:
        """Replace V.

        Args:
            gradient_noise: covariance of gradients at the same parameters (P, P), half that of the difference of two;
                None where it is not known.

        Raises:
            TypeError: it is not a tensor.
            ValueError: its shape does not fit, or it is not a covariance.
        """
        if gradient_noise is not None:
            gradient_noise = checked_covariance(gradient_noise, len(self._matrix))
        self._gradient_noise = gradient_noise

    @property
    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; parameters without a gradient count as having one of zero, but those that require none stay.

        Args:
            closure: clears gradients, evaluates the loss, calls backward and returns the loss.

        Raises:
            FloatingPointError: a gradient is not finite; nothing has moved.
            ValueError: groups with different step sizes under a full preconditioner.
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
        eps, (noise, xi) = self._eps(), self._noise(len(g))
        if self.compensated and self._gradient_noise is not None:
            noise = compensated(noise, eps, self._gradient_noise, self._root, averaged=self.averaged)
        if self._matrix.dim() == 1:
            move = -0.5 * eps * self._matrix * g + eps.sqrt() * self._root * noise
        else:
            self._check_one_lr()
            move = -0.5 * eps * (self._matrix @ g) + eps.sqrt() * (self._root @ noise)
        for p, part in zip(parameters, move.split([p.numel() for p in parameters]), strict=True):
            if p.requires_grad or p.grad is not None:
                p.add_(part.view(p.shape).to(p))
        self.memory = _remembered(self.memory, g, xi)
        return loss

    def _eps(self) -> Tensor:
        """Return the step size of every number (P,)."""
        sizes = [(sum(p.numel() for p in group["params"]), group["lr"]) for group in self.param_groups]
        return torch.cat([torch.full((size,), lr, dtype=torch.float64, device="cpu") for size, lr in sizes])

    def _noise(self, size: int) -> tuple[Tensor, Tensor | None]:
        """Return xi (P,), or half the sum of that and the one before, and the xi for the next step to average with."""

        def drawn() -> Tensor:
            return torch.randn(size, dtype=torch.float64, generator=self.generator, device="cpu")

        xi = drawn()
        if not self.averaged:
            return xi, None
        before = drawn() if self.memory.xi is None else self.memory.xi
        return 0.5 * (before + xi), xi

    def largest_lr(self, share: float = 1.0) -> float:
        """Return the step size at which the noise of the gradients is this share of all noise, inf if there is none.

        Beyond a share of 1 it cannot be compensated. One step size for all parameters is assumed.

        Raises:
            ValueError: V is not known.
        """
        if self._gradient_noise is None:
            raise ValueError("the noise of the gradients is not known: see set_gradient_noise.")
        largest = largest_share(self._gradient_noise, self._root)
        if largest <= 0:
            return float("inf")
        return 4 * share / (largest + share) if self.averaged else 4 * share / largest

    def noise_ratio(self) -> float:
        """Return eps / 4 lambda_max(M^1/2 V M^1/2); inf before there is a V.

        V is the given one or, without it, the covariance of the last hundred gradients, which includes their change
        with the parameters and is therefore too large rather than too small.
        """
        V = self.memory.covariance if self._gradient_noise is None else self._gradient_noise
        if V is None:
            return float("inf")
        return 0.25 * max(group["lr"] for group in self.param_groups) * largest_share(V, self._root)

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`load_state_dict` needs to resume bit for bit."""
        return {**super().state_dict(), "langevin": self._langevin()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a saved state, with its options.

        Raises:
            ValueError: it is that of another optimiser, or of other parameters; nothing has changed.
        """
        if "langevin" not in state_dict:
            raise ValueError("expected a state_dict of an SGLD, with 'langevin' in it; got one of another optimiser.")
        size, saved = len(self._matrix), len(state_dict["langevin"]["matrix"])
        if size != saved:
            raise ValueError(f"expected the state of {size} numbers; got that of {saved}.")
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "langevin"})
        self._restore(state_dict["langevin"])

    def _langevin(self) -> dict[str, Any]:
        """Return the state that belongs to no parameter group."""
        return {
            "matrix": self._matrix,
            "is_identity": self._is_identity,
            "averaged": self.averaged,
            "compensated": self.compensated,
            "generator": self.generator.get_state(),
            "xi": self.memory.xi,
            "gradient_noise": self._gradient_noise,
            "window": list(self.memory.window),
            "covariance": self.memory.covariance,
        }

    def _restore(self, saved: dict[str, Any]) -> None:
        self.set_preconditioner(None if saved["is_identity"] else saved["matrix"])
        self.averaged, self.compensated = saved["averaged"], saved["compensated"]
        self.generator.set_state(saved["generator"])
        self.set_gradient_noise(saved["gradient_noise"])
        self.memory = Memory(saved["xi"], tuple(saved["window"]), saved["covariance"])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "langevin": self._langevin()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({key: value for key, value in state.items() if key != "langevin"})
        if "langevin" in state:  # it is absent where torch's load_state_dict sets the groups
            self.generator = torch.Generator()
            self._restore(state["langevin"])


def _remembered(memory: Memory, g: Tensor, xi: Tensor | None) -> Memory:
    """Return the memory after a step with a gradient (P,)."""
    window = (*memory.window, g)
    if len(window) < WINDOW:
        return Memory(xi, window, memory.covariance)
    return Memory(xi, (), torch.cov(torch.stack(window).mT).view(len(g), len(g)))


def _check_lr(lr: Any) -> None:
    if not 0 < lr < float("inf"):
        raise ValueError(f"lr must be positive and finite; got {lr}.")
