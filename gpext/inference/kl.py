r"""The best Gaussian approximation under a bound on the expected log likelihood [KMM12].

    max over m, V:   sum_i f_b(y_i, m_i, v_i) - KL(N(m, V) || N(mu, K))                      [KMM12 Eq. 6]

is stationary where V^-1 = K^-1 + diag(tau), tau_i = -2 df_b/dv_i, and K^-1 (m - mu) = df_b/dm [KMM12 Eqs. 7, 8]: at
Gaussian sites. For the bounds of :mod:`gpext.bounds` on log-concave likelihoods there is one such point. Others, such
as the Student-t, may have several, and the first that is found can be below the bound of CAVI. If there is an
augmentation, KL therefore also starts from CAVI's sites and keeps the higher optimum, so that CAVI <= KL <= log p(y).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor

from gpext.bounds import Bound, Quadrature
from gpext.bounds.contracts import HasMultinomialTerms
from gpext.inference.cavi import mixture_terms
from gpext.inference.conjugate import exact_result
from gpext.inference.drivers.fixed_point import Climb, Norm, Terms, check_norm, climb, conclude, visit
from gpext.inference.drivers.sequential import sweep_sequentially
from gpext.inference.drivers.single_site import solve_scalar
from gpext.inference.drivers.softmax_curvature import Curvature, exact_curvature, log_sum_exp_curvature
from gpext.inference.local_modes import independent_modal_sites
from gpext.inference.local_terms import LocalTerms, bound_terms
from gpext.inference.problem import Problem
from gpext.inference.result import InferenceResult, Status, check_options
from gpext.inference.rule import Rule
from gpext.likelihoods import AugmentedLikelihood
from gpext.posteriors import DensePrior
from gpext.sites import CoupledSites, GaussianSites, JointSites

_START_STEPS = 20
_START_STEPS_FAR = 200  # where a datum is still more than a standard deviation away
_START = 3  # parallel steps before the first sweep of the sequential schedule
_PATIENCE = 60  # of "auto", before it continues sequentially
_NEAR_MIXTURE = 1e-2  # tolerance of CAVI as a start: near enough to where it would end


@dataclass(frozen=True)
class KL(Rule):
    """Variational Gaussian inference: maximise the evidence lower bound over all Gaussians.

    Serves any gpext likelihood that the bound applies to, and any gpytorch likelihood of one latent whose `forward`
    returns a distribution with `log_prob`.

    Args:
        bound: the bound that replaces E_q[log p(y | f)], any of `gpext.bounds`; the exact expectation by default.
        schedule: "parallel" moves all sites at once, accelerated, one Cholesky factorisation and one triangular solve a
            sweep. "sequential" is KMM12's Algorithm 1: after three parallel steps site by site, each raising the bound,
            in blocks; it takes about half as many sweeps, dearer while the sites move far, and serves one posterior of
            one latent. "auto" is parallel, the faster of the two on all data measured (`benchmarks/concave_kl.py`), but
            continues sequentially if 60 steps are not enough (prior variances of 1e6, say).
        max_steps: maximum number of steps.
        tolerance: converged when no site would move the mean of its own marginal by more than this many standard
            deviations, or its variance by more than this fraction, if it alone were updated. The default leaves
            relative errors of some 1e-6 in the derivatives of the evidence.
        jitter: added to the diagonal of the prior covariance; none is needed.
        norm: "max" if the tolerance is for every site; "rms" if it is for the root mean square over the sites, which
            bounds how far the evidence is from its maximum, and takes half as many steps where a few sites converge
            last: :func:`gpext.fit` asks for it while it trains. Sequential sweeps go by the maximum.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> from gpext.likelihoods import BernoulliLogitLikelihood
        >>> prior = MultivariateNormal(torch.zeros(2).double(), torch.eye(2).double())
        >>> result = KL().infer(prior, BernoulliLogitLikelihood(), torch.tensor([0.0, 1.0]).double())
        >>> result.status.name
        'CONVERGED'
    """

    bound: Bound = field(default_factory=Quadrature)
    schedule: Literal["auto", "parallel", "sequential"] = "auto"
    max_steps: int = 1000
    tolerance: float = 1e-6
    jitter: float = 0.0
    norm: Norm = "max"

    def __post_init__(self) -> None:
        if not isinstance(self.bound, Bound):
            raise TypeError(
                f"bound must be an instance of one of gpext.bounds, such as Quadrature(); got {self.bound!r}."
            )
        if self.schedule not in ("auto", "parallel", "sequential"):
            raise ValueError(f"schedule must be 'auto', 'parallel' or 'sequential'; got {self.schedule!r}.")
        check_options(self.jitter, self.max_steps, self.tolerance)
        check_norm(self.norm)

    def _solve(self, problem: Problem, start: GaussianSites | JointSites | None) -> InferenceResult:
        likelihood, targets = problem.likelihood, problem.targets
        sequential = self.schedule == "sequential"
        if sequential:
            problem.require_data_apart()
        local = self.bound.bind(likelihood, targets)
        name = f"KL({self.bound!r})"
        exact = exact_result(problem, name)
        if exact is not None:
            return exact

        def terms(mean: Tensor, variance: Tensor) -> LocalTerms:
            return bound_terms(local, mean, variance)

        starts = [lambda: independent_sites(problem, terms), lambda: independent_modal_sites(problem), problem.no_sites]
        if not isinstance(start, GaussianSites):  # those of another rule may couple the latents of a datum
            start = start.diagonal if isinstance(start, CoupledSites) else None
        if start is not None:  # sites of another prior, of which negative ones may leave this one improper
            tame = replace(start, precision=start.precision.clamp_min(0))
            starts = [lambda: start, lambda: tame, *starts]
        curvature = self._curvature(likelihood, targets)
        parallel = self.max_steps
        may_sweep = self.schedule == "auto" and problem.mean.dim() == 1 and isinstance(problem.prior, DensePrior)
        if sequential:
            parallel = _START
        elif may_sweep and problem.has_data_apart:
            parallel = min(_PATIENCE, self.max_steps)
        rise = partial(climb, problem, terms, tolerance=self.tolerance, accelerate=True, norm=self.norm)
        climbed = rise(starts, parallel, curvature=curvature)
        if start is None and _may_have_several_optima(likelihood, targets):
            mixture = mixture_terms(likelihood, targets)
            begin, _, _ = climb(problem, mixture, [problem.no_sites], self.max_steps, _NEAR_MIXTURE)
            climbed = _higher(problem, terms, climbed, rise([lambda: begin.sites], parallel))
        iterate, steps, status = climbed
        if sequential:
            steps = []  # they belong to the start
        if status is not Status.MAX_STEPS or len(steps) == self.max_steps:
            return conclude(problem, local, name, iterate, status, steps)

        def terms_at(part: slice | Tensor) -> Terms:
            there = self.bound.bind(likelihood, targets[part])
            return lambda mean, variance: bound_terms(there, mean, variance)

        left = self.max_steps - len(steps)
        sites, sweeps = sweep_sequentially(problem, terms, terms_at, iterate, left, self.tolerance)
        left -= len(sweeps)
        iterate, rest, status = rise([lambda: sites], left)
        return conclude(problem, local, name, iterate, status, [*steps, *sweeps, *rest])

    def _curvature(self, likelihood: Any, targets: Tensor) -> Curvature | None:
        if not isinstance(likelihood, HasMultinomialTerms):
            return None
        if isinstance(self.bound, Quadrature):
            return exact_curvature
        with torch.no_grad():
            multinomial = likelihood.multinomial_terms(targets)
        return log_sum_exp_curvature(multinomial.counts, multinomial.total)


def _may_have_several_optima(likelihood: Any, targets: Tensor) -> TypeGuard[AugmentedLikelihood]:
    """Return whether the likelihood has an augmentation, and is not log-concave."""
    if not isinstance(likelihood, AugmentedLikelihood):
        return False
    return not likelihood.unchecked_augmentation(targets).radial.is_log_concave(targets)


def _higher(problem: Problem, terms: Terms, first: Climb, second: Climb) -> Climb:
    """Return the end of two climbs whose bound is higher; in a batch, of each posterior its own."""
    here, there = first[0], second[0]
    is_higher = there.value > here.value + here.rounding
    if bool(is_higher.all()) or not bool(is_higher.any()):
        return second if bool(is_higher.any()) else first
    sites = here.sites.choose(there.sites, problem.per_value(is_higher))
    iterate = visit(problem, terms, sites)
    return iterate, [*first[1], iterate.value], second[2] if first[2] is Status.CONVERGED else first[2]


def independent_sites(problem: Problem, terms: Terms) -> GaussianSites:
    """Return the best sites of data that are each alone with their prior marginal, to start from."""
    with torch.no_grad():
        precision = 1 / problem.prior.variance.expand(problem.mean.shape)
        ones = torch.ones_like(precision)  # likelihoods are about as wide as this, priors may be far wider
        calm = GaussianSites(ones * problem.mean, ones)
        solve = partial(solve_scalar, terms, precision * problem.mean, precision)
        near = solve(calm, max_steps=_START_STEPS, tolerance=1e-2)
        return solve(near, max_steps=_START_STEPS_FAR, tolerance=1.0)
