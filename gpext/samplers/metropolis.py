r"""Metropolis-Hastings over hyperparameters with exact marginal likelihoods: the reference for up to some 2000 data.

A Gaussian random walk in the logarithms of what is only bounded below, and in unconstrained space else. While warming
up its covariance follows that of the chain, beginning with the curvature at the mode, and its size the acceptance
[Haario et al. 2001, Andrieu & Thoms 2008]; then both stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from gpext.mlls import UnbiasedMarginalLogLikelihood
from gpext.parallel import Ranks
from gpext.samplers.chains import ChainSampler, Plan
from gpext.samplers.hyperposterior import HyperPosterior
from gpext.samplers.targets.log_posterior import LogPosterior
from gpext.samplers.targets.mode import mode_and_scale, scattered
from gpext.schema import GeneratorState, Number, Numbers, Record

_ACCEPTANCE = 0.3  # aimed at
_CAUTION = 100  # steps for which what was there before counts
_FORGETTING = 2.0  # the covariance is of the last 3/4 of the steps or so: the early ones are not of the posterior yet


class MetropolisHastings(ChainSampler):
    """Draws of the hyperparameters of an ExactGP.

    Args:
        mll: an exact marginal log likelihood, with its model and likelihood.
        hyperparameters: which parameters to draw; by default all that require gradients. The others stay.

    Raises:
        TypeError, ValueError: as :class:`gpext.samplers.LogPosterior`; or the objective has no value, only a gradient.
    """

    name = "Metropolis-Hastings"

    def __init__(self, mll: ExactMarginalLogLikelihood, hyperparameters: Sequence[str] | None = None) -> None:
        if isinstance(mll, UnbiasedMarginalLogLikelihood):
            raise TypeError(
                "an UnbiasedMarginalLogLikelihood has unbiased gradients but not the value that a rejection needs; "
                "pass gpytorch.mlls.ExactMarginalLogLikelihood, or use gpext.samplers.SGLDSampler."
            )
        super().__init__(mll, hyperparameters, logarithms=True)

    def run(
        self,
        num_samples: int,
        num_chains: int = 4,
        warmup: int = 1000,
        *,
        thinning: int = 1,
        generator: torch.Generator | None = None,
        resume: HyperPosterior | None = None,
        checkpoint: str | Path | None = None,
        progress: bool = True,
        ranks: Ranks | None = None,
    ) -> HyperPosterior:
        """Return draws; Ctrl-C ends it early and keeps the finished ones of all chains.

        Args:
            num_samples: draws kept of each chain, beside those of `resume`.
            num_chains: independent chains, from starts about the mode of a subset of the data.
            warmup: steps before, in which the walk adapts.
            thinning: keep every so many-th.
            generator: for all random numbers, on the CPU; seeded with 0 by default.
            resume: draws to go on from, with their chains: the result holds these and the new ones, the same as if they
                had been drawn at once. `num_chains`, `warmup` and `generator` do not apply.
            checkpoint: a directory to write draws and chains to, after ten seconds or a thousand draws of each chain,
                whichever comes first, but not before the time of twenty writes has passed, and at the end; see
                :meth:`load`. Of several ranks the first writes, and all have to see it.
            progress: show a bar on a terminal, or lines in the log "gpext".
            ranks: processes that share the chains out and all get the draws of all, those that one process would have
                got; this one alone by default. Ctrl-C on any ends it on all.

        Raises:
            ValueError: a number that is not positive; the directory holds draws of another run; the log posterior is
                not finite at the model's own hyperparameters.
        """
        plan = Plan(num_samples, num_chains, warmup, thinning, generator, resume, checkpoint, progress, ranks)

        def begin(parent: torch.Generator, states: list[Tensor]) -> list[dict[str, Any]]:
            mode, M = mode_and_scale(self.target, parent)
            starts = scattered(mode, M, num_chains, parent)
            return [_first(self.target, *each, M) for each in zip(starts, states, strict=True)]

        return self._run(plan, begin)

    def _walker(self, state: dict[str, Any]) -> _Walk:
        return _Walk(self.target, state)

    def _walker_schema(self) -> Record:
        P, count = self.target.moved.size, Number(whole=True, least=0)
        vector, matrix = (Numbers((P,) * order, torch.float64) for order in (1, 2))
        return Record(
            {
                "place": vector,
                "value": Number(finite=False),
                "mean": vector,
                "covariance": matrix,
                "log_size": Number(),
                "adapted": count,
                "tried": count,
                "accepted": count,
                "generator": GeneratorState(torch.device("cpu")),
            }
        )


def _first(target: LogPosterior, start: Tensor, generator_state: Tensor, M: Tensor) -> dict[str, Any]:
    """Return the state of a chain at its start."""
    return {
        "place": start,
        "value": target.value(start),  # -inf is left at once
        "mean": start,
        "covariance": M,
        "log_size": math.log(2.38 / math.sqrt(len(start))),
        "adapted": 0,
        "tried": 0,
        "accepted": 0,
        "generator": generator_state,
    }


class _Walk:
    """One chain; see :class:`gpext.samplers.chains.Walker`."""

    def __init__(self, target: LogPosterior, state: dict[str, Any]) -> None:
        self._target, self._at = target, state
        self._generator = torch.Generator()
        self._generator.set_state(state["generator"])

    @property
    def place(self) -> Tensor:
        return self._at["place"]

    @property
    def acceptance(self) -> float:
        return self._at["accepted"] / self._at["tried"] if self._at["tried"] else math.nan

    def state(self) -> dict[str, Any]:
        return self._at

    def step(self, *, adapt: bool) -> None:
        at = self._at
        noise = torch.randn(len(at["place"]), dtype=torch.float64, generator=self._generator, device="cpu")
        proposal = at["place"] + math.exp(at["log_size"]) * (torch.linalg.cholesky(at["covariance"]) @ noise)
        value = self._target.value(proposal)
        probability = math.exp(min(value - at["value"], 0.0)) if math.isfinite(value) else 0.0
        accepted = float(torch.rand((), dtype=torch.float64, generator=self._generator, device="cpu")) < probability
        moved = {"place": proposal, "value": value} if accepted else {}
        counts = {"tried": at["tried"] + 1, "accepted": at["accepted"] + accepted}
        after = {**at, **moved, "generator": self._generator.get_state()}
        self._at = {**after, **(_adapted(after, probability) if adapt else counts)}


def _adapted(at: dict[str, Any], probability: float) -> dict[str, Any]:
    """Return the walk's law after a step that was accepted with this probability."""
    steps = at["adapted"] + _CAUTION
    rate = _FORGETTING / steps
    gap = at["place"] - at["mean"]
    return {
        "log_size": at["log_size"] + steps**-0.6 * (probability - _ACCEPTANCE),
        "mean": at["mean"] + rate * gap,
        "covariance": at["covariance"] + rate * ((1 - rate) * gap.unsqueeze(-1) * gap - at["covariance"]),
        "adapted": at["adapted"] + 1,
    }
