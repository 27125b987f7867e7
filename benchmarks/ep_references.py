r"""What EP is held against: its plain iteration, and the evidence by annealed importance sampling.

A Student-t density to a power beta is (1 + r^2 / (nu s^2))^-a up to a constant, a = beta (nu + 1) / 2, and

    (1 + x)^-a = int w^(a - 1) exp(-w (1 + x)) dw / Gamma(a)

so that a prior with any tempered Student-t noise can be sampled by Gibbs steps, w given f from Gamma laws and f given w
from a Gaussian [JVV11 Eq. 3]: with them, annealed importance sampling [Neal 2001] goes from the prior, beta = 0, to the
posterior, beta = 1, and the mean of its weights is an unbiased estimate of p(y), however many modes there are.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.ep_problems import StudentTProblem
from gpext.inference.ep_internals.moment_matching import Match, match
from gpext.inference.problem import Problem
from gpext.likelihoods.tilted_moments import tilt

_BEND = 5.0  # beta = t^5: half of the steps below 1/32, where the prior turns into something like the posterior


@dataclass(frozen=True)
class Annealed:
    """Log evidence by annealed importance sampling, and the chains at its end.

    Attributes:
        log_evidence: log of the mean weight.
        standard_error: of it, by the delta method.
        effective: how many chains the weights are worth.
        latent: f at the data (chains, N).
        weights: of the chains, summing to 1.
        mixing: tau (chains, N), the precisions of the noise given which the posterior of f is Gaussian.
    """

    log_evidence: float
    standard_error: float
    effective: float
    latent: Tensor
    weights: Tensor
    mixing: Tensor


@torch.no_grad()
def anneal(problem: StudentTProblem, *, chains: int, temperatures: int, seed: int = 0) -> Annealed:
    """Return the evidence of a Student-t problem from independent annealed chains, all at once."""
    generator = torch.Generator().manual_seed(seed)
    K, y, nu = problem.covariance, problem.targets, problem.deg_free
    spread = nu * problem.scale**2
    chol = torch.linalg.cholesky(K)
    constant = math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2) - 0.5 * math.log(math.pi * spread)

    def normal() -> Tensor:
        return torch.randn(chains, len(y), generator=generator, dtype=torch.float64)

    def log_likelihood(f: Tensor) -> Tensor:
        return (constant - (nu + 1) / 2 * torch.log1p((y - f).square() / spread)).sum(-1)

    betas = (torch.arange(temperatures + 1, dtype=torch.float64) / temperatures) ** _BEND
    f = normal() @ chol.mT
    log_weight = torch.zeros(chains, dtype=torch.float64)
    for beta, following in itertools.pairwise(betas):
        log_weight += (following - beta) * log_likelihood(f)
        shape = torch.full_like(f, following * (nu + 1) / 2)
        rate = 1 + (y - f).square() / spread
        tau = 2 / spread * torch._standard_gamma(shape, generator=generator) / rate
        f = _draw(K, chol, tau, y, normal(), normal())
    weight = (log_weight - log_weight.max()).exp()
    mean = weight.mean()
    return Annealed(
        log_evidence=(log_weight.max() + mean.log()).item(),
        standard_error=(weight.std() / mean / chains**0.5).item(),
        effective=(weight.sum().square() / weight.square().sum()).item(),
        latent=f,
        weights=weight / weight.sum(),
        mixing=tau,
    )


def _draw(K: Tensor, chol: Tensor, tau: Tensor, y: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return draws of f given the precisions of the noise (chains, N), by Matheron's rule; tau may be zero."""
    root = tau.sqrt()
    inner = root.unsqueeze(-1) * K * root.unsqueeze(-2)
    inner.diagonal(dim1=-2, dim2=-1).add_(1)
    f = first @ chol.mT
    gap = (root * (y - f) - second).unsqueeze(-1)
    solved = torch.cholesky_solve(gap, torch.linalg.cholesky(inner)).squeeze(-1)
    return f + (root * solved) @ K


def conditionals(problem: StudentTProblem, mixing: Tensor, cross: Tensor, prior: float) -> tuple[Tensor, Tensor]:
    """Return mean and variance of f(x) given each row of noise precisions (chains, N).

    Args:
        problem: with zero prior mean.
        mixing: tau.
        cross: k(x, inputs) (N,).
        prior: k(x, x).
    """
    root = mixing.sqrt()
    inner = root.unsqueeze(-1) * problem.covariance * root.unsqueeze(-2)
    inner.diagonal(dim1=-2, dim2=-1).add_(1)
    chol = torch.linalg.cholesky(inner)
    scaled = torch.linalg.solve_triangular(chol, (root * cross).unsqueeze(-1), upper=False).squeeze(-1)
    data = torch.linalg.solve_triangular(chol, (root * problem.targets).unsqueeze(-1), upper=False).squeeze(-1)
    return (scaled * data).sum(-1), prior - scaled.square().sum(-1)


@dataclass(frozen=True)
class PlainRun:
    """How the plain iteration went.

    Attributes:
        outcome: "converged", "improper" where the sites stopped to be a posterior with proper cavities, or "goes on".
        sweeps: that were taken.
        log_evidence: after each sweep.
        precision: of the sites (sweeps, N).
    """

    outcome: str
    sweeps: int
    log_evidence: Tensor
    precision: Tensor


def plain_parallel(
    problem: StudentTProblem,
    *,
    power: float = 1.0,
    damping: float = 1.0,
    max_sweeps: int = 200,
    tolerance: float = 1e-6,
) -> PlainRun:
    """Run EP as it is written down: from no sites, every site a step delta towards the one that matches, unguarded."""
    posed = Problem.of(problem.prior, problem.likelihood, problem.targets, 0.0)
    moments = tilt(problem.likelihood, problem.targets, power)
    current: Match = match(posed, moments, power, posed.no_sites())
    seen: list[Match] = []
    while len(seen) < max_sweeps and bool(current.proper) and float(current.size) > tolerance:
        current = match(posed, moments, power, current.sites.lerp(current.proposal, damping))
        seen.append(current)
    outcome = "improper" if not bool(current.proper) else "goes on" if float(current.size) > tolerance else "converged"
    return PlainRun(
        outcome,
        len(seen),
        torch.stack([m.value for m in seen]),
        torch.stack([m.sites.precision for m in seen]),
    )
