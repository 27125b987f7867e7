r"""Maximise a variational bound over the sites of all data at once: natural-gradient steps, accelerated and guarded.

    F(nu, tau) = sum_i F_i(m_i, v_i) - KL(N(m, V) || N(mu, K)),    V = (K^-1 + diag(tau))^-1,  m = V (nu + K^-1 mu)

The natural gradient of F in (nu, tau) is the distance to tau_i* = -2 dF_i/dv_i and nu_i* = dF_i/dm_i + tau_i* m_i, so F
is stationary where the sites reproduce themselves, and x <- x + rate (x* - x) raises F for a small enough rate. A step
costs one Cholesky factorisation and one triangular solve. Steps of length one converge linearly. Accelerated, they
start with a rough Newton step of the means at the variances of before, by a product with V, and Anderson mixes the last
of them [Walker & Ni 2011]: that takes about a third as many. What does not raise F is taken back: first the mixing,
then half the step after half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
from torch import Tensor

from gpext.bounds import LocalBound
from gpext.inference.drivers.inexact_newton import NEAR, newton_step, rough_newton_step
from gpext.inference.drivers.softmax_curvature import Curvature, can_be_coupled, coupled_nearby
from gpext.inference.local_terms import LocalTerms
from gpext.inference.problem import Problem, is_lost
from gpext.inference.result import InferenceResult, Status
from gpext.posteriors import JointPosterior, Posterior
from gpext.sites import BlockSites, GaussianSites

Terms = Callable[[Tensor, Tensor], LocalTerms]
Norm = Literal["max", "rms"]
S = TypeVar("S", GaussianSites, BlockSites)

_MEMORY = 10
_MOST_HALVINGS = 30
_PATIENCE = 100  # steps
_RISE = 1e-9  # of F, relative, that counts as one
_SHRINKS = 0.99  # of the largest residual, likewise: when F has no digits left, the residual may still shrink slowly
_CG_TOLERANCE = 0.03
_FEW_PRODUCTS, _MOST_PRODUCTS = 24, 50  # with latents apart that could be coupled, and otherwise
_LEAST_MIXED = 0.1  # of a positive precision, that mixing leaves: it may extrapolate to what is no posterior


@dataclass(frozen=True)
class Iterate:
    """Sites, what they make of the prior, and the bound there; `value` is -inf where there is no posterior."""

    posterior: Posterior
    mean: Tensor  # m (..., N)
    variance: Tensor  # v (..., N)
    terms: LocalTerms
    value: Tensor  # F (...)
    rounding: Tensor  # of F (...)

    @property
    def sites(self) -> GaussianSites:
        """The sites of this iterate."""
        return self.posterior.sites

    @property
    def proposal(self) -> GaussianSites:
        """The best sites at the current marginals."""
        return self.terms.best_sites(self.mean)

    @property
    def residual(self) -> Tensor:
        """The change of the marginals if each site alone were replaced by its proposal (..., N)."""
        return self.terms.residual(self.sites, self.mean, self.variance)


class Patience:
    """Counts the steps since F last rose, by more than a billionth, or the residuals shrank by a hundredth.

    Args:
        limit: steps without either until :meth:`is_lost`.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._waited = limit, 0
        self._value, self._residual = torch.tensor(-torch.inf), torch.inf

    def is_lost(self, value: Tensor, residual: Tensor) -> bool:
        """Take note of F (...) and the residuals after a step; return whether to give up."""
        self._waited += 1
        largest = float(residual.max())
        if bool((value > self._value + _RISE * (1 + value.abs())).any()) or largest < _SHRINKS * self._residual:
            self._value, self._residual, self._waited = value, largest, 0
        return self._waited > self._limit


Climb = tuple[Iterate, list[Tensor], Status]  # the last iterate, F after each step, and how it ended


