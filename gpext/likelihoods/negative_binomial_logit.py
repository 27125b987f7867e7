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
from gpext.bounds import SoftplusTerms
from gpext.distributions import NegativeBinomial
from gpext.likelihoods.checks import check_counts, floating_like
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

    def _augmentation(self, targets: Tensor) -> Augmentation:
        check_counts(targets)
        r, y, log_binomial = self._terms(targets)
        zero = torch.zeros_like(r)
        log_constant = log_binomial - math.log(2) * (y + r)
        return Augmentation(SechRadial(y + r), log_constant, 0.5 * (y - r), zero, zero + 0.25, zero)

    def _terms(self, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return r, y and the logarithm of the binomial coefficient."""
        r = self.total_count
        y = floating_like(targets, r)
        return r, y, torch.lgamma(y + r) - torch.lgamma(r) - torch.lgamma(y + 1)

    def _log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        r, y, log_binomial = self._terms(targets)
        return log_binomial + y * logsigmoid(f) + r * logsigmoid(-f)

    def softplus_terms(self, targets: Tensor) -> SoftplusTerms:
        """Return log p(y | f) = log binomial + y f - (y + r) softplus(f)."""
        self.check(targets)
        r, y, log_binomial = self._terms(targets)
        one = torch.ones_like(log_binomial).unsqueeze(0)
        return SoftplusTerms(log_binomial, y, (y + r).unsqueeze(0), one, 0 * one)

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> NegativeBinomial:
        """Return p(y | f)."""
        return NegativeBinomial(total_count=self.total_count, logits=function_samples)


def _get_total_count(module: NegativeBinomialLogitLikelihood) -> Tensor:
    return module.total_count


def _set_total_count(module: NegativeBinomialLogitLikelihood, value: Tensor) -> None:
    module.total_count = value
