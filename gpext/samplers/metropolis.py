r"""Metropolis-Hastings over hyperparameters with exact marginal likelihoods: the reference for up to some 2000 data.

A Gaussian random walk in unconstrained space. While warming up its covariance follows that of the chain and its size
the acceptance [Haario et al. 2001, Andrieu & Thoms 2008]; then both stay as they are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor
from tqdm import tqdm

from gpext.samplers.draws import WELL_MIXED, SamplingStatus, split_r_hat
from gpext.samplers.hyperposterior import HyperPosterior
from gpext.samplers.log_posterior import LogPosterior

_ACCEPTANCE = 0.3  # aimed at
_CAUTION = 30  # steps for which what was there before counts
_SPREAD = 0.5  # of the starts, in unconstrained space


class MetropolisHastings:
    """Draws of the hyperparameters of an ExactGP.

    Args:
        mll: an exact marginal log likelihood, with its model and likelihood.
        hyperparameters: which parameters to draw; by default all that require gradients. The others stay.

    Raises:
        TypeError, ValueError: as :class:`gpext.samplers.LogPosterior`.
    """

    def __init__(self, mll: ExactMarginalLogLikelihood, hyperparameters: Sequence[str] | None = None) -> None:
        self.target = LogPosterior(mll, hyperparameters)

    def run(
        self,
        num_samples: int,
        num_chains: int = 4,
        warmup: int = 1000,
        *,
        thinning: int = 1,
        generator: torch.Generator | None = None,
        progress: bool = True,
    ) -> HyperPosterior:
        """Return draws; Ctrl-C ends it early and keeps those of the finished part of every chain.

        Args:
            num_samples: draws kept of each chain.
            num_chains: independent chains, from starts around the model's own values.
            warmup: steps before, in which the walk adapts.
            thinning: keep every so many-th.
            generator: for all random numbers, on the CPU; seeded with 0 by default.
            progress: show a progress bar on a terminal.

        Raises:
            ValueError: a number that is not positive.
        """
        if min(num_samples, num_chains, thinning) < 1 or warmup < 0:
            raise ValueError(
                "expected num_samples, num_chains, thinning >= 1 and warmup >= 0; got "
                f"{num_samples}, {num_chains}, {thinning}, {warmup}."
            )
        generator = torch.Generator().manual_seed(0) if generator is None else generator
        began, status = time.perf_counter(), None
        chains: list[list[Tensor]] = []
        walks: list[_Walk] = []
        steps = warmup + num_samples * thinning
        bar = tqdm(total=num_chains * steps, disable=None if progress else True, desc="Metropolis-Hastings")
        try:
            for _ in range(num_chains):
                walk = _Walk(self.target, generator)
                walks.append(walk)
                chains.append([])
                for step in range(steps):
                    walk.step(adapt=step < warmup)
                    bar.update()
                    if step >= warmup and (step - warmup + 1) % thinning == 0:
                        chains[-1].append(walk.place.clone())
        except KeyboardInterrupt:
            status = SamplingStatus.INTERRUPTED
        bar.close()
        size = self.target.moved.size
        finished = [torch.stack(kept) if kept else torch.zeros(0, size, dtype=torch.float64) for kept in chains]
        if status is SamplingStatus.INTERRUPTED:  # the last chain is incomplete; alone, it is all there is
            finished = [draws for draws in finished if len(draws) == num_samples] or finished[-1:]
        raw = torch.stack(finished)
        r_hat = split_r_hat(raw)
        if status is None:
            status = SamplingStatus.MIXED if r_hat < WELL_MIXED else SamplingStatus.NOT_MIXED
        seconds = time.perf_counter() - began
        acceptance = torch.tensor([walk.acceptance for walk in walks[: len(raw)]], dtype=torch.float64)
        message = (
            f"Metropolis-Hastings, {raw.size(0)} chains of {raw.size(1)} draws in {seconds:.1f} s, acceptance "
            f"{acceptance.mean().item():.2f}, largest split R-hat {r_hat:.4f}: {status.value}."
        )
        return HyperPosterior(self.target, raw, status, message, seconds, r_hat, acceptance)


class _Walk:
    """One chain."""

    def __init__(self, target: LogPosterior, generator: torch.Generator) -> None:
        self._target, self._generator = target, generator
        centre = target.moved.read()
        start = centre + _SPREAD * self._normal(len(centre))
        value = target.value(start)
        self.place, self._value = (start, value) if math.isfinite(value) else (centre, target.value(centre))
        self._mean, self._covariance = self.place.clone(), 0.1 * torch.eye(len(centre), dtype=torch.float64)
        self._log_size, self._adapted = math.log(2.38 / math.sqrt(len(centre))), 0
        self._tried = self._accepted = 0

    @property
    def acceptance(self) -> float:
        """The share of proposals accepted after the warm-up."""
        return self._accepted / self._tried if self._tried else math.nan

    def step(self, *, adapt: bool) -> None:
        root = torch.linalg.cholesky(self._covariance)
        proposal = self.place + math.exp(self._log_size) * (root @ self._normal(len(root)))
        value = self._target.value(proposal)
        probability = math.exp(min(value - self._value, 0.0)) if math.isfinite(value) else 0.0
        accepted = float(torch.rand((), dtype=torch.float64, generator=self._generator)) < probability
        if accepted:
            self.place, self._value = proposal, value
        if adapt:
            self._adapted += 1
            rate = (self._adapted + _CAUTION) ** -0.6
            self._log_size += rate * (probability - _ACCEPTANCE)
            gap = self.place - self._mean
            self._mean = self._mean + rate * gap
            self._covariance = self._covariance + rate * (gap.unsqueeze(-1) * gap - self._covariance)
            self._covariance = self._covariance + 1e-8 * torch.eye(len(gap), dtype=torch.float64)
        else:
            self._tried, self._accepted = self._tried + 1, self._accepted + accepted

    def _normal(self, size: int) -> Tensor:
        return torch.randn(size, dtype=torch.float64, generator=self._generator)