def visit(problem: Problem, terms: Terms, sites: GaussianSites) -> Iterate:
    """Return the iterate at some sites: one factorisation."""
    posterior = problem.condition(sites)
    mean, variance = posterior.mean, posterior.variance
    proper = posterior.positive_definite & (mean.isfinite() & (variance > 0)).all(-1)
    # Substitute safe values where sites make no posterior, and mask the results.
    mean = torch.where(proper.unsqueeze(-1), mean, problem.mean)
    variance = torch.where(proper.unsqueeze(-1), variance, torch.ones_like(variance))
    local = terms(mean, variance)
    replaced = sites.expected_log(mean, variance).sum(-1)
    proper = proper & ~is_lost(replaced - posterior.log_normalizer, mean.size(-1))
    divergence = -0.5 * (sites.precision * variance).sum(-1) - posterior.log_peak  # the same, with more digits
    value = local.total - problem.over_latents(divergence)
    proper = proper if problem.num_latents is None else proper.all(-1)
    value = torch.where(proper & value.isfinite(), value, -torch.inf)
    # what rounding makes of F: in its terms, in the means (times sites), and in variances beside those of the prior
    prior_variance = problem.prior.variance.detach()
    moved = 1e3 * replaced.abs() + 10 * (sites.precision.abs() * prior_variance).sum(-1)
    sizes = problem.over_latents(moved) + 1e4 * local.values.detach().abs().double().sum(-1)
    rounding = torch.finfo(torch.float64).eps * sizes
    return Iterate(posterior, mean, variance, local, value, rounding)


def conclude(
    problem: Problem, bound: LocalBound, name: str, iterate: Iterate, status: Status, trace: list[Tensor]
) -> InferenceResult:
    """Return the result of a climb, its evidence in the graph of the prior and of the likelihood's parameters.

    At a stationary point the sites' own way through the parameters adds nothing to the derivatives.
    """
    local = bound(iterate.mean, iterate.variance).double().sum(-1)
    evidence = problem.attach(_accurate_value(problem, bound, iterate), local, iterate.posterior)
    return problem.result(name, iterate.posterior, evidence, status, trace)


@torch.no_grad()
def _accurate_value(problem: Problem, bound: LocalBound, iterate: Iterate) -> Tensor:
    """Return F at an iterate with the digits that sharp sites have cost it: see :meth:`Problem.on_range`."""
    posterior = iterate.posterior
    mean, energy = problem.on_range(posterior, iterate.mean)
    if mean is iterate.mean or not bool(iterate.value.isfinite().all()):
        return iterate.value
    divergence = energy + 0.5 * (posterior.log_det - (posterior.sites.precision * iterate.variance).sum(-1))
    return bound(mean, iterate.variance).double().sum(-1) - problem.over_latents(divergence)


@torch.no_grad()
def first_finite(problem: Problem, terms: Terms, starts: Sequence[Callable[[], GaussianSites]]) -> Iterate:
    """Return the iterate at the first of `starts` where F is finite, or at the last of them."""
    for start in starts:
        iterate = visit(problem, terms, start().to(torch.float64))
        if bool(iterate.value.isfinite().all()):
            break
    return iterate


def check_norm(norm: str) -> None:
    """Raise an error unless it is one of `Norm`."""
    if norm not in ("max", "rms"):
        raise ValueError(f"norm must be 'max' or 'rms'; got {norm!r}.")


def over_sites(residual: Tensor, norm: Norm, batch: int) -> Tensor:
    """Return the norm (...) over the sites of their residuals (..., N) or (..., D, N).

    Args:
        residual: nonnegative.
        norm: the largest, or the root mean square.
        batch: number of leading dimensions that are kept.
    """
    flat = residual.flatten(batch)
    return flat.amax(-1) if norm == "max" else flat.square().mean(-1).sqrt()


