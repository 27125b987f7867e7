"""The terms of a bound on the log likelihood at the current marginals, and their derivatives."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from gpext.augmentations import Augmentation
from gpext.bounds import LocalBound
from gpext.likelihoods import AugmentedLikelihood
from gpext.sites import GaussianSites

LikelihoodTerm = Literal["augmented", "exact"]  # the augmented bound on E[log p(y_i | f_i)], or that itself


@dataclass(frozen=True)
class LocalTerms:
    """F_i(m_i, v_i) and its derivatives in the marginals; `values` is in the graph of the likelihood's parameters.

    With D independent latents a datum's F_i depends on D marginals: values (..., N), the derivatives (..., D, N).

    Example:
        >>> import torch
        >>> from gpext.inference import exact_terms
        >>> from gpext.likelihoods import PoissonLikelihood
        >>> terms = exact_terms(PoissonLikelihood(), torch.tensor([2.0]), torch.zeros(1), torch.ones(1))
        >>> terms.precision  # exp(1/2)
        tensor([1.6487])
    """

    values: Tensor  # F_i (..., N)
    mean_gradient: Tensor  # g_i = dF_i/dm_i (..., N)
    precision: Tensor  # tau_i = -2 dF_i/dv_i (..., N)

    @property
    def total(self) -> Tensor:
        """sum_i F_i (...), float64, outside the graph."""
        return self.values.detach().double().sum(-1)

    def best_sites(self, mean: Tensor) -> GaussianSites:
        """Return tau_i and nu_i = g_i + tau_i m_i: where a natural-gradient step of length one goes."""
        shift = self.mean_gradient + self.precision * mean
        return GaussianSites(shift, self.precision.expand(shift.shape))

    def residual(self, sites: GaussianSites, mean: Tensor, variance: Tensor) -> Tensor:
        """Return how far the best sites would move the marginals (..., N), see `GaussianSites.motion_to`."""
        return sites.motion_to(self.best_sites(mean), mean, variance)


def bound_terms(bound: LocalBound, mean: Tensor, variance: Tensor) -> LocalTerms:
    """Return the terms of any differentiable bound at N(mean, variance)."""
    with torch.enable_grad():
        mean, variance = mean.detach().requires_grad_(), variance.detach().requires_grad_()
        values = bound(mean, variance)
        by_mean, by_variance = torch.autograd.grad(
            values.sum(), (mean, variance), retain_graph=True, materialize_grads=True
        )
    # What a Gaussian tail leaves at distant targets is far below rounding, but denormal products with it are slow.
    negligible = by_variance.abs() < torch.finfo(by_variance.dtype).eps ** 2 * by_variance.abs().max()
    return LocalTerms(values, by_mean, -2 * by_variance.masked_fill(negligible, 0.0))


def exact_terms(likelihood: Any, y: Tensor, mean: Tensor, variance: Tensor) -> LocalTerms:
    """Return E[log p(y_i | f_i)] under N(mean, variance) itself.

    Example:
        >>> import torch
        >>> from gpext.likelihoods import PoissonLikelihood
        >>> terms = exact_terms(PoissonLikelihood(), torch.tensor([2.0]), torch.zeros(1), torch.ones(1))
        >>> terms.mean_gradient, terms.precision  # 2 - exp(1/2), exp(1/2)
        (tensor([0.3513]), tensor([1.6487]))
    """
    return bound_terms(partial(likelihood.expected_log_density, y), mean, variance)


def augmented_sites(augmentation: Augmentation, mean: Tensor, variance: Tensor) -> GaussianSites:
    """Return the sites at the optimal q(w) for the marginals N(mean, variance), all (..., N) [GWO20 Alg. 1].

    Example:
        >>> import torch
        >>> from gpext.likelihoods import BernoulliLogitLikelihood
        >>> terms = BernoulliLogitLikelihood().augmentation(torch.ones(1))
        >>> augmented_sites(terms, torch.zeros(1), torch.zeros(1)).shift  # y - 1/2
        tensor([0.5000])
    """
    shape = mean.shape if mean.shape == variance.shape else torch.broadcast_shapes(mean.shape, variance.shape)
    shift, precision = augmentation.site(augmentation.radial.mean(augmentation.tilt(mean, variance)))
    return GaussianSites(shift.expand(shape).to(mean.dtype), precision.expand(shape).to(mean.dtype))


def augmented_terms(
    likelihood: AugmentedLikelihood, y: Tensor, mean: Tensor, variance: Tensor, sites: GaussianSites
) -> LocalTerms:
    """Return the augmented bound on E[log p(y_i | f_i)] at N(mean, variance), whose sites are these.

    Example:
        >>> import torch
        >>> from gpext.likelihoods import BernoulliLogitLikelihood
        >>> from gpext.sites import GaussianSites
        >>> zero, one = torch.zeros(1).double(), torch.ones(1).double()
        >>> terms = augmented_terms(BernoulliLogitLikelihood(), one, zero, one, GaussianSites(zero, one))
        >>> terms.values  # below E[log p(y | f)], by the sites' distance from the best ones
        tensor([-0.8133], dtype=torch.float64)
    """
    trainable = any(parameter.requires_grad for parameter in likelihood.parameters())
    with torch.set_grad_enabled(trainable):
        values = likelihood.unchecked_augmentation(y).bound(mean, variance)
    return LocalTerms(values, sites.shift - sites.precision * mean, sites.precision)


def likelihood_terms(likelihood: Any, y: Tensor, mean: Tensor, variance: Tensor, kind: LikelihoodTerm) -> LocalTerms:
    """Return the terms of one kind or the other at N(mean, variance).

    Example:
        >>> import torch
        >>> from gpext.likelihoods import PoissonLikelihood
        >>> y, m, v = torch.tensor([2.0]), torch.zeros(1), torch.ones(1)
        >>> likelihood_terms(PoissonLikelihood(), y, m, v, "exact").mean_gradient  # 2 - exp(1/2)
        tensor([0.3513])
    """
    if kind == "exact":
        return exact_terms(likelihood, y, mean, variance)
    with torch.no_grad():
        sites = augmented_sites(likelihood.unchecked_augmentation(y), mean, variance)
    return augmented_terms(likelihood, y, mean, variance, sites)
