r"""Laplace's approximation: a Gaussian at the mode of the posterior [R&W Secs. 3.4, 5.5.1].

    psi(f) = log p(y | f) - (f - mu)' K^-1 (f - mu) / 2,     f^ = argmax psi
    log Z  = psi(f^) - log|I + K W| / 2,                     W = -d^2 log p / df df' at f^

Newton's method is the repetition of Taylor's: sites of precision W and nu = g + W f at the current f, whose posterior
mean is the next f. A step costs one Cholesky factorisation, D + 1 for D latents a datum [Cha13 Sec. 3.3]. Where W makes
no posterior (a Student-t far from its mode), negative curvatures give way to those of a lower bound that touches
log p(y | f), or to none, and those of several latents to the Fisher information, which still points upwards; a line
search along f and K^-1 (f - mu) together, without any N x N solve, makes psi rise. The mode moves with the parameters:
with s = d log Z / df^ = d/df (-tr(W V) / 2) at fixed V,

    d log Z = [A + sum_i c_i at fixed sites] + s' (I + K W)^-1 (dK K^-1 (f^ - mu) + dmu) + s' V dg
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from gpext.inference.drivers.ascent import ROUNDING, UNSEEN, height, rise
from gpext.inference.drivers.inexact_newton import refine_mode
from gpext.inference.expansion import Expansion, Sites, expand, require_curvature
from gpext.inference.local_modes import modal_sites
from gpext.inference.problem import Problem
from gpext.inference.result import InferenceResult, Status, check_options
from gpext.inference.rule import Rule
from gpext.posteriors import DensePosterior, JointPosterior, Posterior
from gpext.sites import JointSites

_FEW_DIGITS = 1e-4  # a step that may no longer halve, in the same units, where psi has no digits of its rise
_NEAR = 0.01  # a step below which rounding alone keeps psi from rising: other starts would lead elsewhere
_WORSE = (Status.STALLED, Status.NOT_POSITIVE_DEFINITE, Status.NOT_FINITE)


@dataclass(frozen=True)
class Laplace(Rule):
    """A Gaussian at the posterior mode, its precision the curvature there.

    Serves the likelihoods that :class:`Taylor` does. It starts at the prior mean by default.

    Args:
        max_steps: maximum number of Newton steps.
        tolerance: converged when a Newton step is shorter than this, in posterior standard deviations; or, where
            rounding is larger, when steps below 1e-7 no longer halve, or steps below 1e-4 of which psi has no digits.
            Its error in log Z is of that order.
        jitter: added to the diagonal of the prior covariance; none is needed.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> from gpext.likelihoods import BernoulliLogitLikelihood
        >>> prior = MultivariateNormal(torch.zeros(2).double(), torch.eye(2).double())
        >>> result = Laplace().infer(prior, BernoulliLogitLikelihood(), torch.tensor([0.0, 1.0]).double())
        >>> result.status.name
        'CONVERGED'
    """

    max_steps: int = 200
    tolerance: float = 1e-10
    jitter: float = 0.0

    def __post_init__(self) -> None:
        check_options(self.jitter, self.max_steps, self.tolerance)

    def _solve(self, problem: Problem, start: Sites | None) -> InferenceResult:
        likelihood, targets = problem.likelihood, problem.targets
        if start is None:
            require_curvature(likelihood, targets, problem.mean)
        posterior, f, status, trace, _ = self._search(problem, start)
        if not (torch.is_grad_enabled() and bool(trace[-1].isfinite().all())):
            return problem.result("Laplace", posterior, trace[-1], status, trace)
        if problem.prior.requires_grad and isinstance(posterior, DensePosterior):
            posterior.prepare_gradient()
        pull = _pull(problem, posterior, f)  # s
        pulled = posterior.covariance_times(pull)  # V s
        at = expand(likelihood, targets, f)
        local = (at.log_prob + at.spread(posterior)).sum(-1) + problem.inner(pulled, at.gradient)
        evidence = problem.attach(trace[-1], local, posterior, pull - posterior.sites.times(pulled))
        return problem.result("Laplace", posterior, evidence, status, trace)

    @torch.no_grad()
    def _search(self, problem: Problem, start: Sites | None) -> _Found:
        """Return the end of the first start, or, where that has not converged, the best end of the others.

        Far from the mode a log density may overflow, or bend so much that rounding leaves no posterior; where each
        datum alone has its mode it does not. A start that is given leads to the mode that training is at: near it, no
        other is sought where rounding ends the steps.
        """
        starts: list[Callable[[], Sites | None]] = [lambda: None, lambda: modal_sites(problem)]
        if start is not None:
            starts.insert(0, lambda: start)
        found: list[_Found] = []
        for make in starts:
            before = found[-1].trace if found else []
            found.append(self._climb(problem, *self._begin(problem, make()), before))
            last = found[-1]
            if last.status in (Status.CONVERGED, Status.MAX_STEPS) or (start is not None and last.is_near):
                return last
        best = min(found, key=lambda each: _WORSE.index(each.status))
        return best._replace(trace=[*found[-1].trace, best.trace[-1]] if best is not found[-1] else best.trace)

    def _begin(self, problem: Problem, start: Sites | None) -> tuple[Tensor, Tensor]:
        """Return f and K^-1 (f - mu) near the mode, from the posterior under sites; the prior's where there is none."""
        posterior = None if start is None else problem.condition_roughly(start.to(torch.float64))
        if posterior is None or not bool(posterior.positive_definite.all() and posterior.mean.isfinite().all()):
            return problem.mean.detach(), torch.zeros_like(problem.mean)
        f, weights, _ = refine_mode(problem, posterior, posterior.mean, posterior.weights, self.tolerance)
        return f, weights

    def _climb(self, problem: Problem, f: Tensor, weights: Tensor, before: list[Tensor]) -> _Found:
        """Return where Newton's method converges from f and K^-1 (f - mu), log Z at every f after those before."""
        trace = before.copy()
        last = torch.full_like(problem.inner(f, f), torch.inf)
        while True:
            at = expand(problem.likelihood, problem.targets, f)
            psi, size = height(problem, at, f, weights)
            if not (at.is_finite and bool(psi.isfinite().all())):
                return _nothing(problem, f, Status.NOT_FINITE, trace)
            posterior, proper = _condition(problem, at)
            if not bool(posterior.positive_definite.all()):
                return _nothing(problem, f, Status.NOT_POSITIVE_DEFINITE, trace)
            value = psi - 0.5 * problem.over_latents_of(posterior, posterior.log_det)
            trace.append(torch.where(value.isnan(), -torch.inf, value))  # rounding has left no determinant
            move, turn = posterior.mean - f, posterior.weights - weights
            slope = problem.inner(at.gradient - weights, move)  # of psi along the step; its squared posterior length
            length = slope.clamp_min(0).sqrt()
            small = (length < ROUNDING) | (length < _FEW_DIGITS) & (slope < UNSEEN * size)
            converged = (length < self.tolerance) | small & (length > 0.5 * last)
            if bool(converged.all()):
                return _Found(posterior, f, Status.CONVERGED if proper else Status.NOT_POSITIVE_DEFINITE, trace)
            if len(trace) >= self.max_steps:
                return _Found(_standing(problem, posterior, f, weights), f, Status.MAX_STEPS, trace)
            last = length
            rate = (~converged).to(f)  # in a batch, members that have converged stay
            higher = rise(problem, (f, weights), (move, turn), psi, size, slope, length, rate)
            if higher is None:
                near = bool((length < _NEAR).all())
                return _Found(_standing(problem, posterior, f, weights), f, Status.STALLED, trace, near)
            f, weights, reached = refine_mode(problem, posterior, *higher, self.tolerance)
            last = torch.minimum(last, reached)


