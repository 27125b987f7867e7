"""The optimisers of the bound that `benchmarks.concave_kl` compares: gpext, Algorithm 1, Opper & Archambeau."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import scipy.interpolate
import scipy.optimize
import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from gpext.bounds import Bound
from gpext.inference import KL
from gpext.inference.drivers.fixed_point import first_finite
from gpext.inference.kl import independent_sites
from gpext.inference.local_terms import bound_terms
from gpext.inference.problem import Problem
from gpext.likelihoods import BernoulliLogitLikelihood

RISE = 1e-3  # [KMM12 Sec. 7]: converged when the bound rises by less


@dataclass(frozen=True)
class Climb:
    """The course of one method: the bound, floating point operations and seconds after each iteration."""

    bound: list[float]
    flops: list[float]
    seconds: list[float]
    status: str = "CONVERGED"

    def arrived(self) -> int:
        """Return the first iteration that rises by less than RISE, counted from one; the last if there is none."""
        rises = np.diff(self.bound)
        small = np.flatnonzero(rises < RISE)
        return int(small[0]) + 2 if len(small) else len(self.bound)

    def within(self, distance: float) -> int:
        """Return the first iteration within this distance of the final bound, counted from one."""
        return int(np.flatnonzero(np.array(self.bound) >= self.bound[-1] - distance)[0]) + 1

    @property
    def largest_fall(self) -> float:
        """The smallest rise of an iteration, if it is negative."""
        return float(np.min(np.diff(self.bound), initial=0.0))


def ours(prior: MultivariateNormal, likelihood: Any, y: Tensor, bound: Bound, schedule: Any) -> Climb:
    """Run gpext's KL: operations of its linear algebra as executed, and n^3 for a sequential sweep and for its V.

    The parallel schedule's first iteration is its start: finding the initial sites, and one evaluation at them.
    """
    n, latents = y.size(-1), max(prior.batch_shape.numel(), 1)
    rule = KL(bound, schedule="parallel", tolerance=1e-5)
    at_start, begun = _at_start(prior, likelihood, y, bound)
    with linear_algebra() as counter:
        result = rule.infer(prior, likelihood, y)
    look = (counter.get_total_flops() - begun) / (result.num_steps + 1)
    started = time.perf_counter()
    result = replace(rule, schedule=schedule).infer(prior, likelihood, y)
    seconds = time.perf_counter() - started
    if schedule == "parallel":
        trace = [at_start, *result.trace.tolist()]
        flops = [begun + look * (k + 1) for k in range(len(trace))]
    else:  # three parallel steps, then V
        trace = result.trace.tolist() or [result.log_evidence.item()]
        flops = [begun + 4 * look + latents * n**3 * (k + 2) for k in range(len(trace))]
    return Climb(trace, flops, [seconds * f / flops[-1] for f in flops], result.status.name)


def _at_start(prior: MultivariateNormal, likelihood: Any, y: Tensor, bound: Bound) -> tuple[float, int]:
    """Return the bound at the initial sites of KL, and the operations that find these sites."""
    problem, terms = Problem.of(prior, likelihood, y, 0.0), partial(bound_terms, bound.bind(likelihood, y))
    with linear_algebra() as counter:
        sites = independent_sites(problem, terms)
    return float(first_finite(problem, terms, [lambda: sites]).value), counter.get_total_flops()


def linear_algebra() -> FlopCounterMode:
    """Count operations: n^3 / 3 a Cholesky factor, n^2 a right-hand side of a triangular solve, 2 n^2 m a product."""
    operators = torch.ops.aten
    return FlopCounterMode(
        display=False,
        custom_mapping={
            operators.linalg_cholesky_ex: lambda matrix, *_, **__: math.prod(matrix) * matrix[-1] / 3,
            operators.linalg_solve_triangular: _of_triangular_solve,
        },
    )


def _of_triangular_solve(matrix: torch.Size, right: torch.Size, *_: Any, left: bool = True, **__: Any) -> int:
    """Return the operations, given shapes: n for each entry of the right-hand sides."""
    return math.prod(right) * matrix[-1]


def printed(prior: MultivariateNormal, y: Tensor, bound: Bound, max_iterations: int = 30) -> Climb:
    """Run KMM12 Algorithm 1 for the logit: V site by site at fixed m, then Newton on m [Eqs. 18 to 21].

    Rank-one updates are not blocked: 2 n^2 operations a rank-one update, and n^3 / 3 + 2 n^2 a Newton step.
    """
    K, m = prior.covariance_matrix, prior.mean.clone()
    n = len(y)
    V, tau = K.clone(), torch.zeros(n, dtype=torch.float64)
    likelihood = BernoulliLogitLikelihood()
    whole = bound.bind(likelihood, y)
    grid = torch.logspace(-7, math.log10(4 * float(K.diagonal().max())), 300, dtype=torch.float64)

    def value() -> float:
        root = tau.clamp_min(0).sqrt()
        B = torch.eye(n, dtype=torch.float64) + root.unsqueeze(-1) * K * root
        divergence = 0.5 * (torch.logdet(B) - (tau * V.diagonal()).sum() + m @ weights)
        return float(whole(m, V.diagonal()).sum() - divergence)

    weights = torch.zeros(n, dtype=torch.float64)  # K^-1 m
    trace, flops, seconds, work = [], [], [], 0.0
    started = time.perf_counter()
    for _ in range(max_iterations):
        # m is fixed during a sweep: f_v of every datum is a function of v alone, interpolated from a table
        v = grid.unsqueeze(-1).expand(-1, n).clone().requires_grad_()
        (table,) = torch.autograd.grad(whole(m.expand(len(grid), n), v).sum(), v)
        slopes = scipy.interpolate.CubicSpline(grid.log().numpy(), table.numpy())
        coefficients, knots = slopes.c, slopes.x
        for i in range(n):  # lines 3 to 12
            r = float(1 / V[i, i] - tau[i])
            new = _fixed_point(coefficients[:, :, i], knots, r)
            delta = 1 / new - r - float(tau[i])
            V.addr_(V[:, i].clone(), V[:, i].clone(), alpha=-float(delta / (1 + delta * V[i, i])))
            tau[i] += delta
            work += 2 * n**2
        for _ in range(50):  # line 13
            g, bend = _slope_and_bend(whole, m, V.diagonal())
            root = (-bend).clamp_min(0).sqrt()
            B = torch.eye(n, dtype=torch.float64) + root.unsqueeze(-1) * K * root
            b = -bend * m + g
            new_weights = (
                b - root * torch.cholesky_solve((root * (K @ b)).unsqueeze(-1), torch.linalg.cholesky(B))[:, 0]
            )
            work += n**3 / 3 + 4 * n**2
            step = K @ new_weights - m
            m, weights = m + step, new_weights
            if float(step.abs().max()) < 1e-6:
                break
        trace.append(value())
        flops.append(work)
        seconds.append(time.perf_counter() - started)
        if len(trace) > 1 and trace[-1] - trace[-2] < RISE:
            break
    return Climb(trace, flops, seconds)


def _fixed_point(coefficients: np.ndarray, knots: np.ndarray, r: float) -> float:
    """Maximise log v - r v + 2 f(v) over v: stationary where 1/v - r + 2 f_v = 0, by bisection on log v."""

    def slope(log_v: float) -> float:
        k = min(max(int(np.searchsorted(knots, log_v)) - 1, 0), len(knots) - 2)
        d = log_v - knots[k]
        a, b, c, e = coefficients[:, k]
        return math.exp(-log_v) - r + 2 * (((a * d + b) * d + c) * d + e)

    low, high = float(knots[0]), float(knots[-1])
    for _ in range(50):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    return math.exp(0.5 * (low + high))


def _slope_and_bend(bound: Callable[[Tensor, Tensor], Tensor], m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    step = 1e-5

    def slope(at: Tensor) -> Tensor:
        at = at.detach().requires_grad_()
        (by_m,) = torch.autograd.grad(bound(at, v).sum(), at)
        return by_m

    return slope(m), (slope(m + step) - slope(m - step)) / (2 * step)


def opper(
    prior: MultivariateNormal, likelihood: Any, y: Tensor, bound: Bound, max_iterations: int, log_scale: bool = False
) -> Climb:
    """Run L-BFGS over alpha and lambda [Opper & Archambeau 2009; KMM12 Eq. 11].

    m = K alpha and V = (K^-1 + diag(lambda))^-1. lambda is kept positive by bounds, or with `log_scale` by its
    logarithm. An evaluation takes a Cholesky factor, a triangular solve and V, n^3 (1/3 + 1 + 1).
    """
    local = bound.bind(likelihood, y)
    K = prior.covariance_matrix
    shape = prior.mean.shape
    n, latents = shape[-1], max(shape[:-1].numel(), 1)
    size = prior.mean.numel()
    evaluations = 0
    latest = -math.inf

    def loss(theta: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal evaluations, latest
        evaluations += 1
        alpha, lam = (torch.from_numpy(part).view(shape) for part in (theta[:size], theta[size:]))
        lam = lam.exp() if log_scale else lam
        root = lam.clamp_min(0).sqrt()
        B = torch.eye(n, dtype=torch.float64) + root.unsqueeze(-1) * K * root.unsqueeze(-2)
        chol = torch.linalg.cholesky(B)
        W = torch.linalg.solve_triangular(chol, root.unsqueeze(-1) * K, upper=False)
        V = K - W.mT @ W
        m = (K @ alpha.unsqueeze(-1)).squeeze(-1).requires_grad_()
        v = V.diagonal(dim1=-2, dim2=-1).clone().requires_grad_()
        values = local(m, v).sum()
        by_m, by_v = torch.autograd.grad(values, (m, v))
        with torch.no_grad():
            log_det = 2 * chol.diagonal(dim1=-2, dim2=-1).log().sum()
            latest = float(values - 0.5 * (log_det - (lam * v).sum() + (alpha * m).sum()))
            by_alpha = (K @ (by_m - alpha).unsqueeze(-1)).squeeze(-1)
            by_lam = -(V.square() @ (by_v + 0.5 * lam).unsqueeze(-1)).squeeze(-1)
            by_lam = by_lam * lam if log_scale else by_lam
        return -latest, -torch.cat([by_alpha.flatten(), by_lam.flatten()]).numpy()

    trace, flops, seconds = [], [], []
    started = time.perf_counter()

    def after(intermediate_result: scipy.optimize.OptimizeResult) -> None:
        trace.append(-float(intermediate_result.fun))
        flops.append(latents * evaluations * n**3 * 7 / 3)
        seconds.append(time.perf_counter() - started)

    outcome = scipy.optimize.minimize(
        loss,
        np.concatenate([np.zeros(size), np.full(size, math.log(0.1) if log_scale else 0.1)]),
        jac=True,
        method="L-BFGS-B",
        bounds=None if log_scale else [(None, None)] * size + [(0, None)] * size,
        callback=after,
        options={"maxiter": max_iterations, "maxfun": 10 * max_iterations, "ftol": 1e-12, "gtol": 1e-8},
    )
    return Climb(trace, flops, seconds, "CONVERGED" if outcome.success else "MAX_STEPS")
