"""Negative binomial counts with logit link: the Polya-Gamma identity with count y + r [Polson, Scott & Windle 2013]."""

from __future__ import annotations

import math
from typing import Any

import torch
from gpytorch.constraints import Interval, Positive
from gpytorch.priors import Prior
from torch import Tensor
from torch.nn.functional import logsigmoid

from gpext.augmentations import Augmentation, SechRadial
from gpext.bounds import Quadrature, SoftplusTerms
from gpext.distributions import NegativeBinomial
from gpext.likelihoods.checks import check_counts, floating_like
from gpext.likelihoods.latent import STRIP, LatentLikelihood
from gpext.likelihoods.super_gaussian import AugmentedLikelihood


class NegativeBinomialLogitLikelihood(AugmentedLikelihood):
    r"""Over-dispersed counts: :math:`p(y|f) = \frac{\Gamma(y+r)}{y!\,\Gamma(r)} \sigma(f)^y \sigma(-f)^r`.

    The conditional mean is r e^f and the variance r e^f (1 + e^f). With b = y + r,
    :math:`\sigma(f)^y\sigma(-f)^r = 2^{-b} e^{(y-r) f/2} / \cosh(f/2)^b`: g = (y - r)/2, h = f/2, phi(x) =
    1/cosh(sqrt x)^b.

    Args:
        batch_shape: shape of a batch of parameters.
        total_count_prior: prior of `total_count`.
        total_count_constraint: constraint of `total_count`; positive by default.

    The parameter `total_count` is r; small values mean strong over-dispersion.

    Example:
        >>> import torch
        >>> likelihood = NegativeBinomialLogitLikelihood()
        >>> likelihood.total_count = 3.0
        >>> likelihood(torch.zeros(1)).mean.detach()
        tensor([3.])
    """

    def __init__(
        self,
        batch_shape: torch.Size = torch.Size(),  # noqa: B008  gpytorch's own signature; a Size is immutable
        total_count_prior: Prior | None = None,
        total_count_constraint: Interval | None = None,
    ) -> None:
        super().__init__()
        self.register_parameter("raw_total_count", torch.nn.Parameter(torch.zeros(*batch_shape, 1)))
        if total_count_prior is not None:
            self.register_prior("total_count_prior", total_count_prior, _get_total_count, _set_total_count)
        constraint = total_count_constraint if total_count_constraint is not None else Positive()
        self.register_constraint("raw_total_count", constraint)

    @property
    def total_count(self) -> Tensor:
        """The dispersion r, shape (*batch_shape, 1)."""
        return self.raw_total_count_constraint.transform(self.raw_total_count)

    @total_count.setter
    def total_count(self, value: Tensor | float) -> None:
        value = torch.as_tensor(value, dtype=self.raw_total_count.dtype, device=self.raw_total_count.device)
        self.initialize(raw_total_count=self.raw_total_count_constraint.inverse_transform(value))

    def check_support(self, targets: Tensor) -> None:
        """Raise ValueError if a target is no count."""
        check_counts(targets)

    def unchecked_augmentation(self, targets: Tensor) -> Augmentation:
        """Return the augmentation of targets in the support."""
        r, y = self.total_count, floating_like(targets, self.total_count)
        zero = torch.zeros_like(r)
        log_constant = (_log_binomial(y, r) - math.log(2) * (y.double() + r)).to(y)
        return Augmentation(SechRadial(y + r), log_constant, 0.5 * (y - r), zero, zero + 0.25, zero)

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log p(targets | f) (..., N), for targets in the support."""
        y, r, latent = targets.double(), self.total_count.double(), f.double()  # large terms leave a small sum
        value = _log_binomial(y, r) + y * logsigmoid(latent) + r * logsigmoid(-latent)
        return value.to(floating_like(targets, f).dtype)

    def softplus_terms(self, targets: Tensor) -> SoftplusTerms:
        """Return log p(y | f) = log binomial + y f - (y + r) softplus(f), float64."""
        self.check(targets)
        y, r = targets.double(), self.total_count.double()
        constant = _log_binomial(y, r)
        one = torch.ones_like(constant).unsqueeze(0)
        return SoftplusTerms(constant, y, (y + r).unsqueeze(0), one, 0 * one)

    def expected_log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return E[log p(y | f)] under N(mean, variance), elementwise, to rounding.

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        terms = self.softplus_terms(targets)
        value = terms.lower_bound(Quadrature().expected_softplus, mean.double(), variance.double())
        return value.to(floating_like(targets, mean).dtype)

    def log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return log int p(y | f) N(f | mean, variance) df, elementwise.

        Not by way of the augmentation: what it absorbs grows with the squared count and would cancel.

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        return LatentLikelihood.log_density(self, targets, mean, variance)

    def knots(self, targets: Tensor) -> Tensor:
        """Return latent values about which p(y | f) may be narrow."""
        # The likelihood peaks at log(y / r) with a width of about 1 / sqrt(y); sigma(-f)^r falls off near -log r.
        return ((targets + 0.5) / self.total_count.detach()).log().unsqueeze(0)

    def strip(self, targets: Tensor) -> Tensor:
        """Return half the width of a strip without poles, less where the mass is narrow."""
        y, r = targets.double(), self.total_count.detach().double()
        return STRIP / (y * r / (y + r)).clamp(min=1).sqrt()

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> NegativeBinomial:
        """Return p(y | f)."""
        return NegativeBinomial(total_count=self.total_count, logits=function_samples)


def _log_binomial(y: Tensor, r: Tensor) -> Tensor:
    """Return log Gamma(y + r) - log Gamma(r) - log y!, float64."""
    y, r = y.double(), r.double()
    return torch.lgamma(y + r) - torch.lgamma(r) - torch.lgamma(y + 1)


def _get_total_count(module: NegativeBinomialLogitLikelihood) -> Tensor:
    return module.total_count


def _set_total_count(module: NegativeBinomialLogitLikelihood, value: Tensor) -> None:
    module.total_count = value
