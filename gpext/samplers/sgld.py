r"""Langevin draws of hyperparameters from gradients that are right on average [FE15 Sec. 5].

    theta <- theta + eps / 2 M g + eps^1/2 M^1/2 (xi_t + xi_{t+1}) / 2                               (gpext.optim.SGLD)

M is about the covariance of the posterior (:mod:`gpext.samplers.targets.mode`), theta logarithms where there is only a lower
bound. Two things go beyond the paper, whose Eq. 5 with its steps a (b + t)^-gamma is an option.

Noise of neighbouring steps is averaged: on a Gaussian no step is too long for the right covariance, where Eq. 5 widens
draws by about eps / 8 of a standard deviation.

The covariance V of the gradients at given parameters is learnt in the warm-up, from pairs of estimates at one place,
and the noise reduced by what they bring along, v = M^1/2 V M^1/2. Uncompensated this widens draws by about eps / 8 v.
That allows for long steps that stay: as long as half of all noise is from gradients, but no more than 1/2. A chain
forgets in some 4 / eps steps, or 2 v where noise limits them, which UnbiasedSolver(controlled=True) can make a hundred
times less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from gpext.callers import warn_caller
from gpext.checks import check_tensor
from gpext.inference import InferenceWarning
from gpext.optim import SGLD, PolynomialDecay
from gpext.parallel import Ranks
from gpext.samplers.chains import ChainSampler, Plan
from gpext.samplers.hyperposterior import HyperPosterior
from gpext.samplers.langevin_schema import LangevinSchema
from gpext.samplers.targets.log_posterior import LogPosterior
from gpext.samplers.targets.mode import mode_and_scale, scattered

_LONGEST = 0.5  # step
_SHARE = 0.5  # of the noise that may be from gradients
_FIRST = 0.05  # step, until their noise is known
_PAIRS = 20  # of estimates, from which on it is
_EVERY = 2  # steps of the warm-up, of which one learns from a pair
_FORGETTING = 2.0  # V is from the last 3/4 of the pairs or so


class SGLDSampler(ChainSampler):
    """Draws of the hyperparameters of an ExactGP, each at the cost of a gradient.

    Args:
        mll: :class:`gpext.mlls.UnbiasedMarginalLogLikelihood` for tens of thousands of data, or gpytorch's exact one.
        hyperparameters: which parameters to draw; by default all that require gradients. The others stay.

    Raises:
        TypeError, ValueError: as :class:`gpext.samplers.LogPosterior`.
    """

    name = "SGLD"

    def __init__(self, mll: ExactMarginalLogLikelihood, hyperparameters: Sequence[str] | None = None) -> None:
        super().__init__(mll, hyperparameters, logarithms=True)

    def run(
        self,
        num_samples: int,
        num_chains: int = 4,
        warmup: int = 500,
        *,
        step_size: float | tuple[float, float, float] | None = None,
        freeze_below: float = 0.0,
        averaged: bool = True,
        compensated: bool = True,
        thinning: int = 1,
        preconditioner: Tensor | None = None,
        generator: torch.Generator | None = None,
        resume: HyperPosterior | None = None,
        checkpoint: str | Path | None = None,
        progress: bool = True,
        ranks: Ranks | None = None,
    ) -> HyperPosterior:
        """Return draws; Ctrl-C, or a chain that diverges, ends it early and keeps the finished ones of all chains.

        Args:
            num_samples: draws kept of each chain, beside those of `resume`.
            num_chains: independent chains, from starts about the mode of a subset of the data.
            warmup: steps before; half of them take two estimates of the gradient.
            step_size: in units of M. A number; or a, b and gamma of :class:`gpext.optim.PolynomialDecay`; by default as
                long as the noise of the gradients lets it, found in the warm-up.
            freeze_below: of the schedule: the ratio of Eq. 7 at which it stays as it is, 0.002 in the paper.
            averaged: average the noise of neighbouring steps; else Eq. 5.
            compensated: reduce the noise by that of the gradients, as far as the warm-up knew it.
            thinning: keep every so many-th.
            preconditioner: M (P, P) in the coordinates of the draws; by default as above.
            generator: for the subset, the starts, the noise and estimates of gradients, on the CPU; seeded with 0 by
                default.
            resume: draws to go on from, with their chains: the result holds these and the new ones, the same as if they
                had been drawn at once. Options other than `thinning` do not apply.
            checkpoint: a directory to write draws and chains to, after ten seconds or a thousand draws of each chain,
                whichever comes first, but not before the time of twenty writes has passed, and at the end; see
                :meth:`load`. Of several ranks the first writes, and all have to see it.
            progress: show a bar on a terminal, or lines in the log "gpext".
            ranks: processes that share the chains out and all get the draws of all, those that one process would have
                got; this one alone by default. Ctrl-C on any ends it on all.

        Raises:
            ValueError: a number that is not positive; a preconditioner that does not fit; the directory holds draws of
                another run; the log posterior is not finite at the model's own hyperparameters; estimates of gradients
                with neither a warm-up nor a step size.
        """
        plan = Plan(num_samples, num_chains, warmup, thinning, generator, resume, checkpoint, progress, ranks)
        size = self.target.moved.size
        if preconditioner is not None:
            check_preconditioner(preconditioner, size)
        if isinstance(step_size, int | float) and not 0 < step_size < math.inf:
            raise ValueError(f"step_size must be positive and finite; got {step_size}.")
        if not freeze_below >= 0:
            raise ValueError(f"freeze_below must not be negative; got {freeze_below}.")
        if resume is None and step_size is None:
            check_warmup(self.target, warmup)

        def begin(parent: torch.Generator, states: list[Tensor]) -> list[dict[str, Any]]:
            mode, scale = mode_and_scale(self.target, parent)
            M = scale if preconditioner is None else preconditioner.detach().double().cpu()
            starts = scattered(mode, M, num_chains, parent)
            return [
                first_state(
                    place,
                    M,
                    step_size,
                    generator=state,
                    freeze_below=freeze_below,
                    averaged=averaged,
                    compensated=compensated,
                )
                for place, state in zip(starts, states, strict=True)
            ]

        options = f"{step_size=}", f"{freeze_below=}", f"{averaged=}", f"{compensated=}"
        found = self._run(plan, begin, *options)
        overload = max(self._walker(each).overload for each in found.state.walkers)
        if overload > 1:
            warn_caller(
                f"the step size is {overload:.2g} times the longest at which the noise of the gradients can be "
                "compensated: draws are too wide. Take a smaller step_size, or None, or more probes.",
                InferenceWarning,
            )
        return found

    def _walker(self, state: dict[str, Any]) -> Langevin:
        return Langevin(self.target, state)

    def _walker_schema(self) -> LangevinSchema:
        return langevin_schema(self.target.moved.size)


def langevin_schema(size: int) -> LangevinSchema:
    """Return the schema of the states of :class:`Langevin` over so many parameters."""
    return LangevinSchema(size, _PAIRS)


def check_preconditioner(M: Tensor, size: int) -> None:
    """Refuse what is no preconditioner (P, P).

    Raises:
        TypeError: it is no tensor.
        ValueError: it has another shape, or is not symmetric and positive definite.
    """
    check_tensor("preconditioner", M)
    if M.shape != (size, size):
        raise ValueError(f"expected a preconditioner ({size}, {size}); got {tuple(M.shape)}.")
    if not torch.allclose(M, M.mT) or int(torch.linalg.cholesky_ex(M).info) != 0:
        raise ValueError("the preconditioner is not symmetric and positive definite.")


def check_warmup(target: LogPosterior, steps: int) -> None:
    """Refuse a warm-up in which a step size cannot be found.

    Raises:
        ValueError: it has too few steps, and gradients are estimates.
    """
    if target.is_estimated and steps <= _PAIRS * _EVERY:
        raise ValueError(
            f"expected a warm-up of more than {_PAIRS * _EVERY} steps to find a step size in; got {steps}. Give a "
            "longer one, or a step_size."
        )


def first_state(
    place: Tensor,
    M: Tensor,
    step_size: float | tuple[float, float, float] | None,
    *,
    generator: Tensor,
    freeze_below: float = 0.0,
    averaged: bool = True,
    compensated: bool = True,
) -> dict[str, Any]:
    """Return the state of a chain at its start (P,); see :meth:`SGLDSampler.run` for the options.

    Args:
        place: (P,).
        M: (P, P).
        step_size: a number, a schedule or None.
        generator: the state of one on the CPU.
        freeze_below: of the schedule.
        averaged: average the noise of neighbouring steps.
        compensated: reduce the noise by that of the gradients.
    """
    return {
        "place": place,
        "generator": generator,
        "M": M,
        "step_size": (step_size, 1.0, 0.0) if isinstance(step_size, int | float) else step_size,
        "freeze_below": freeze_below,
        "averaged": averaged,
        "compensated": compensated,
        "pairs": 0,
        "V": torch.zeros_like(M),
        "warmup": 0,
        "steps": 0,
        "optimizer": None,
        "schedule": None,
    }


class Langevin:
    """One chain; see :class:`gpext.samplers.chains.Walker`."""

    acceptance = math.nan

    def __init__(self, target: LogPosterior, state: dict[str, Any]) -> None:
        self._target, self._start = target, state
        self._theta = state["place"].clone().requires_grad_()
        self._generator = torch.Generator()
        self._generator.set_state(state["generator"])
        self._warmed, self._pairs, self._V = state["warmup"], state["pairs"], state["V"]
        self._steps = state["steps"]
        first = _FIRST if target.is_estimated else _LONGEST
        self._optimizer = SGLD(
            [self._theta],
            lr=first,
            preconditioner=state["M"],
            averaged=state["averaged"],
            compensated=state["compensated"],
            generator=self._generator,
        )
        self._schedule: PolynomialDecay | None = None
        if state["step_size"] is not None:
            self._schedule = PolynomialDecay(self._optimizer, *state["step_size"], freeze_below=state["freeze_below"])
        if state["optimizer"] is not None:
            self._optimizer.load_state_dict(state["optimizer"])
            if self._schedule is not None:
                self._schedule.load_state_dict(state["schedule"])

    @property
    def place(self) -> Tensor:
        """Where it is (P,), in the coordinates of the target."""
        return self._theta.detach().clone()

    @property
    def overload(self) -> float:
        """The step size in units of the longest at which the noise of the gradients can be compensated."""
        if self._pairs < _PAIRS or not self._start["compensated"]:
            return 0.0
        return self._optimizer.param_groups[0]["lr"] / self._optimizer.largest_lr()

    def state(self) -> dict[str, Any]:
        """Return what it goes on from."""
        return {
            **self._start,
            "place": self.place,
            "generator": self._generator.get_state(),
            "pairs": self._pairs,
            "V": self._V,
            "warmup": self._warmed,
            "steps": self._steps,
            "optimizer": self._optimizer.state_dict(),
            "schedule": None if self._schedule is None else self._schedule.state_dict(),
        }

    def step(self, *, adapt: bool) -> None:
        """Go on by one; in a warm-up learn the noise of gradients.

        Raises:
            FloatingPointError: there is no such model.
        """
        self._theta.grad = -self._gradient()
        if adapt and self._target.is_estimated:
            if self._warmed % _EVERY == 0:
                self._learn(self._theta.grad + self._gradient())
            self._warmed += 1
        self._optimizer.step()
        if self._schedule is not None:
            self._schedule.step()
        self._steps += 1

    def _gradient(self) -> Tensor:
        return self._target.gradient(self._theta.detach(), generator=self._generator)

    def _learn(self, difference: Tensor) -> None:
        """Take what two estimates of the gradient differ by into V and the optimiser."""
        self._pairs += 1
        rate = min(_FORGETTING / (self._pairs + 1), 1.0)
        self._V = self._V + rate * (0.5 * difference.unsqueeze(-1) * difference - self._V)
        if self._pairs < _PAIRS:
            return
        self._optimizer.set_gradient_noise(self._V)
        if self._schedule is None:
            self._optimizer.param_groups[0]["lr"] = min(_LONGEST, self._optimizer.largest_lr(_SHARE))
