r"""Metropolis-Hastings over hyperparameters with exact marginal likelihoods: the reference for up to some 2000 data.

A Gaussian random walk, in logarithms of parameters that are only bounded below and in unconstrained space otherwise.
During the warm-up its covariance adapts to that of the chain, starting from the curvature at the mode, and its size to
the acceptance [Haario et al. 2001, Andrieu & Thoms 2008]; then both are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from gpext.mlls import UnbiasedMarginalLogLikelihood
from gpext.samplers.engine import Sampler, Start
from gpext.samplers.hyperposterior import HyperPosterior
from gpext.samplers.state import ChainState
from gpext.samplers.targets.log_posterior import LogPosterior
from gpext.samplers.targets.mode import mode_and_scale, scattered
from gpext.schema import Number, Numbers, Record

_ACCEPTANCE = 0.3  # aimed at
_CAUTION = 100  # steps for which what was there before counts
_FORGETTING = 2.0  # the covariance is of the last 3/4 of the steps or so: the early ones are not of the posterior yet


@dataclass(frozen=True)
class RandomWalk:
    """The state of the random walk of a chain besides its position."""

    value: float  # log p(theta | y) at the place
    mean: Tensor  # of the chain (P,)
    covariance: Tensor  # of the chain (P, P)
    log_size: float  # of the proposals, in units of the covariance's root
    num_adapted: int = 0  # steps of the warm-up
    num_tried: int = 0  # proposals after it
    num_accepted: int = 0


class MetropolisHastings(Sampler[HyperPosterior]):
    """Draws of the hyperparameters of an ExactGP.

    Args:
        mll: an exact marginal log likelihood, with its model and likelihood.
        hyperparameters: which parameters to draw; by default all that require gradients. The others stay.

    Raises:
        TypeError, ValueError: as :class:`gpext.samplers.LogPosterior`; or the objective has no value, only a gradient.

    Example:
        >>> import gpytorch, torch
        >>> from gpytorch.priors import LogNormalPrior
        >>> class Model(gpytorch.models.ExactGP):
        ...     def __init__(self, x, y):
        ...         super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        ...         self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), gpytorch.kernels.RBFKernel()
        ...         self.covar_module.register_prior("lengthscale_prior", LogNormalPrior(0.0, 1.0), "lengthscale")
        ...         self.likelihood.register_prior("noise_prior", LogNormalPrior(-2.0, 1.0), "noise")
        ...
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
        >>> x = torch.linspace(0, 6, 20).double()
        >>> model = Model(x, torch.sin(x)).double()
        >>> sampler = MetropolisHastings(gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model))
        >>> draws = sampler.run(50, num_chains=2, warmup=20, progress=False, generator=torch.Generator().manual_seed(0))
        >>> draws.draws["covar_module.lengthscale"].shape
        torch.Size([2, 50, 1, 1])
        >>> draws.predict(x[:3]).mean.shape
        torch.Size([3])
    """

    name = "Metropolis-Hastings"
    together = False
    result = HyperPosterior
    target: LogPosterior

    def __init__(self, mll: ExactMarginalLogLikelihood, hyperparameters: Sequence[str] | None = None) -> None:
        if isinstance(mll, UnbiasedMarginalLogLikelihood):
            raise TypeError(
                "an UnbiasedMarginalLogLikelihood has unbiased gradients but not the value that a rejection needs; "
                "pass gpytorch.mlls.ExactMarginalLogLikelihood, or use gpext.samplers.SGLDSampler."
            )
        self.target = LogPosterior(mll, hyperparameters, logarithms=True)

    def init(self, start: Start) -> list[ChainState]:
        """Return the states of chains about the mode of a subset of the data.

        Raises:
            ValueError: the log posterior is not finite at the model's own hyperparameters.
        """
        self.target.reset()
        mode, M = mode_and_scale(self.target, start.shared)
        places = scattered(mode, M, start.num_chains, start.shared)
        return [_first(self.target, places[number], M) for (number,) in start.chains]

    def step(self, state: ChainState, generator: torch.Generator) -> ChainState:
        """Return the state after a proposal, accepted or not."""
        place, walk = state.raw[0], state.kernel
        noise = torch.randn(len(place), dtype=torch.float64, generator=generator, device="cpu")
        proposal = place + math.exp(walk.log_size) * (torch.linalg.cholesky(walk.covariance) @ noise)
        value = self.target.value(proposal)
        probability = math.exp(min(value - walk.value, 0.0)) if math.isfinite(value) else 0.0
        accepted = float(torch.rand((), dtype=torch.float64, generator=generator, device="cpu")) < probability
        if accepted:
            place, walk = proposal, replace(walk, value=value)
        if state.warmup_left:
            walk = _adapted(walk, place, probability)
        else:
            walk = replace(walk, num_tried=walk.num_tried + 1, num_accepted=walk.num_accepted + accepted)
        return replace(state, raw=place.unsqueeze(0), kernel=walk)

    def restored_kernel(self, stored: object, num_chains: int, where: str) -> RandomWalk:
        """Return the state of a walk that was stored.

        Raises:
            ValueError: it is something else.
        """
        P, count = self.target.size, Number(whole=True, least=0)
        vector, matrix = (Numbers((P,) * order, torch.float64) for order in (1, 2))
        numbers = {"value": Number(finite=False), "mean": vector, "covariance": matrix, "log_size": Number()}
        Record({**numbers, "num_adapted": count, "num_tried": count, "num_accepted": count}).check(stored, where)
        assert isinstance(stored, dict)  # checked by the record
        return RandomWalk(**stored)

    def acceptance(self, state: ChainState) -> float:
        """Return the share of proposals accepted after the warm-up."""
        walk = state.kernel
        return walk.num_accepted / walk.num_tried if walk.num_tried else math.nan


def _first(target: LogPosterior, place: Tensor, M: Tensor) -> ChainState:
    """Return the state of a chain at its start (P,)."""
    walk = RandomWalk(target.value(place), place, M, math.log(2.38 / math.sqrt(len(place))))  # -inf is left at once
    raw = place.unsqueeze(0)
    return ChainState(raw, raw[:, :0], walk)


def _adapted(walk: RandomWalk, place: Tensor, probability: float) -> RandomWalk:
    """Return the walk after a step of the warm-up that was accepted with this probability."""
    steps = walk.num_adapted + _CAUTION
    rate = _FORGETTING / steps
    gap = place - walk.mean
    return replace(
        walk,
        log_size=walk.log_size + steps**-0.6 * (probability - _ACCEPTANCE),
        mean=walk.mean + rate * gap,
        covariance=walk.covariance + rate * ((1 - rate) * gap.unsqueeze(-1) * gap - walk.covariance),
        num_adapted=walk.num_adapted + 1,
    )
