"""Several counts a datum, each Poisson with its own latent function: one model, and one kernel if you like, for all."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator.operators import DiagLinearOperator
from torch import Tensor
from torch.distributions import Distribution

from gpext.checks import whole_number
from gpext.distributions import CompoundJointDistribution, Independent, LatentNormal, Poisson
from gpext.likelihoods.checks import check_counts
from gpext.likelihoods.curvature import Curvature, independent_variance
from gpext.likelihoods.joint import JointLikelihood
from gpext.likelihoods.poisson import PoissonLikelihood


class MultivariatePoissonLikelihood(JointLikelihood):
    r"""D counts a datum with rates e^f_d, independent given f.

    :math:`\log p(y|f) = \sum_d y_d f_d - e^{f_d} - \log y_d!`

    Targets are (..., N, D), latent values (..., D, N). The canonical exponential family of [Cha13] with T(y) = y and
    b(f) = sum exp f_d, whose Hessian is diagonal: no datum couples its latents.

    Args:
        num_outputs: D, at least 1.

    Raises:
        ValueError: no output.

    Example:
        >>> import torch
        >>> MultivariatePoissonLikelihood(2)(torch.zeros(2, 3)).mean  # of three data, two counts each
        tensor([[1., 1.],
                [1., 1.],
                [1., 1.]])
    """

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.num_latents = whole_number("num_outputs", num_outputs, 1)
        self._each = PoissonLikelihood()

    def check_support(self, targets: Tensor) -> None:
        """Raise ValueError if a target is outside the support."""
        if targets.dim() < 2 or targets.size(-1) != self.num_latents:
            raise ValueError(
                f"targets must be counts of shape (..., N, {self.num_latents}); got shape {tuple(targets.shape)}. "
                "A vector of counts goes with PoissonLikelihood, or as targets.unsqueeze(-1)."
            )
        check_counts(targets)

    def datum_shape(self, targets: Tensor) -> torch.Size:
        """Return (..., N)."""
        return targets.shape[:-1]

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log p(targets | f) (..., N), for targets in the support."""
        return self._each.log_prob(targets.mT, f).sum(-2)

    def curvature(self, targets: Tensor, f: Tensor) -> Curvature:
        """Return log p(y | f) to second order at f (..., D, N): u = y - e^f, U = diag(e^f).

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        rates = f.exp()
        none = torch.zeros_like(f)
        return Curvature(self.log_prob(targets, f), targets.mT - rates, rates, none.select(-2, 0), none, rates)

    def joint_log_density(self, targets: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
        """Return log int p(y | f) N(f | mean, covariance) df (..., N), covariance (..., D, D, N).

        Uncorrelated latents, all that this likelihood's own inference gives, are D integrals of one dimension.

        Raises:
            TypeError, ValueError: as :meth:`check`; a covariance is not positive semidefinite.
        """
        variance = independent_variance(covariance)
        if variance is not None:
            return self.log_density(targets, mean, variance)
        return super().joint_log_density(targets, mean, covariance)

    def expected_log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return E[log p(y | f)] (..., N) under independent N(mean, variance), (..., D, N), in closed form.

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        return self._each.expected_log_density(targets.mT, mean, variance).sum(-2)

    def log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return log int p(y | f) N(f | mean, variance) df (..., N) under independent latents.

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        return self._each.log_density(targets.mT, mean, variance).sum(-2)

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Distribution:
        """Return p(y | f) for f (..., D, N): batch shape (..., N), events of D counts."""
        return Independent(Poisson(rate=function_samples.mT.exp()), 1)

    def marginal(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> Distribution:
        """Return p(y), batch shape (..., N), events of D counts: independent ones where the latents are.

        Those of correlated latents are a :class:`gpext.distributions.CompoundJointDistribution`.
        """
        mean, covariance = self._blocks(function_dist)
        variance = independent_variance(covariance)
        if variance is None:
            return CompoundJointDistribution(self.forward, mean, covariance, self.joint_log_density)
        each = LatentNormal(mean.mT, DiagLinearOperator(variance.mT))
        return Independent(self._each.marginal(each), 1)
