r"""Taylor's approximation: the log likelihood expanded to second order at a point that the targets choose [Cha13].

    tau = W(f~),  nu = g(f~) + W(f~) f~,   c_i = log p(y_i | f~_i) - nu_i f~_i + tau_i f~_i^2 / 2

One Cholesky factorisation and no iteration: label regression with the right weights. Repeated at its own posterior mean
it is Newton's method, whose fixed point is Laplace's approximation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from gpext.inference.derivatives import log_prob_derivatives, require_curvature
from gpext.inference.problem import Problem
from gpext.inference.result import InferenceResult, Status
from gpext.sites import GaussianSites


@dataclass(frozen=True)
class Taylor:
    """One expansion of the log likelihood, at a fixed point.

    Args:
        expansion_point: maps targets to f~ (..., N); by default what the likelihood's `expansion_point(targets)` says,
            and zero for a likelihood that says nothing. It should not move with the hyperparameters: the evidence of a
            moving expansion has no upper bound.
        jitter: added to the diagonal of the prior covariance; none is needed.
    """

    expansion_point: Callable[[Tensor], Tensor] | None = None
    jitter: float = 0.0

    def infer(
        self,
        prior: MultivariateNormal,
        likelihood: Any,
        targets: Tensor,
        *,
        start: GaussianSites | None = None,
    ) -> InferenceResult:
        """Return the posterior, its sites and the approximate log evidence.

        Args:
            prior: p(f) at the training inputs, (..., N).
            likelihood: any likelihood of one latent, gpext's or gpytorch's, whose log density bends.
            targets: (..., N).
            start: that there is an earlier result for these data, whose checks need not be repeated; nothing iterates.

        Raises:
            TypeError: several latents a datum, a log density without curvature, or half precision.
            ValueError: bad targets, shapes that do not fit, or a prior that is not finite.
        """
        problem = Problem.of(prior, likelihood, targets, self.jitter)
        if start is None:
            require_curvature(likelihood, targets)
        point = self._point(problem)
        log_p, g, bend = log_prob_derivatives(likelihood, targets, point, 2)
        log_p0, g0, bend0, point0 = (t.detach() for t in (log_p, g, bend, point))
        posterior = problem.condition(GaussianSites(g0 - bend0 * point0, -bend0))
        if not bool(posterior.positive_definite.all()):
            log_evidence = log_p0.sum(-1) - torch.inf
            status = Status.NOT_POSITIVE_DEFINITE
            return problem.result("Taylor", problem.condition(problem.no_sites()), log_evidence, status, [log_evidence])
        constants = log_p0 - posterior.sites.expected_log(point0, torch.zeros_like(point0))
        value = posterior.log_normalizer + constants.sum(-1)
        gap = posterior.mean - point
        local = log_p + gap * g + 0.5 * (gap.square() + posterior.variance) * bend  # E_q of the expansion
        evidence = problem.attach(value, local.sum(-1), posterior)
        return problem.result("Taylor", posterior, evidence, Status.CONVERGED, [value])

    def _point(self, problem: Problem) -> Tensor:
        choose = self.expansion_point or getattr(problem.likelihood, "expansion_point", None)
        if choose is None:
            return torch.zeros_like(problem.mean)
        point = choose(problem.targets).double()
        return point.expand(torch.broadcast_shapes(point.shape, problem.mean.shape))