@torch.no_grad()
def climb(
    problem: Problem,
    terms: Terms,
    starts: Sequence[Callable[[], GaussianSites]],
    max_steps: int,
    tolerance: float,
    *,
    accelerate: bool = False,
    curvature: Curvature | None = None,
    norm: Norm = "max",
) -> Climb:
    """Maximise F from the first of `starts` where it is finite; return the last iterate, F after each step, and how.

    Converged when no site would move its own marginal's mean by more than `tolerance` standard deviations, or its
    variance by more than that fraction, if it alone were replaced by its best value; or, with the norm "rms", when the
    root mean square of these is less.

    Args:
        problem: prior, likelihood and targets.
        terms: F_i and its derivatives at given marginals.
        starts: sites to begin at.
        max_steps: maximum number of steps.
        tolerance: of the residual.
        accelerate: whether to mix the last steps.
        curvature: couples the latents of a datum, see :func:`coupled_target`.
        norm: of the residuals of a posterior.
    """
    iterate = first_finite(problem, terms, starts)
    trace: list[Tensor] = []
    mixing = Mixing(problem, ascends=True) if accelerate else None
    rate = torch.ones_like(iterate.value)
    status = Status.MAX_STEPS
    patience = Patience(_PATIENCE)
    is_near = False  # to the top
    coupled: tuple[Iterate, GaussianSites] | None = None  # an iterate, and its target
    improper = False  # since the last full step, a step has led to what is no posterior
    while len(trace) < max_steps:
        if bool((over_sites(iterate.residual, norm, iterate.value.dim()) < tolerance).all()):
            status = Status.CONVERGED
            break
        if patience.is_lost(iterate.value, iterate.residual):
            status = Status.STALLED
            break
        target, mixed = iterate.proposal, None
        if curvature is not None:
            if coupled is None or coupled[0] is not iterate:
                coupled = iterate, coupled_target(problem, iterate, curvature)
            target = coupled[1]
        if mixing is not None and bool((rate == 1).all()):
            if not is_near and curvature is None and bool((iterate.residual < NEAR).all()):
                is_near = True
                mixing.forget()  # it is of another map
            if is_near:
                target = target_ahead(problem, terms, iterate)
            mixed = mixing.mix(iterate.sites, iterate.variance, target)
        candidate = visit(problem, terms, _between(problem, iterate.sites, mixed or target, rate))
        better = (candidate.value >= iterate.value - iterate.rounding) & candidate.value.isfinite()
        if bool(better.all()):
            iterate = candidate
        elif bool(better.any()):  # in a batch each posterior decides for itself
            iterate = visit(problem, terms, _between(problem, iterate.sites, candidate.sites, better.to(iterate.mean)))
        trace.append(iterate.value)
        if mixing is not None and mixed is not None and not bool(better.all()):
            mixing.forget()  # it has been misled; the step itself is tried next
            continue
        if bool(candidate.posterior.positive_definite.all()):
            improper &= not bool((better & (rate == 1)).all())
        else:
            improper = True
        rate = torch.where(better, (2 * rate).clamp(max=1), rate / 2)
        if bool((rate < 0.5**_MOST_HALVINGS).any()):
            failure = Status.STALLED if bool(iterate.value.isfinite().all()) else Status.NOT_FINITE
            status = Status.NOT_POSITIVE_DEFINITE if improper else failure
            break
    return iterate, trace, status


def target_ahead(problem: Problem, terms: Terms, iterate: Iterate) -> GaussianSites:
    """Return the proposal at the means after a rough Newton step for all of them, with the variances as they are."""
    residual = iterate.terms.mean_gradient - iterate.posterior.weights
    move, _ = rough_newton_step(problem, iterate.posterior, iterate.proposal, residual)
    mean = iterate.mean + move
    return terms(mean, iterate.variance).best_sites(mean)


@dataclass(frozen=True)
class NewtonTarget(GaussianSites):
    """Sites under which the means are those after a Newton step."""

    move: Tensor  # of the means (..., D, N)


def coupled_target(problem: Problem, iterate: Iterate, curvature: Curvature) -> NewtonTarget:
    """Return the proposal with the mean of a Newton step for all latents together.

    The proposal moves each latent as if the others stood still; where they share a datum (a softmax knows differences
    only) that crawls. The Newton step solves (K^-1 + H) dm = g - K^-1 (m - mu) by conjugate gradients.
    """
    posterior, weights = iterate.posterior, iterate.posterior.weights
    residual = iterate.terms.mean_gradient - weights
    H = curvature(iterate.terms)

    def solved(nearby: Posterior | JointPosterior, most: int) -> tuple[Tensor, Tensor, int]:
        first = nearby.solve(residual)
        enough = _CG_TOLERANCE * problem.inner(residual, first[0]).clamp_min(0).sqrt()
        return newton_step(problem, nearby, H, residual, first, enough, most)

    may_couple = can_be_coupled(posterior)
    move, turn, used = solved(posterior, _FEW_PRODUCTS if may_couple else _MOST_PRODUCTS)
    if may_couple and used == _FEW_PRODUCTS:  # functions are large; elsewhere another factor costs more than it saves
        move, turn, _ = solved(coupled_nearby(posterior), _MOST_PRODUCTS)
    mean, precision = iterate.mean + move, iterate.terms.precision
    return NewtonTarget(weights + turn + precision * mean, precision.expand(mean.shape), move)


