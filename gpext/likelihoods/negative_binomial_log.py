r"""Negative binomial counts with log link: e^f is the mean, whatever the dispersion [Cameron & Trivedi 2013, Sec. 3.3].

With r = 1 / dispersion it is the logit likelihood at f - log r, and has the same Polya-Gamma augmentation.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from gpytorch.constraints import Interval, Positive
from gpytorch.priors import Prior
from torch import Tensor

from gpext.augmentations import Augmentation, SechRadial
from gpext.bounds import Quadrature, SoftplusTerms
from gpext.distributions import NegativeBinomial
from gpext.likelihoods.checks import check_counts, floating_like
from gpext.likelihoods.latent import LatentLikelihood
from gpext.likelihoods.super_gaussian import AugmentedLikelihood
from gpext.special import stirling_remainder

_FEW = 1e4  # y + r, up to which a difference of terms of its size leaves eleven digits


class NegativeBinomialLogLikelihood(AugmentedLikelihood):
    r"""Over-dispersed counts: with mean :math:`\mu = e^f`, variance :math:`\mu + \alpha \mu^2`, dispersion alpha.

    For alpha to zero they are Poisson counts with rate e^f. Exposure belongs in the mean function, as the logarithm of
    the exposure.

    Args:
        batch_shape: shape of a batch of parameters.
        dispersion_prior: prior of `dispersion`.
        dispersion_constraint: constraint of `dispersion`; positive by default.

    The parameter `dispersion` is alpha; 1 / alpha is the `total_count` of the distribution that `forward` returns.

    Example:
        >>> import torch
        >>> likelihood = NegativeBinomialLogLikelihood()
        >>> likelihood.dispersion = 0.5
        >>> likelihood(torch.tensor([2.0]).log()).variance.detach()  # 2 + 0.5 * 2^2
        tensor([4.])
    """

    def __init__(
        self,
        batch_shape: torch.Size = torch.Size(),  # noqa: B008  gpytorch's own signature; a Size is immutable
        dispersion_prior: Prior | None = None,
        dispersion_constraint: Interval | None = None,
    ) -> None:
        super().__init__()
        self.register_parameter("raw_dispersion", torch.nn.Parameter(torch.zeros(*batch_shape, 1)))
        if dispersion_prior is not None:
            self.register_prior("dispersion_prior", dispersion_prior, _get_dispersion, _set_dispersion)
        constraint = dispersion_constraint if dispersion_constraint is not None else Positive()
        self.register_constraint("raw_dispersion", constraint)

    @property
    def dispersion(self) -> Tensor:
        """The dispersion alpha, shape (*batch_shape, 1)."""
        return self.raw_dispersion_constraint.transform(self.raw_dispersion)

    @dispersion.setter
    def dispersion(self, value: Tensor | float) -> None:
        value = torch.as_tensor(value, dtype=self.raw_dispersion.dtype, device=self.raw_dispersion.device)
        self.initialize(raw_dispersion=self.raw_dispersion_constraint.inverse_transform(value))

    @property
    def _r(self) -> Tensor:
        return self.dispersion.double().reciprocal()

    def expansion_point(self, targets: Tensor) -> Tensor:
        """Return log y, of a half for none, where Taylor expands."""
        return targets.double().clamp_min(0.5).log()

    def log_prob_slopes(self, targets: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return the derivatives of log p(y | f) in f, with :math:`\sigma = \mu / (\mu + r)`, r = 1 / alpha.

        :math:`y (1 - \sigma) - r \sigma` and :math:`-(y + r) \sigma (1 - \sigma)`, the first without differences of
        large numbers, as that of n K(d; y / n) in :func:`_log_density`:
        :math:`-(y r / n) (e^d - 1) / (1 + (y / n) (e^d - 1))`.
        """
        y, r = targets.to(f), self._r.to(f)
        above, below = torch.sigmoid(f - r.log()), torch.sigmoid(r.log() - f)
        some = y.clamp_min(1)
        n, d = some + r, f - some.log()
        is_above = d > 0  # where it is the same by e^-d
        change = torch.where(is_above, -d, d).expm1()
        weight = torch.where(is_above, some, -some) * r / n
        slope = weight * change / (1 + torch.where(is_above, r, some) / n * change)
        return torch.where(y > 0, slope, -r * above), -(y + r) * above * below

    def check_support(self, targets: Tensor) -> None:
        """Raise ValueError if a target is no count."""
        check_counts(targets)

    def unchecked_augmentation(self, targets: Tensor) -> Augmentation:
        """Return the augmentation of targets in the support."""
        r, y = self._r, targets.double()
        g, dtype = 0.5 * (y - r), floating_like(targets, self.dispersion).dtype
        log_constant = _log_coefficient(y, r) - math.log(2) * (y + r) - g * r.log()
        terms = (log_constant, g, r.log(), torch.full_like(r, 0.25), torch.zeros_like(r))
        return Augmentation(SechRadial((y + r).to(dtype)), *(term.to(dtype) for term in terms))

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log p(targets | f) (..., N), for targets in the support."""
        return _log_density(targets.double(), self._r, f.double()).to(floating_like(targets, f).dtype)

    def softplus_terms(self, targets: Tensor) -> SoftplusTerms:
        """Return log p(y | f) = constant + y f - (y + r) softplus(f - log r), float64."""
        self.check(targets)
        y, r = targets.double(), self._r
        n = y + r
        offset = -r.log().expand_as(n).unsqueeze(0)
        constant = _log_coefficient(y, r) - y * r.log()
        return SoftplusTerms(constant, y, n.unsqueeze(0), torch.ones_like(offset), offset)

    def expected_log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return E[log p(y | f)] under N(mean, variance), elementwise.

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        if bool((targets + self.dispersion.detach().reciprocal() > _FEW).any()):
            return LatentLikelihood.expected_log_density(self, targets, mean, variance)
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
        """Return the peak, log y, and where p falls off below it for r < 1, by a factor r; for y = 0 as for y = 1."""
        y, r = targets.double().clamp_min(1), self._r.detach()
        peak, edge = torch.broadcast_tensors(y.log(), y.log() + r.clamp_max(1).log())
        return torch.stack([peak, edge]).to(floating_like(targets, self.dispersion).dtype)

    def strip(self, targets: Tensor) -> Tensor:
        """Return half the width of a strip without poles, less where the mass is narrow or next to a Poisson one."""
        y, r = targets.double(), self._r.detach()
        return 1.2 / (y * r / (y + r)).clamp(min=1).sqrt()

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> NegativeBinomial:
        """Return p(y | f)."""
        r = self._r
        return NegativeBinomial(
            total_count=r.to(function_samples.dtype), logits=(function_samples - r.log()).to(function_samples.dtype)
        )


def _log_density(y: Tensor, r: Tensor, f: Tensor) -> Tensor:
    """Return log p(y | f), without differences of numbers as large as y or r, float64 [Loader 2000].

    With n = y + r and d = f - log y that is log p(y | log y) - n K(d; y / n), where K(d; w) = log(1 - w + w e^d) - w d
    is that of r / n at -d: of the two the smaller share has the smaller error.
    """
    none, some = y == 0, y.clamp_min(1)
    n = some + r
    d = f - some.log()
    is_less = some < r
    deviance = n * _excess(torch.where(is_less, d, -d), torch.where(is_less, some, r) / n)
    return torch.where(none, -r * _softplus(f - r.log()), _log_coefficient_at_mode(some, r) - deviance)


def _excess(x: Tensor, share: Tensor) -> Tensor:
    """Return log(1 - s + s e^x) - s x, which is s (1 - s) x^2 / 2 for small x."""
    near = x.abs() < 1
    small = torch.where(near, x, 0.0)
    large = torch.where(near, 1.0, x)
    logit = share.log() - (-share).log1p()
    far = (-share).log1p() + _softplus(large + logit) - share * large
    return torch.where(near, (share * small.expm1()).log1p() - share * small, far)


def _softplus(x: Tensor) -> Tensor:
    """Return log(1 + e^x) with all its digits, which torch's own lacks for negative x."""
    above = torch.where(x > 0, x, 0.0)
    below = torch.where(x > 0, 0.0, x)
    return torch.where(x > 0, above + (-above).exp().log1p(), below.exp().log1p())


def _log_coefficient_at_mode(y: Tensor, r: Tensor) -> Tensor:
    """Return log p(y | f = log y) for y > 0: log Gamma(n) / (Gamma(r) y!) + y log(y / n) + r log(r / n)."""
    n = y + r
    rest = stirling_remainder(n) - stirling_remainder(r) - stirling_remainder(y)
    return rest + 0.5 * ((r / n).log() - (2 * math.pi * y).log())


def _log_coefficient(y: Tensor, r: Tensor) -> Tensor:
    """Return log Gamma(y + r) - log Gamma(r) - log y!."""
    return torch.lgamma(y + r) - torch.lgamma(r) - torch.lgamma(y + 1)


def _get_dispersion(module: NegativeBinomialLogLikelihood) -> Tensor:
    return module.dispersion


def _set_dispersion(module: NegativeBinomialLogLikelihood, value: Tensor) -> None:
    module.dispersion = value
