r"""The Dirichlet likelihood: points of the simplex from D latent functions [Cha13 Sec. 4.3, Eq. 46 corrected].

    p(y | eta) = Gamma(S) / prod_j Gamma(theta_j) prod_j y_j^{theta_j - 1},   theta = softplus(eta),   S = sum_j theta_j

With J = sigmoid(eta), g = log y - psi0(theta) + psi0(S):

    u = J g,   U = diag(psi1(theta) J^2 - g J (1 - J)) - psi1(S) J J'

The link is not canonical: U need not be positive definite where y is unlikely; the Fisher information, without g, is.
Where theta is small Gamma(theta) = Gamma(1 + theta) / theta, and so on, keeps everything finite: r = J / theta -> 1,
and where S is small q = J / S -> softmax(eta).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal, base_distributions
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.functional import logsigmoid, softplus

from gpext.checks import whole_number
from gpext.distributions import CompoundDirichlet
from gpext.likelihoods.checks import floating_like
from gpext.likelihoods.curvature import Curvature
from gpext.likelihoods.joint import JointLikelihood
from gpext.quadrature import expected_log_gamma_of_sum, softplus_expectation
from gpext.special import log_gamma, polygamma

_THRESHOLD = 50.0  # above, softplus(eta) = eta to rounding
_SMALL = -40.0  # below, softplus(eta) = e^eta to rounding


class DirichletLikelihood(JointLikelihood):
    """Proportions y > 0 that sum to one, (..., N, D), from latent functions (..., D, N).

    Where many targets are equal the evidence, a density, can grow without bound with the scale of the kernels. A prior
    on the scale ends that: `register_prior("scale_prior", GammaPrior(2.0, 0.02), "outputscale")` of a ScaleKernel.

    Labels that are present or absent, as equal shares, are to be smoothed much further than compositions: with the
    amount that the error for zeros names, absent labels count for most. y = (1 - e) y + e / D with e = 0.9 names labels
    best in docs/evidence/multivariate_efd_simplex.md.

    Args:
        num_classes: D, at least 2.

    Raises:
        ValueError: fewer than two classes.

    Example:
        >>> import torch
        >>> f = torch.tensor([[1.0], [0.0], [0.0]])  # three latent functions of one datum
        >>> DirichletLikelihood(3)(f).mean
        tensor([[0.4865, 0.2568, 0.2568]])
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        num_classes = whole_number("num_classes", num_classes, 2)
        self.num_classes = self.num_latents = num_classes

    def check_support(self, targets: Tensor) -> None:
        """Raise ValueError if a target is outside the support."""
        D = self.num_classes
        if targets.dim() < 2 or targets.size(-1) != D:
            raise ValueError(f"targets must be proportions of shape (..., N, {D}); got shape {tuple(targets.shape)}.")
        if bool((targets <= 0).any()):
            index = tuple((targets <= 0).nonzero()[0].tolist())
            raise ValueError(
                f"proportions must be positive, as their logarithms count; got {targets[index].item():g} at index "
                f"{index}. Smooth zeros: y = (y * (n - 1) + 1 / {D}) / n with n = {targets.size(-2)} data."
            )
        totals = targets.sum(-1)
        off = (totals - 1).abs() > 10 * math.sqrt(torch.finfo(totals.dtype).eps)
        if bool(off.any()):
            index = tuple(off.nonzero()[0].tolist())
            raise ValueError(
                f"the proportions of each datum must sum to 1; got {totals[index].item():g} at index "
                f"{index[0] if len(index) == 1 else index}. Divide by the totals: y / y.sum(-1, keepdim=True)."
            )

    def datum_shape(self, targets: Tensor) -> torch.Size:
        """Return (..., N)."""
        return targets.shape[:-1]

    def expansion_point(self, targets: Tensor) -> Tensor:
        """Return eta = y (..., D, N), where Taylor expands [Cha13]."""
        return targets.mT

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log p(targets | f) (..., N), for targets in the support."""
        return dirichlet_log_prob(floating_like(targets, f).log().mT, f)

    def curvature(self, targets: Tensor, f: Tensor) -> Curvature:
        """Return log p(y | f) to second order at f (..., D, N).

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        return dirichlet_curvature(floating_like(targets, f).log().mT, f)

    def expected_log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return E[log p(y | f)] (..., N) under independent N(mean, variance), (..., D, N), to 1e-10 of its terms.

        Raises:
            TypeError, ValueError: as :meth:`check`; means or variances are not finite, or a variance is negative.
        """
        self.check(targets)
        return dirichlet_expected_log_prob(floating_like(targets, mean).log().mT, mean, variance)

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Distribution:
        """Return p(y | f) for f (..., D, N), a Dirichlet distribution with batch shape (..., N)."""
        return base_distributions.Dirichlet(concentration(function_samples).mT)

    def marginal(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> Distribution:
        """Return p(y), a :class:`gpext.distributions.CompoundDirichlet`: mean, variance, log_prob, regions, draws."""
        return CompoundDirichlet(*self._blocks(function_dist), log_concentration, self.joint_log_density)


def concentration(f: Tensor) -> Tensor:
    """Return theta = softplus(f)."""
    return softplus(f, threshold=_THRESHOLD)


def dirichlet_log_prob(log_y: Tensor, f: Tensor) -> Tensor:
    """Return log Dir(y | theta(f)) (..., N) for log y and f (..., D, N)."""
    theta, log_theta = concentration(f), log_concentration(f)
    constant = log_gamma(theta.sum(-2) + 1) - log_theta.logsumexp(-2) - log_y.sum(-2)
    return constant + (theta * log_y + log_theta - log_gamma(theta + 1)).sum(-2)


def dirichlet_curvature(log_y: Tensor, f: Tensor) -> Curvature:
    """Return log Dir(y | theta(f)) to second order at f (..., D, N), for log y alike."""
    theta, log_theta, J = concentration(f), log_concentration(f), f.sigmoid()
    total = theta.sum(-2, keepdim=True)
    r = (logsigmoid(f) - log_theta).exp()
    q = (logsigmoid(f) - log_theta.logsumexp(-2, keepdim=True)).exp()
    gradient = J * (log_y - polygamma(0, theta + 1) + polygamma(0, total + 1)) + r - q
    expected = r.square() + polygamma(1, theta + 1) * J.square()
    precision = expected - gradient * (-f).sigmoid()
    direction = q * (1 + total.square() * polygamma(1, total + 1)).sqrt()  # S^2 psi1(S) = 1 + S^2 psi1(S + 1)
    coupling = -torch.ones_like(f.select(-2, 0))
    return Curvature(dirichlet_log_prob(log_y, f), gradient, precision, coupling, direction, expected)


def dirichlet_expected_log_prob(log_y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return E[log Dir(y | theta(f))] (..., N) over independent f ~ N(mean, variance), for log y (..., D, N).

    All but log Gamma(S) are sums over latents; see :mod:`gpext.quadrature.softmax.gamma_sum`. Once differentiable in
    mean and variance.
    """
    log_y = log_y.detach().double()
    log_y, m, v = torch.broadcast_tensors(log_y, mean.double(), variance.double())
    flat = log_y.mT.reshape(-1)

    def jet(f: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return theta log y - log Gamma(theta) and its derivatives in f (r, Q)."""
        theta, log_theta, J = concentration(f), log_concentration(f), f.sigmoid()
        own = flat[rows].unsqueeze(-1)
        r = (logsigmoid(f) - log_theta).exp()
        slope = J * (own - polygamma(0, theta + 1)) + r
        bend = slope * (-f).sigmoid() - r.square() - polygamma(1, theta + 1) * J.square()
        return theta * own + log_theta - log_gamma(theta + 1), slope, bend

    value = softplus_expectation(jet, m, v) + expected_log_gamma_of_sum(m, v) - log_y.sum(-2)
    return value.to(mean.dtype)


def log_concentration(f: Tensor) -> Tensor:
    """Return log theta = log softplus(f), which is f where that is very negative."""
    small = f < _SMALL
    return torch.where(small, f, softplus(torch.where(small, 0.0, f), threshold=_THRESHOLD).log())
