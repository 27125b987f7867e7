r"""Robust and conjugate regression: generalised Bayes with a weighted Fisher divergence [Altamirano et al. 2024].

With s = d log N(y | f, sigma^2) / dy = -(y - f) / sigma^2 the posterior is prop. to p(f) exp(-sum_i L_i) for the loss

    L_i(f) = (w_i s_i)^2 + 2 d(w_i^2 s_i)/dy_i,      w(y) = (sigma / sqrt 2) (1 + (y - m)^2 / c^2)^(-1/2)

which is a parabola in f: a Gaussian site, that of a pseudo-target z_i with noise variance 1 / tau_i,

    tau_i = 2 w_i^2 / sigma^4 = omega_i / sigma^2,    omega_i = 1 / (1 + (y_i - m_i)^2 / c^2)
    z_i   = y_i - sigma^2 d(log w_i^2)/dy_i = y_i + 2 sigma^2 omega_i (y_i - m_i) / c^2

so that one Cholesky factorisation gives the posterior, and c to infinity makes it that of Gaussian noise. For a target
far away tau_i (z_i - m_i) tends to zero: its influence is bounded. exp(-L_i) is no density of y_i and has no normaliser
in sigma^2, so the evidence is that of the pseudo-targets,

    log N(z | mu, K + diag(1 / tau))
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from torch import Tensor

from gpext.bounds import has_density_of
from gpext.checks import check_finite, check_tensor
from gpext.inference.problem import Problem
from gpext.inference.result import InferenceResult, Status, check_options
from gpext.inference.rule import Rule
from gpext.sites import GaussianSites

_NAME = "RobustConjugate, with the evidence of its pseudo-targets"


@dataclass(frozen=True, kw_only=True)
class RobustConjugate(Rule):
    r"""Robust regression with Gaussian noise in closed form: targets far from a centre count less.

    A target at a distance r from its centre has the weight 1 / (1 + r^2 / c^2) of an observation. Serves gpytorch's
    `GaussianLikelihood` and `FixedNoiseGaussianLikelihood`. The centre is the prior mean by default; where the function
    itself varies by more than the noise, its own large values then lose weight as well. Fits about the leave-one-out
    means of earlier ones (:meth:`centred_at`) had smaller errors on all corrupted data of
    `benchmarks/relevance_pursuit.py`; on clean data they underestimated the noise.

    `log_evidence` is the log marginal likelihood of the pseudo-targets z_i with independent Gaussian noise of variances
    1 / tau_i: of the Gaussian model that has the same posterior. It is the exact log p(y) for c to infinity. Its
    derivatives are the total ones, through weights, pseudo-targets and c as well. It compares hyperparameters, but it
    is no log p(y) to be compared with those of other rules and likelihoods. (The paper selects hyperparameters by
    leave-one-out densities of the targets, where the squared distance of an outlier inflates the noise.)

    Args:
        quantile: c is this quantile of |y_i - m_i|, in (0, 1]. The paper takes the share of data that are expected to
            be no outliers. It should not be above that share: otherwise c is the distance of an outlier. The default of
            3/4 allows for a quarter of outliers; on data without any, a larger one loses less.
        threshold: c itself, in the units of the targets, instead; may be infinite.
        centre: m (..., N), instead of the prior mean.
        jitter: added to the diagonal of the prior covariance; none is needed.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> from gpytorch.likelihoods import GaussianLikelihood
        >>> prior = MultivariateNormal(torch.zeros(3), torch.ones(3, 3) + 0.1 * torch.eye(3))
        >>> likelihood, y = GaussianLikelihood(), torch.tensor([0.9, 1.1, 100.0])
        >>> RobustConjugate(threshold=1.0).infer(prior, likelihood, y).posterior.mean.detach()
        tensor([1.0173, 1.0218, 0.9731])
    """

    quantile: float = 0.75
    threshold: float | None = None
    centre: Tensor | None = field(default=None, compare=False)
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.quantile <= 1:
            raise ValueError(f"quantile must be above 0 and at most 1; got {self.quantile!r}.")
        if self.threshold is not None and not self.threshold > 0:
            raise ValueError(f"threshold must be positive, and may be infinite; got {self.threshold!r}.")
        if self.centre is not None:
            check_tensor("centre", self.centre)
            check_finite("centre", self.centre)
        check_options(self.jitter)

    def centred_at(self, result: InferenceResult) -> RobustConjugate:
        """Return the same rule about the leave-one-out posterior means of an earlier result for these data.

        Example:
            >>> model.inference = model.inference.centred_at(model.result)  # doctest: +SKIP
        """
        mean, _ = result.conditioned.leave_one_out
        return replace(self, centre=mean)

    def _require(self, likelihood: Any) -> None:
        if not has_density_of(likelihood, GaussianLikelihood, FixedNoiseGaussianLikelihood):
            raise TypeError(
                "RobustConjugate takes Gaussian noise: gpytorch's GaussianLikelihood or FixedNoiseGaussianLikelihood; "
                f"got {type(likelihood).__module__}.{type(likelihood).__qualname__}. gpext.inference.KL(), EP() and "
                "Laplace() serve others."
            )

    def _solve(self, problem: Problem, start: Any) -> InferenceResult:
        z, tau = self._pseudo_data(problem)
        posterior = problem.condition(GaussianSites((tau * z).detach(), tau.detach()))
        if not bool(posterior.positive_definite.all()):
            none = torch.full_like(posterior.log_det, -torch.inf)
            status = Status.NOT_POSITIVE_DEFINITE
            return problem.result(_NAME, problem.condition(problem.no_sites()), none, status, [none])
        mean, energy = problem.on_range(posterior, posterior.mean)
        log_density = 0.5 * ((tau / (2 * math.pi)).log() - tau * (z - mean).square())
        value = (log_density.detach().sum(-1) - energy) - 0.5 * posterior.log_det
        evidence = problem.attach(value, (log_density - 0.5 * tau * posterior.variance).sum(-1), posterior)
        return problem.result(_NAME, posterior, evidence, Status.CONVERGED, [value])

    def _pseudo_data(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """Return z and tau (..., N), in the graph of the noise and of the prior mean."""
        y, noise = problem.targets.double(), problem.likelihood.noise.double()
        centre = problem.mean if self.centre is None else self.centre.to(problem.mean)
        shape = torch.broadcast_shapes(y.shape, problem.mean.shape)
        for name, given in (("the noise of the likelihood", noise), ("centre", centre)):
            if given.shape[-1] not in (1, shape[-1]):
                raise ValueError(f"expected {name} of {shape[-1]} data; got shape {tuple(given.shape)}.")
        r = (y - centre).expand(shape)
        c = self._threshold(r)
        omega = 1 / (1 + (r / c).square())
        return y + 2 * noise * omega * (r / c) / c, omega / noise

    def _threshold(self, r: Tensor) -> Tensor:
        """Return c (..., 1)."""
        if self.threshold is not None:
            return torch.full_like(r[..., :1], self.threshold)
        c = r.abs().quantile(self.quantile, -1, keepdim=True)
        if bool((c == 0).any()):
            raise ValueError(
                f"{self.quantile:.0%} of the targets are equal to their centre, so that this quantile of the distances "
                "is no threshold. Give one, in the units of the targets: RobustConjugate(threshold=...)."
            )
        return c
