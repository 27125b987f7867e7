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

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from torch import Tensor

from gpext.augmentations import Augmentation
from gpext.inference.result import InferenceResult, Status
from gpext.likelihoods import AugmentedLikelihood
from gpext.posteriors import DensePosterior, condition_dense
from gpext.sites import GaussianSites


def augmented_sites(augmentation: Augmentation, mean: Tensor, variance: Tensor) -> GaussianSites:
    """Return the sites at the optimal q(w) for the marginals N(mean, variance), all (..., N) [GWO20 Alg. 1]."""
    shape = torch.broadcast_tensors(mean, variance)[0].shape
    shift, precision = augmentation.site(augmentation.radial.mean(augmentation.tilt(mean, variance)))
    return GaussianSites(shift.expand(shape).to(mean.dtype), precision.expand(shape).to(mean.dtype))


def require_augmentation(likelihood: Any) -> AugmentedLikelihood:
    """Return the likelihood if it has an augmentation.

    Raises:
        TypeError: naming what serves the likelihood instead.
    """
    if not isinstance(likelihood, AugmentedLikelihood):
        raise TypeError(
            f"CAVI needs a likelihood with a scale-mixture augmentation (a gpext SuperGaussianLikelihood, StudentT, "
            f"Laplace, Matern32, BernoulliLogit, BayesianSVM or NegativeBinomialLogit likelihood); got "
            f"{type(likelihood).__module__}.{type(likelihood).__qualname__}. It can be trained with "
            "gpytorch.mlls.VariationalELBO."
        )
    return likelihood


@dataclass(frozen=True)
class CAVI:
    """Closed-form variational inference on the full data, one Cholesky a step.

    Args:
        max_steps: most steps taken.
        tolerance: converged when no marginal mean moves by more than this many posterior standard deviations in a step,
            and no marginal variance by more than this fraction.
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

    def infer(self, prior: MultivariateNormal, likelihood: AugmentedLikelihood, targets: Tensor) -> InferenceResult:
        """Return the posterior, its sites and the bound on the log evidence.

        Args:
            prior: p(f) at the training inputs, (..., N).
            likelihood: any likelihood with an augmentation.
            targets: (..., N).

        Raises:
            TypeError: the likelihood has no augmentation, or half precision.
            ValueError: targets are not finite, outside the support or of the wrong shape, or the prior is not finite.
        """
        likelihood = require_augmentation(likelihood)
        if prior.mean.dtype in (torch.float16, torch.bfloat16):
            raise TypeError(f"a prior in {prior.mean.dtype} is not supported; use float32 or float64.")
        if targets.shape[-1:] != prior.event_shape:
            raise ValueError(
                f"expected targets of shape (..., {prior.event_shape[0]}) like the prior; got {tuple(targets.shape)}."
            )
        augmentation = likelihood.augmentation(targets)
        mean, covariance = prior.mean, prior.covariance_matrix
        if not bool(mean.isfinite().all() and covariance.isfinite().all()):
            raise ValueError("the prior has NaN or infinite entries; check the inputs and the kernel's parameters.")
        with torch.no_grad():
            posterior, status, trace = self._iterate(mean.double(), self._jittered(covariance), augmentation, targets)
            sites, q_mean, q_variance = posterior.sites, posterior.mean, posterior.variance
        # The value of the bound, in the graph of the prior (at fixed sites) and of the likelihood (at fixed q).
        conditioned = condition_dense(mean, self._jittered(covariance), sites)
        gap = augmentation.bound(q_mean, q_variance) - sites.expected_log(q_mean, q_variance)
        log_evidence = conditioned.log_normalizer + gap.sum(-1)
        message = f"CAVI, {len(trace)} steps: {status.value}" + (f"; jitter {self.jitter:g}" if self.jitter else "")
        return InferenceResult(
            posterior=MultivariateNormal(
                q_mean.to(mean.dtype), to_linear_operator(posterior.covariance.to(mean.dtype))
            ),
            sites=sites.to(mean.dtype),
            log_evidence=log_evidence.to(mean.dtype),
            status=status,
            num_steps=len(trace),
            trace=torch.stack(trace) if trace else log_evidence.detach().new_zeros((0, *log_evidence.shape)),
            message=message + ".",
        )

    def _jittered(self, covariance: Tensor) -> Tensor:
        covariance = covariance.double()
        if self.jitter == 0:
            return covariance
        return covariance + self.jitter * torch.eye(covariance.size(-1), dtype=torch.float64, device=covariance.device)

    def _iterate(
        self, mean: Tensor, covariance: Tensor, augmentation: Augmentation, targets: Tensor
    ) -> tuple[DensePosterior, Status, list[Tensor]]:
        """Return the last good posterior (the prior if the first step fails), how it ended, and the bound a step."""
        shape = torch.broadcast_shapes(mean.shape, targets.shape)
        none = torch.zeros(shape, dtype=mean.dtype, device=mean.device)
        posterior = condition_dense(mean, covariance, GaussianSites(none, none))
        q_mean, q_variance = mean.expand(shape), covariance.diagonal(dim1=-2, dim2=-1).expand(shape)
        trace: list[Tensor] = []
        for _ in range(self.max_steps):
            sites = augmented_sites(augmentation, q_mean, q_variance)
            candidate = condition_dense(mean, covariance, sites)
            if not candidate.positive_definite:
                return posterior, Status.NOT_POSITIVE_DEFINITE, trace
            old_mean, old_variance = q_mean, q_variance
            q_mean, q_variance = candidate.mean, candidate.variance
            gap = augmentation.bound(q_mean, q_variance) - sites.expected_log(q_mean, q_variance)
            bound = candidate.log_normalizer + gap.sum(-1)
            if not bool(bound.isfinite().all()):
                return posterior, Status.NOT_FINITE, trace
            posterior = candidate
            trace.append(bound)
            moved = ((q_mean - old_mean).abs() / q_variance.sqrt()).max()
            changed = ((q_variance - old_variance).abs() / q_variance).max()
            if bool(moved < self.tolerance) and bool(changed < self.tolerance):
                return posterior, Status.CONVERGED, trace
        return posterior, Status.MAX_STEPS, trace
