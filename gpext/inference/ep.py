r"""Expectation propagation that converges, for any likelihood of one latent [JVV11; Minka 2001].

Each factor p(y_i | f_i)^eta is replaced by a Gaussian site, so that posterior marginals and tilted distributions have
the same mean and variance (:mod:`gpext.inference.ep_internals.moment_matching`). On likelihoods that are not
log-concave the plain iteration oscillates or leaves what is a distribution; so it goes in stages, each if the one
before has not converged:

    1. damped parallel sweeps, accelerated, with negative precisions held at zero and then without; a step that would
       leave a cavity improper is shortened
    2. sweeps again from the sites that a few steps of CAVI make, all positive
    3. along the solutions of a likelihood that is wide at first, so that no datum is far out, and narrows, around the
       turns of their branch (:mod:`gpext.inference.ep_internals.arclength`)
    4. the same at 0.7 of the power, where the tilted distributions are calmer, or from the optimum of KL, to which EP
       tends with its power; and from there along the branch in the power, to the one asked for or the largest there is

A batch, whose posteriors have turns of their own, takes Levenberg-Marquardt's steps on the residuals in all sites at
once after its sweeps, and such steps along the paths (:mod:`gpext.inference.ep_internals.continuation`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gpext.inference.ep_internals.moment_matching import Match
from gpext.inference.ep_internals.stages import Search
from gpext.inference.ep_internals.tilted_moments import tilt
from gpext.inference.problem import Problem
from gpext.inference.result import InferenceResult, check_options
from gpext.inference.rule import Rule
from gpext.sites import GaussianSites


@dataclass(frozen=True)
class EP(Rule):
    """Expectation propagation: marginals that match the moments of their tilted distributions.

    Serves any likelihood of one latent, gpext's or gpytorch's. It starts at the prior by default, or from an earlier
    result for these data or its sites. A result at other hyperparameters also has cavities, which are near a solution
    for longer than sites are: Newton's steps go from them. So a grid or a path of hyperparameters is best walked from
    each to the next.

    Args:
        power: eta in (0, 1]: 1 is EP, less is fractional (power) EP, towards 0 variational inference.
        damping: length of a step in the sites, in (0, 1].
        max_steps: maximum number of site evaluations, each one factorisation with variances.
        tolerance: converged when every marginal's mean matches to this many standard deviations, and its variance to
            this fraction.
        jitter: added to the diagonal of the prior covariance; none is needed.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> from gpext.likelihoods import StudentTLikelihood
        >>> prior = MultivariateNormal(torch.zeros(2).double(), torch.eye(2).double())
        >>> result = EP().infer(prior, StudentTLikelihood().double(), torch.tensor([0.0, 9.0]).double())
        >>> result.status.name
        'CONVERGED'
    """

    power: float = 1.0
    damping: float = 0.8
    max_steps: int = 1000
    tolerance: float = 1e-6
    jitter: float = 0.0

    def __post_init__(self) -> None:
        check_options(self.jitter, self.max_steps, self.tolerance)
        for name in ("power", "damping"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1]; got {getattr(self, name)!r}.")

    def _solve(self, problem: Problem, start: GaussianSites | InferenceResult | None) -> InferenceResult:
        search = Search(problem, self.power, self.damping, self.max_steps, self.tolerance)
        found = self._find(search, start)
        local = self._local(problem, found)
        evidence = problem.attach(found.value, local, found.posterior)
        return problem.result(search.name(found), found.posterior, evidence, search.status(found), search.trace)

    def _find(self, search: Search, start: GaussianSites | InferenceResult | None) -> Match:
        """Return the best match of a search; other schedules override it (`benchmarks/ep_schedules.py`)."""
        return search.run(start)

    def _local(self, problem: Problem, found: Match) -> Tensor:
        """Return what has the derivatives of the evidence in the likelihood's parameters: log Z^ at fixed cavities."""
        moments = tilt(problem.likelihood, problem.targets, found.power)
        return moments(found.cavity_mean, found.cavity_variance).log_normalizer.sum(-1) / found.power