class _Found(NamedTuple):
    """The posterior at the sites of the last f, that f, how it ended, log Z at every f, and whether a mode is near."""

    posterior: Posterior | JointPosterior
    f: Tensor
    status: Status
    trace: list[Tensor]
    is_near: bool = False


def _nothing(problem: Problem, f: Tensor, status: Status, trace: list[Tensor]) -> _Found:
    """Return the prior, where there is no posterior at f."""
    none = torch.full_like(problem.inner(f, f), -torch.inf)
    return _Found(problem.condition(problem.no_sites()), f, status, [*trace, none])


def _condition(problem: Problem, at: Expansion) -> tuple[Posterior | JointPosterior, bool]:
    """Return the posterior under the sites of the expansion, and whether the true curvature made it."""
    posterior = problem.condition(at.sites)
    proper = posterior.positive_definite
    if bool(proper.all()):
        return posterior, True
    which = proper if isinstance(at.sites, JointSites) else proper.unsqueeze(-1)
    return problem.condition(at.cautious.choose(at.sites, which)), False  # type: ignore[arg-type]


def _standing(
    problem: Problem, posterior: Posterior | JointPosterior, f: Tensor, weights: Tensor
) -> Posterior | JointPosterior:
    """Return the posterior of the same curvature whose mean is f, nu = K^-1 (f - mu) + U f, and not a step further."""
    sites = posterior.sites
    return problem.condition(replace(sites, shift=weights + sites.times(f)))


def _pull(problem: Problem, posterior: Posterior | JointPosterior, f: Tensor) -> Tensor:
    """Return the derivative of -tr(U V) / 2 in f, V fixed, like f."""
    with torch.enable_grad():
        f = f.detach().requires_grad_()
        spread = expand(problem.likelihood, problem.targets, f).spread(posterior)
        if not spread.requires_grad:
            return torch.zeros_like(f)
        (pull,) = torch.autograd.grad(spread.sum(), f, materialize_grads=True)
    return pull
