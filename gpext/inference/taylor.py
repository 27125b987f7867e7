r"""Taylor's approximation: the log likelihood expanded to second order at a point that the targets choose [Cha13].

    tau = W(f~),  nu = g(f~) + W(f~) f~,   c_i = log p(y_i | f~_i) - nu_i f~_i + tau_i f~_i^2 / 2

One Cholesky factorisation and no iteration: label regression with the right weights. Repeated at its own posterior mean
it is Newton's method, whose fixed point is Laplace's approximation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.bounds.contracts import HasExpansionPoint
from gpext.inference.expansion import Sites, expand, require_curvature
from gpext.inference.problem import Problem
from gpext.inference.result import InferenceResult, Status, check_options
from gpext.inference.rule import Rule


@dataclass(frozen=True)
class Taylor(Rule):
    """One expansion of the log likelihood, at a fixed point.

    Serves any likelihood of one latent, gpext's or gpytorch's, whose log density has a second derivative, and those of
    several latents that have a `curvature`. Nothing iterates: with a `start`, checks of the data are not repeated.

    Args:
        expansion_point: maps targets to f~ (..., N); by default the likelihood's `expansion_point(targets)`,
            and zero for a likelihood without one. It should not move with the hyperparameters: the evidence of a
            moving expansion has no upper bound.
        jitter: added to the diagonal of the prior covariance; none is needed.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> from gpext.likelihoods import PoissonLikelihood
        >>> prior = MultivariateNormal(torch.zeros(2).double(), torch.eye(2).double())
        >>> Taylor().infer(prior, PoissonLikelihood(), torch.tensor([3.0, 1.0])).status.name
        'CONVERGED'
    """

    expansion_point: Callable[[Tensor], Tensor] | None = None
    jitter: float = 0.0

    def __post_init__(self) -> None:
        check_options(self.jitter)

    def _solve(self, problem: Problem, start: Sites | None) -> InferenceResult:
        likelihood, targets = problem.likelihood, problem.targets
        if start is None:
            require_curvature(likelihood, targets, problem.mean)
        point = self._point(problem)
        at = expand(likelihood, targets, point)
        log_p = at.log_prob.detach()
        posterior = problem.condition(at.sites.detach())
        if not bool(posterior.positive_definite.all()):
            log_evidence = log_p.sum(-1) - torch.inf
            status = Status.NOT_POSITIVE_DEFINITE
            return problem.result("Taylor", problem.condition(problem.no_sites()), log_evidence, status, [log_evidence])
        sites, gap = posterior.sites, posterior.mean - point
        # c_i = log p - nu f~ + f~' U f~ / 2, and E_q of the expansion
        constants = log_p.sum(-1) - problem.inner(sites.shift - 0.5 * sites.times(point), point).detach()
        value = problem.over_latents_of(posterior, posterior.log_normalizer) + constants
        curved = at.gradient - 0.5 * at.sites.times(gap)
        local = (at.log_prob + at.spread(posterior)).sum(-1) + problem.inner(gap, curved)
        evidence = problem.attach(value, local, posterior)
        return problem.result("Taylor", posterior, evidence, Status.CONVERGED, [value])

    def _point(self, problem: Problem) -> Tensor:
        likelihood, targets = problem.likelihood, problem.targets
        if self.expansion_point:
            point = self.expansion_point(targets).double()
        elif isinstance(likelihood, HasExpansionPoint):
            point = likelihood.expansion_point(targets).double()
        else:
            return torch.zeros_like(problem.mean)
        return point.expand(torch.broadcast_shapes(point.shape, problem.mean.shape))
