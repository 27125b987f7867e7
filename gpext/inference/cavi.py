r"""Coordinate-ascent variational inference in the augmented model, in closed form [GWO20 Alg. 1].

    repeat
        c_i^2 = E_q[h_i^2],   w_i = -phi'(c_i^2) / phi(c_i^2)               local update: q(w)
        tau_i = 2 w_i gamma_i,   nu_i = g_i + w_i beta_i                     sites
        V = (K^-1 + diag(tau))^-1,   m = V (nu + K^-1 mu)                    global update: q(f)

Each step increases the bound sum_i f_b(y_i, m_i, v_i) - KL(q(f) || p(f)), which equals A(nu, tau) + sum_i c_i with
c_i = f_b(y_i, m_i, v_i) - E_q[log t_i(f_i)].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gpext.bounds import num_latents
from gpext.bounds.contracts import HasCurvature, HasJointTiltedMoments
from gpext.inference.drivers.fixed_point import Terms, climb, conclude
from gpext.inference.local_terms import LocalTerms, augmented_sites, augmented_terms
from gpext.inference.problem import Problem
from gpext.inference.result import InferenceResult, check_options
from gpext.inference.rule import Rule
from gpext.likelihoods import AugmentedLikelihood
from gpext.sites import GaussianSites


def require_augmentation(likelihood: Any) -> AugmentedLikelihood:
    """Return the likelihood if it has an augmentation.

    Raises:
        TypeError: naming what serves the likelihood instead.

    Example:
        >>> from gpext.likelihoods import LaplaceLikelihood
        >>> require_augmentation(LaplaceLikelihood())
        LaplaceLikelihood(
          (quadrature): GaussHermiteQuadrature1D()
          (raw_noise_constraint): Positive()
        )
    """
    if not isinstance(likelihood, AugmentedLikelihood):
        bends = num_latents(likelihood) is None or isinstance(likelihood, HasCurvature)
        serves_ep = num_latents(likelihood) is None or isinstance(likelihood, HasJointTiltedMoments)
        others = ["KL()", *["EP()"] * serves_ep, *["Laplace()"] * bends]
        raise TypeError(
            f"CAVI and Gibbs sampling need a likelihood with a scale-mixture augmentation (a gpext SuperGaussian, "
            f"StudentT, Laplace, Matern32, BernoulliLogit, BayesianSVM or NegativeBinomial likelihood); got "
            f"{type(likelihood).__module__}.{type(likelihood).__qualname__}. On the full data gpext.inference offers "
            f"{', '.join(others)}; with inducing points it can be trained with gpytorch.mlls.VariationalELBO."
        )
    return likelihood


@dataclass(frozen=True)
class CAVI(Rule):
    """Closed-form variational inference on the full data, one Cholesky a step.

    Serves any likelihood with an augmentation. It starts at the prior's marginals by default.

    Args:
        max_steps: maximum number of steps.
        tolerance: converged when no site would move the mean of its own marginal by more than this many standard
            deviations, or its variance by more than this fraction, if it alone were updated.
        jitter: added to the diagonal of the prior covariance; the augmented posterior needs none.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> from gpext.likelihoods import BernoulliLogitLikelihood
        >>> prior = MultivariateNormal(torch.zeros(2).double(), torch.eye(2).double())
        >>> result = CAVI().infer(prior, BernoulliLogitLikelihood(), torch.tensor([0.0, 1.0]).double())
        >>> result.status.name
        'CONVERGED'
    """

    max_steps: int = 1000
    tolerance: float = 1e-8
    jitter: float = 0.0

    def __post_init__(self) -> None:
        check_options(self.jitter, self.max_steps, self.tolerance)

    def _require(self, likelihood: Any) -> None:
        require_augmentation(likelihood)

    def _solve(self, problem: Problem, start: GaussianSites | None) -> InferenceResult:
        likelihood, targets = problem.likelihood, problem.targets
        augmentation = likelihood.unchecked_augmentation(targets)
        starts = [problem.no_sites] if start is None else [lambda: start, problem.no_sites]
        climbed = climb(problem, mixture_terms(likelihood, targets), starts, self.max_steps, self.tolerance)
        iterate, steps, status = climbed
        return conclude(problem, augmentation.bound, "CAVI", iterate, status, steps)


def mixture_terms(likelihood: AugmentedLikelihood, targets: Tensor) -> Terms:
    """Return the augmented bound on E[log p(y_i | f_i)] and its derivatives, as a function of the marginals."""
    augmentation = likelihood.unchecked_augmentation(targets)

    def terms(mean: Tensor, variance: Tensor) -> LocalTerms:
        return augmented_terms(likelihood, targets, mean, variance, augmented_sites(augmentation, mean, variance))

    return terms
