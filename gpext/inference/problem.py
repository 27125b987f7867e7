"""A Gaussian prior, a likelihood and its targets at the door of every inference rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from gpext.bounds import conditional_log_prob, has_density_of, num_latents
from gpext.distributions import CompoundDistribution, with_cdf
from gpext.inference.result import InferenceResult, Status
from gpext.likelihoods.checks import check_binary, check_targets
from gpext.posteriors import DensePosterior, condition_dense
from gpext.quadrature import log_expectation
from gpext.sites import GaussianSites


@dataclass(frozen=True)
class Problem:
    """p(f) = N(mean, covariance) in float64, in the graph of the prior, and what belongs to the data.

    With D latents a datum the prior is a batch of D independent ones: (..., D, N).
    """

    mean: Tensor  # mu (..., N)
    covariance: Tensor  # K + jitter I (..., N, N)
    likelihood: Any
    targets: Tensor
    num_latents: int | None
    dtype: torch.dtype
    jitter: float

    @classmethod
    def of(cls, prior: MultivariateNormal, likelihood: Any, targets: Tensor, jitter: float) -> Problem:
        """Check the three and return them as a problem.

        Raises:
            TypeError: half precision, or a likelihood that no rule can serve.
            ValueError: the shapes do not belong together, an entry is not finite, or a class is not 0 or 1.
        """
        mean, covariance = prior.mean, prior.covariance_matrix
        if mean.dtype in (torch.float16, torch.bfloat16):
            raise TypeError(f"a prior in {mean.dtype} is not supported; use float32 or float64.")
        check_targets(targets)
        if has_density_of(likelihood, gpytorch.likelihoods.BernoulliLikelihood):
            check_binary(targets)
        if isinstance(likelihood, gpytorch.likelihoods.SoftmaxLikelihood):
            raise TypeError(
                "gpytorch's SoftmaxLikelihood works on samples; use gpext.likelihoods.MultinomialLogitLikelihood("
                "num_classes), the same likelihood without mixing weights."
            )
        latents = num_latents(likelihood)
        if latents is not None and mean.shape[-2:-1] != (latents,):
            raise ValueError(
                f"{type(likelihood).__qualname__} has {latents} latent functions: expected a prior of batch shape "
                f"(..., {latents}), got {tuple(prior.batch_shape)}."
            )
        num_data = mean.size(-1)
        trials = latents is not None and targets.dim() > 1 and targets.size(-2) == num_data
        if targets.shape[-1:] != (num_data,) and not trials:
            raise ValueError(f"expected targets of shape (..., {num_data}) like the prior; got {tuple(targets.shape)}.")
        if not bool(mean.isfinite().all() and covariance.isfinite().all()):
            raise ValueError("the prior has NaN or infinite entries; check the inputs and the kernel's parameters.")
        mean, covariance = mean.double(), covariance.double()
        if prior.mean.dtype != torch.float64:
            covariance = 0.5 * (covariance + covariance.mT)  # rounding may have made it unsymmetric
        if jitter:
            covariance = covariance + jitter * torch.eye(num_data, dtype=torch.float64, device=covariance.device)
        if latents is None:  # a batch of targets may share one prior
            mean = mean.expand(torch.broadcast_shapes(mean.shape, targets.shape))
        return cls(mean, covariance, likelihood, targets, latents, prior.mean.dtype, jitter)

    def no_sites(self) -> GaussianSites:
        """Return the sites that leave the prior as it is."""
        return GaussianSites(torch.zeros_like(self.mean), torch.zeros_like(self.mean))

    def condition(self, sites: GaussianSites) -> DensePosterior:
        """Return the prior conditioned on sites, outside the graph."""
        with torch.no_grad():
            return condition_dense(self.mean.detach(), self.covariance.detach(), sites)

    def over_latents(self, value: Tensor) -> Tensor:
        """Sum what belongs to D independent latents, (..., D) -> (...)."""
        return value if self.num_latents is None else value.sum(-1)

    def attach(self, value: Tensor, local: Tensor, posterior: DensePosterior, response: Tensor | None = None) -> Tensor:
        """Return an evidence A(nu, tau) + sum_i c_i (...) whose value is known, in the graph of all it depends on.

        First derivatives only: in closed form they cost a fraction of differentiating through a factorisation.

        Args:
            value: the evidence (...).
            local: anything (...) whose derivative in the likelihood's parameters is that of the evidence.
            posterior: the prior conditioned on the sites, whose log normaliser is A. The sites count as fixed.
            response: w (..., N), if the evidence depends on the posterior mean as well, with derivative
                (I + K T)' w: it adds w (m - mu)' K^-1, made symmetric, to the derivative in K, and w to that in mu.
        """
        value = value.detach() + torch.where(value.isfinite(), _change(local), 0)
        if not (torch.is_grad_enabled() and (self.mean.requires_grad or self.covariance.requires_grad)):
            return value
        by_mean, by_covariance = posterior.gradient
        if response is not None:
            product = response.unsqueeze(-1) * by_mean.unsqueeze(-2)
            by_mean, by_covariance = by_mean + response, by_covariance + 0.5 * (product + product.mT)
        moved = (by_mean * _change(self.mean)).sum(-1) + (by_covariance * _change(self.covariance)).sum((-2, -1))
        return value + self.over_latents(moved)

    def result(
        self, name: str, posterior: DensePosterior, log_evidence: Tensor, status: Status, trace: list[Tensor]
    ) -> InferenceResult:
        """Return what a rule has found."""
        steps = f"{len(trace)} steps" if trace else "no step needed"
        message = f"{name}, {steps}: {status.value}"
        return InferenceResult(
            conditioned=posterior,
            dtype=self.dtype,
            log_evidence=log_evidence.to(self.dtype),
            status=status,
            num_steps=len(trace),
            trace=torch.stack(trace) if trace else log_evidence.detach().new_zeros((0, *log_evidence.shape)),
            message=message + (f"; jitter {self.jitter:g}." if self.jitter else "."),
            log_density=partial(log_density, self.likelihood),
            two_sided_tail=partial(two_sided_tail, self.likelihood),
            targets=self.targets,
        )


def _change(tensor: Tensor) -> Tensor:
    """Return zero, in the graph of the tensor."""
    return tensor - tensor.detach()


def log_density(likelihood: Any, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return log int p(y_i | f) N(f | m_i, v_i) df (..., N) for any likelihood."""
    own: Callable[..., Tensor] | None = getattr(likelihood, "log_density", None)
    if own is not None:
        return own(targets, mean, variance)
    return log_expectation(lambda f: conditional_log_prob(likelihood, targets, f), mean, variance)


def two_sided_tail(likelihood: Any, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return 2 min(P(Y <= y_i), P(Y >= y_i)) (..., N), at most 1, for Y ~ int p(y | f) N(f | m_i, v_i) df.

    nan where p(y | f) has several latents or no cumulative distribution function.
    """
    if num_latents(likelihood) is None:
        targets, mean, variance = torch.broadcast_tensors(targets.to(mean), mean, variance)
        predictive = CompoundDistribution(lambda f: with_cdf(likelihood.forward(f)), mean, variance)
        try:
            below = predictive.cdf(targets)
        except NotImplementedError:
            return torch.full_like(mean, torch.nan)
        above = 1 - below
        if predictive.support.is_discrete:
            above = above + log_density(likelihood, targets, mean, variance).exp()
        return (2 * torch.minimum(below, above)).clamp(0, 1)
    return torch.full_like(mean.select(-2, 0), torch.nan)
