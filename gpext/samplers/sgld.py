r"""Langevin draws of hyperparameters from gradients that are right on average [FE15 Sec. 5].

    theta <- theta + eps / 2 M g + N(0, eps M),   eps_t = a (b + t)^-gamma until it is frozen     (gpext.optim.SGLD)

M is about the covariance of the posterior (:mod:`gpext.samplers.mode`). In its units a step of size eps widens the
draws by about eps / 8 of a standard deviation, and gradients with noise of covariance V by another

    eps / 8 lambda(M^1/2 V M^1/2),

half of what the freeze rule looks at: raise the number of probes or lower the steps where it counts. A chain forgets
in some 4 / eps steps; later where a marginal has a heavy tail in unconstrained space, as softplus gives large scales.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpext.optim import SGLD, PolynomialDecay
from gpext.samplers.chains import ChainSampler, check_counts, offspring
from gpext.samplers.hyperposterior import HyperPosterior
from gpext.samplers.log_posterior import LogPosterior
from gpext.samplers.mode import mode_and_scale, scattered


class SGLDSampler(ChainSampler):
    """Draws of the hyperparameters of an ExactGP, each at the cost of a gradient.

    Args:
        mll: :class:`gpext.mlls.UnbiasedMarginalLogLikelihood` for tens of thousands of data, or gpytorch's exact one.
        hyperparameters: which parameters to draw; by default all that require gradients. The others stay.

    Raises:
        TypeError, ValueError: as :class:`gpext.samplers.LogPosterior`.
    """

    name = "SGLD"

    def run(
        self,
        num_samples: int,
        num_chains: int = 4,
        warmup: int = 500,
        *,
        step_size: tuple[float, float, float] = (0.9, 9.0, 0.3),
        freeze_below: float = 0.002,
        thinning: int = 1,
        preconditioner: Tensor | None = None,
        generator: torch.Generator | None = None,
        resume: HyperPosterior | None = None,
        checkpoint: str | Path | None = None,
        progress: bool = True,
    ) -> HyperPosterior:
        """Return draws; Ctrl-C, or a chain that diverges, ends it early and keeps the finished ones of all chains.

        Args:
            num_samples: draws kept of each chain, beside those of `resume`.
            num_chains: independent chains, from starts about the mode of a subset of the data.
            warmup: steps before.
            step_size: a, b and gamma of :class:`gpext.optim.PolynomialDecay`.
            freeze_below: see there.
            thinning: keep every so many-th.
            preconditioner: M (P, P) in unconstrained space; by default as above.
            generator: for the subset, the starts, the noise and estimates of gradients, on the CPU; seeded with 0 by
                default.
            resume: draws to go on from, with their chains: the result holds these and the new ones, the same as if they
                had been drawn at once. `num_chains`, `warmup`, `step_size`, `freeze_below`, `preconditioner` and
                `generator` do not apply.
            checkpoint: a directory to write draws and chains to, every two minutes and at the end; see :meth:`load`.
            progress: show a progress bar on a terminal.

        Raises:
            ValueError: a number that is not positive; a preconditioner that does not fit; the directory holds draws of
                another run; the log posterior is not finite at the model's own hyperparameters.
        """
        check_counts(num_samples, num_chains, thinning, warmup)
        size = self.target.moved.size
        if preconditioner is not None and preconditioner.shape != (size, size):
            raise ValueError(f"expected a preconditioner ({size}, {size}); got {tuple(preconditioner.shape)}.")

        def begin() -> list[dict[str, Any]]:
            parent, states = offspring(num_chains, generator)
            mode, scale = mode_and_scale(self.target, parent)
            M = scale if preconditioner is None else preconditioner.detach().double().cpu()
            common = {"M": M, "step_size": step_size, "freeze_below": freeze_below, "optimizer": None, "schedule": None}
            starts = scattered(mode, M, num_chains, parent)
            return [{"place": p, "generator": g, **common} for p, g in zip(starts, states, strict=True)]

        return self._run(
            begin,
            num_samples=num_samples,
            warmup=warmup,
            thinning=thinning,
            resume=resume,
            checkpoint=checkpoint,
            progress=progress,
        )

    def _walker(self, state: dict[str, Any]) -> _Langevin:
        return _Langevin(self.target, state)


class _Langevin:
    """One chain; see :class:`gpext.samplers.chains.Walker`."""

    acceptance = math.nan

    def __init__(self, target: LogPosterior, state: dict[str, Any]) -> None:
        self._target, self._start = target, state
        self._theta = state["place"].clone().requires_grad_()
        self._generator = torch.Generator()
        self._generator.set_state(state["generator"])
        a, b, gamma = state["step_size"]
        self._optimizer = SGLD([self._theta], lr=a, preconditioner=state["M"], generator=self._generator)
        self._schedule = PolynomialDecay(self._optimizer, a, b, gamma, freeze_below=state["freeze_below"])
        if state["optimizer"] is not None:
            self._optimizer.load_state_dict(state["optimizer"])
            self._schedule.load_state_dict(state["schedule"])

    @property
    def place(self) -> Tensor:
        return self._theta.detach().clone()

    def state(self) -> dict[str, Any]:
        return {
            **self._start,
            "place": self.place,
            "generator": self._generator.get_state(),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
        }

    def step(self, *, adapt: bool) -> None:
        self._theta.grad = -self._target.gradient(self._theta.detach(), generator=self._generator)
        self._optimizer.step()
        self._schedule.step()