def _between(problem: Problem, sites: GaussianSites, target: GaussianSites, rate: Tensor) -> GaussianSites:
    """Return the sites a fraction of the way, each posterior (...) its own, whose sites are (..., N) or (..., D, N).

    On the way to the means of a Newton step they move that fraction of it, and precisions that of the natural gradient:
    both raise F if the fraction is small enough. Shifts that are between those of both ends move means elsewhere.
    """
    weight = rate.unsqueeze(-1) if problem.num_latents is None else rate.unsqueeze(-1).unsqueeze(-1)
    between = sites.lerp(target, weight)
    if not isinstance(target, NewtonTarget):
        return between
    excess = weight * (1 - weight) * (target.precision - sites.precision) * target.move
    return replace(between, shift=between.shift - excess)


class Mixing:
    """Anderson's mixing: from the last iterates x and residuals r = x* - x, the point where r vanishes if r is affine.

    x + r - (dX + dR) c with c = argmin |r - dR c|; residuals are measured in what they do to the marginals.

    Args:
        problem: that of the sites.
        ascends: whether residuals are natural gradients of what is to be maximised, so that a point where they vanish
            and which steps along them leave is not one to go to.
    """

    def __init__(self, problem: Problem, *, ascends: bool = False) -> None:
        self.problem, self.ascends = problem, ascends
        self.history: list[tuple[Tensor, Tensor]] = []

    def forget(self) -> None:
        """Learn anew from the next steps."""
        self.history = []

    def mix(self, sites: S, variance: Tensor, target: S) -> S | None:
        """Remember sites, their marginal variances and where a step goes; return where to go, or None if it is new."""
        x, r = self._stack(sites), self._stack(target) - self._stack(sites)
        self.history = [*self.history[-_MEMORY:], (x, r)]
        if len(self.history) < 2:
            return None
        scale = self._stack(_units(sites, variance))
        points, residuals = (torch.stack(items, -1) for items in zip(*self.history, strict=True))
        dx, dr = points.diff(dim=-1), residuals.diff(dim=-1)  # (..., 2N, J)
        weighted = scale.unsqueeze(-1) * dr
        gram = weighted.mT @ weighted
        trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
        ridge = (1e-12 * trace + torch.finfo(trace.dtype).tiny).unsqueeze(-1).expand(gram.shape[:-1])
        right = weighted.mT @ (scale * r).unsqueeze(-1)
        coefficients = torch.linalg.solve(gram + torch.diag_embed(ridge), right)
        back = ((dx + dr) @ coefficients).squeeze(-1)
        if self.ascends:
            # Against the residual, along which F rises, lies a saddle [Dauphin et al. 2014]: go as far the other way.
            against = (scale.square() * r * (r - back)).sum(-1, keepdim=True) < 0
            back = torch.where(against, -back, back)
        mixed = x + r - back
        size = sites.shift[self._one].numel()
        shift = mixed[..., :size].reshape(sites.shift.shape)
        precision = mixed[..., size:].reshape(sites.precision.shape)
        if isinstance(sites, GaussianSites):
            least = _LEAST_MIXED * torch.minimum(sites.precision, target.precision)
            precision = torch.where(least > 0, torch.maximum(precision, least), precision)
        return type(sites)(shift, precision)

    @property
    def _one(self) -> tuple[int, ...]:
        """The index of the first posterior of a batch."""
        data = 1 if self.problem.num_latents is None else 2
        return (0,) * (self.problem.mean.dim() - data)

    def _stack(self, sites: GaussianSites | BlockSites) -> Tensor:
        """Return (..., 2N): one vector for each posterior, all of its latents together."""
        batch = len(self._one)
        return torch.cat([sites.shift.flatten(batch), sites.precision.flatten(batch)], -1)


def _units(sites: S, variance: Tensor) -> S:
    """Return by what a change of each number moves the marginals, in their own units."""
    sd = variance.sqrt()
    product = sd.unsqueeze(-2) * sd.unsqueeze(-3) if isinstance(sites, BlockSites) else variance
    return type(sites)(sd, product)
