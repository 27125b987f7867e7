"""A Gaussian prior, a likelihood and its targets at the door of every inference rule."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, overload

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from gpext.bounds import conditional_log_prob, has_density_of, num_latents
from gpext.bounds.contracts import HasJointLogDensity, HasLogDensity
from gpext.checks import check_tensor
from gpext.distributions import CompoundDistribution, with_cdf
from gpext.distributions.tweedie import AMOUNTS
from gpext.inference.expected_density import expected_log_density
from gpext.inference.result import InferenceResult, Status
from gpext.kernels import dense_covariance
from gpext.likelihoods import ComposedLikelihood, LatentLikelihood
from gpext.likelihoods.checks import HyperparameterError, check_binary, check_parameters, check_targets
from gpext.posteriors import (
    DensePrior,
    DesignPrior,
    JointPosterior,
    LowRankPrior,
    NeighbourPrior,
    Posterior,
    Prior,
    RoughPosterior,
)
from gpext.quadrature import log_expectation
from gpext.sites import GaussianSites, JointSites

_SHARP = 1e12  # tau k_ii below which enough digits are left
_NEGATIVE = 1e-3  # of KL(q || p), per datum
_LOSES_DIGITS = 1e6  # tau k_ii above which the mean and K^-1 (m - mu) have too few in common


@dataclass(frozen=True)
class Problem:
    """A Gaussian prior in float64, in the graph of what it was made from, and what belongs to the data.

    With D latents a datum the prior is a batch of D independent ones: mean (..., D, N).
    """

    prior: Prior
    likelihood: Any
    targets: Tensor
    num_latents: int | None
    dtype: torch.dtype
    jitter: float

    @property
    def mean(self) -> Tensor:
        """The prior mean mu (..., N)."""
        return self.prior.mean

    @classmethod
    def of(cls, prior: MultivariateNormal, likelihood: Any, targets: Tensor, jitter: float) -> Problem:
        """Check the three and return them as a problem.

        Raises:
            TypeError: half precision, or a likelihood that no rule can serve.
            ValueError: the shapes do not belong together, there are no data, an entry is not finite, or a target is
                outside the support.
        """
        mean = prior.mean
        if mean.dtype in (torch.float16, torch.bfloat16):
            raise TypeError(f"a prior in {mean.dtype} is not supported; use float32 or float64.")
        check_parameters(likelihood)
        check_support(likelihood, targets)
        if isinstance(likelihood, LatentLikelihood):
            targets = likelihood.join(targets)
        if isinstance(likelihood, gpytorch.likelihoods.SoftmaxLikelihood):
            raise TypeError(
                "gpytorch's SoftmaxLikelihood works on samples; use gpext.likelihoods.MultinomialLogitLikelihood("
                "num_classes), the same likelihood without mixing weights."
            )
        latents = num_latents(likelihood)
        if latents is not None and mean.shape[-2:-1] != (latents,):
            raise ValueError(
                f"{type(likelihood).__qualname__} has num_latents = {latents}: expected a prior of batch shape "
                f"(..., {latents}), got {tuple(prior.batch_shape)}. Give the mean and the kernel "
                f"batch_shape=torch.Size([{latents}]), one for each latent."
            )
        num_data = mean.size(-1)
        if num_data == 0:
            raise ValueError(f"expected at least one datum; got a prior of shape {tuple(mean.shape)}.")
        data = likelihood.datum_shape(targets) if isinstance(likelihood, LatentLikelihood) else targets.shape
        if data[-1:] != (num_data,):
            among = "" if data == targets.shape else f", the targets of {data.numel()} data"
            raise ValueError(
                f"expected targets of shape (..., {num_data}) like the prior; got {tuple(targets.shape)}{among}."
                f"{_remedy(likelihood, targets, num_data)}"
            )
        covariance = prior.lazy_covariance_matrix
        known: Prior | None = LowRankPrior.of(mean, covariance, jitter)
        for kind in (DesignPrior, NeighbourPrior):
            special = kind.of(mean, covariance, jitter)
            if special is not None:
                known, jitter = special
        if known is None:
            known = DensePrior.of(mean, dense_covariance(covariance), jitter)
        if not bool(mean.isfinite().all() and known.is_finite):
            raise HyperparameterError(
                "the prior has NaN or infinite entries; check the inputs and the kernel's parameters."
            )
        if isinstance(known, DensePrior) and mean.dtype != torch.float64 and not jitter:
            known, jitter = known.definite(torch.finfo(mean.dtype).eps)
        # A batch of targets may share one prior.
        known = known.expand_to(data if latents is None else torch.Size((*data[:-1], 1, num_data)))
        return cls(known, likelihood, targets, latents, mean.dtype, jitter)

    def no_sites(self) -> GaussianSites:
        """Return the sites that leave the prior as it is."""
        return GaussianSites(torch.zeros_like(self.mean), torch.zeros_like(self.mean))

    @overload
    def condition(self, sites: GaussianSites) -> Posterior: ...

    @overload
    def condition(self, sites: JointSites) -> JointPosterior: ...

    @overload
    def condition(self, sites: GaussianSites | JointSites) -> Posterior | JointPosterior: ...

    def condition(self, sites: GaussianSites | JointSites) -> Posterior | JointPosterior:
        """Return the prior conditioned on sites, outside the graph."""
        return self.prior.condition(sites)

    def condition_roughly(self, sites: GaussianSites | JointSites) -> Posterior | JointPosterior | RoughPosterior:
        """Return the same to few digits where this is quicker: enough to come near a mode."""
        rough = self.prior.condition_roughly(sites) if isinstance(self.prior, DensePrior) else None
        return self.condition(sites) if rough is None else rough

    def over_latents(self, value: Tensor) -> Tensor:
        """Sum what belongs to D independent latents, (..., D) -> (...)."""
        return value if self.num_latents is None else value.sum(-1)

    def over_latents_of(self, posterior: Posterior | JointPosterior, value: Tensor) -> Tensor:
        """Sum a quantity of a posterior over latents, unless the posterior has already done so."""
        return value if isinstance(posterior, JointPosterior) else self.over_latents(value)

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a'b over all values of all latents (...)."""
        return self.over_latents((a * b).sum(-1))

    def per_value(self, value: Tensor) -> Tensor:
        """Return what belongs to a posterior (...) so that it broadcasts with its latent values."""
        return value.unsqueeze(-1) if self.num_latents is None else value.unsqueeze(-1).unsqueeze(-1)

    def on_range(self, posterior: Posterior, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Return a mean m (..., N) and (m - mu)' K^-1 (m - mu) / 2, consistent with one another to rounding.

        A bound, or log p(y, f), is stationary at the posterior mean, where what rounding has done to m counts to second
        order alone if both are of the same m. Sites that are far sharper than the prior leave m and K^-1 (m - mu) few
        digits in common; then m = mu + R z and z'z / 2, with K = R R' and z = R^+ (m - mu), take their place.
        """
        sharpness = (posterior.sites.precision * self.prior.variance.detach()).max()
        if not (isinstance(self.prior, DensePrior) and bool(sharpness > _LOSES_DIGITS)):
            return mean, 0.5 * ((mean - self.mean.detach()) * posterior.weights).sum(-1)
        mu, root = self.mean.detach(), self.prior.square_root
        z = root.solve((mean - mu).unsqueeze(-1)).squeeze(-1)
        return mu + root.times(z), 0.5 * z.square().sum(-1)

    def attach(
        self, value: Tensor, local: Tensor, posterior: Posterior | JointPosterior, response: Tensor | None = None
    ) -> Tensor:
        """Return an evidence A(nu, tau) + sum_i c_i (...) whose value is known, in the graph of all it depends on.

        First derivatives only.

        Args:
            value: the evidence (...).
            local: anything (...) whose derivative in the likelihood's parameters is that of the evidence.
            posterior: the prior conditioned on the sites, whose log normaliser is A. The sites count as fixed.
            response: see :meth:`gpext.posteriors.DensePrior.follow`.
        """
        value = value.detach() + torch.where(value.isfinite(), local - local.detach(), 0)
        if not (torch.is_grad_enabled() and self.prior.requires_grad):
            return value
        follow: Callable[..., Tensor] = self.prior.follow  # the posterior is of the prior's own kind
        return value + self.over_latents(follow(posterior, response))

    def require_data_apart(self) -> None:
        """Raise ValueError unless the data can be visited one at a time: one posterior, log p(y | f) of one datum."""
        if self.mean.dim() > 1:
            raise ValueError(
                "the sequential schedule serves one posterior of one latent; got means of shape "
                f"{tuple(self.mean.shape)}. Use schedule='parallel'."
            )
        if not self.has_data_apart:
            raise ValueError(
                f"the sequential schedule takes log p(y | f) of one datum at a time, and "
                f"{type(self.likelihood).__qualname__} gives it of all {len(self.targets)} at once: it has parameters "
                "of each datum, as fixed noise is. Use schedule='parallel'."
            )

    @property
    def has_data_apart(self) -> bool:
        """Whether log p(y | f) of one datum can be evaluated alone: as declared, or as tried on the last."""
        if isinstance(self.likelihood, LatentLikelihood):
            return True
        f = self.mean.detach()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # gpytorch's, of a noise whose shape does not fit
            together = conditional_log_prob(self.likelihood, self.targets, f)[..., -1:]
            try:
                alone = conditional_log_prob(self.likelihood, self.targets[..., -1:], f[..., -1:])
            except (IndexError, RuntimeError, ValueError):  # how shapes that do not fit are met
                return False
        return alone.shape == together.shape and torch.allclose(alone, together, rtol=1e-5, equal_nan=True)

    def _is_lost(self, posterior: Posterior) -> bool:
        """Return whether sites are so much sharper than the prior that rounding has left nothing of the posterior."""
        sites = posterior.sites
        if bool((sites.precision.abs() * self.prior.variance.detach() < _SHARP).all()):
            return False
        divergence = sites.expected_log(posterior.mean, posterior.variance).sum(-1) - posterior.log_normalizer
        return bool((posterior.positive_definite & is_lost(divergence, self.mean.size(-1))).any())

    def result(
        self,
        name: str,
        posterior: Posterior | JointPosterior,
        log_evidence: Tensor,
        status: Status,
        trace: list[Tensor],
    ) -> InferenceResult:
        """Return what a rule has found; an evidence that is not finite is -inf, which no maximiser takes."""
        if isinstance(posterior, Posterior) and self._is_lost(posterior):
            status = Status.NOT_POSITIVE_DEFINITE
        is_finite = log_evidence.to(self.dtype).isfinite()
        if status is not Status.NOT_POSITIVE_DEFINITE and not bool(is_finite.all() and posterior.mean.isfinite().all()):
            status = Status.NOT_FINITE
        log_evidence = torch.where(is_finite, log_evidence, -torch.inf)
        steps = f"{len(trace)} steps" if trace else "no step needed"
        message = f"{name}, {steps}: {status.value}"
        density = partial(joint_log_density if isinstance(posterior, JointPosterior) else log_density, self.likelihood)
        return InferenceResult(
            conditioned=posterior,
            dtype=self.dtype,
            log_evidence=log_evidence.to(self.dtype),
            status=status,
            num_steps=len(trace),
            trace=torch.stack(trace) if trace else log_evidence.detach().new_zeros((0, *log_evidence.shape)),
            message=message + (f"; jitter {self.jitter:g}." if self.jitter else "."),
            log_density=density,
            two_sided_tail=partial(two_sided_tail, self.likelihood),
            expected_log_density=partial(expected_log_density, self.likelihood, density),
            targets=self.targets,
        )


def check_support(likelihood: Any, targets: Tensor) -> None:
    """Raise unless the targets are finite, in a dtype that the algebra works in, and in the support of the likelihood.

    Raises:
        TypeError: no tensor, or half precision.
        ValueError: targets are not finite or outside the support.
    """
    if isinstance(likelihood, LatentLikelihood):
        check_tensor("targets", targets)
        likelihood.check(targets)
    else:
        check_targets(targets)
    if has_density_of(likelihood, gpytorch.likelihoods.BernoulliLikelihood):
        check_binary(targets)


def _remedy(likelihood: Any, targets: Tensor, num_data: int) -> str:
    """Return how to make targets (N,) of a column of them, or of one-hot rows, or how to declare rows of targets."""
    if targets.dim() != 2 or len(targets) != num_data:
        return ""
    if targets.size(-1) == 1:
        return " Take targets.squeeze(-1)."
    one_hot = ((targets == 0) | (targets == 1)).all() and (targets.sum(-1) == 1).all()
    if bool(one_hot):
        return " The classes of one-hot rows are targets.argmax(-1)."
    name = type(likelihood).__qualname__
    is_own = isinstance(likelihood, LatentLikelihood) and type(likelihood).datum_shape is LatentLikelihood.datum_shape
    return f" If a row is the target of one datum, {name} overrides datum_shape(targets)." if is_own else ""


def is_lost(divergence: Tensor, num_data: int) -> Tensor:
    """Return whether KL(q || p) (...) has come out negative: then rounding has left nothing of the posterior."""
    return divergence < -_NEGATIVE * num_data


def log_density(likelihood: Any, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return log int p(y_i | f) N(f | m_i, v_i) df (..., N) for any likelihood."""
    if isinstance(likelihood, HasLogDensity):
        return likelihood.log_density(targets, mean, variance)
    return log_expectation(lambda f: conditional_log_prob(likelihood, targets, f), mean, variance)


def joint_log_density(likelihood: Any, targets: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
    """Return log int p(y_i | f) N(f | m_i, V_i) df (..., N) for D latents whose covariances are (..., D, D, N).

    Raises:
        NotImplementedError: a likelihood that has no integral over correlated latents.
    """
    if not isinstance(likelihood, HasJointLogDensity):
        raise NotImplementedError(
            f"{type(likelihood).__qualname__} has no joint_log_density(targets, mean, covariance), the integral over "
            "correlated latents; subclass gpext.likelihoods.JointLikelihood."
        )
    return likelihood.joint_log_density(targets, mean, covariance)


def two_sided_tail(likelihood: Any, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return 2 min(P(Y <= y_i), P(Y >= y_i)) (..., N), at most 1, for Y ~ int p(y | f) N(f | m_i, v_i) df.

    nan where p(y | f) has several latents or no cumulative distribution function, or a target is several numbers.
    """
    if isinstance(likelihood, ComposedLikelihood):
        several = num_latents(likelihood) is not None
        found = torch.full_like(mean.select(-2, 0) if several else mean, torch.nan)
        for part in likelihood.observed(targets, mean):
            index, m, v = part.index, part.mean, variance[..., part.index]
            if several and num_latents(part.likelihood) is None:  # a datum that depends on the first latent
                m, v = m.select(-2, 0), v[..., 0, 0, :] if v.dim() > m.dim() else v.select(-2, 0)
            tail = two_sided_tail(part.likelihood, part.targets, m, v)
            found = found.index_copy(-1, index, tail.to(found))
        return found
    side_information = isinstance(likelihood, LatentLikelihood) and likelihood.target_dims(targets) > 0
    if num_latents(likelihood) is None and not side_information:
        targets, mean, variance = torch.broadcast_tensors(targets.to(mean), mean, variance)
        predictive = CompoundDistribution(lambda f: with_cdf(likelihood.forward(f)), mean, variance)
        try:
            below = predictive.cdf(targets)
        except NotImplementedError:
            return torch.full_like(mean, torch.nan)
        above = 1 - below
        if predictive.support.is_discrete:
            above = above + log_density(likelihood, targets, mean, variance).exp()
        elif predictive.support is AMOUNTS:
            above = torch.where(targets == 0, 1.0, above)
        return (2 * torch.minimum(below, above)).clamp(0, 1)
    return torch.full_like(mean if num_latents(likelihood) is None else mean.select(-2, 0), torch.nan)
