"""The base of posteriors of D correlated latents, whatever the algebra behind them."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from linear_operator.operators import LinearOperator
from torch import Tensor

from gpext.likelihoods.curvature import structured_blocks
from gpext.sites import CoupledSites, JointSites

_MOST_CONTRAST = 1e-3 / torch.finfo(torch.float64).eps  # of a site and its cavity, whose moments have three digits then


class JointPosterior(ABC):
    """D Gaussian priors over N latent values each, conditioned on sites that couple those of a datum; float64.

    Example:
        >>> import torch
        >>> from gpext.posteriors import condition_coupled
        >>> from gpext.sites import CoupledSites
        >>> one = torch.ones(2, 1).double()
        >>> sites = CoupledSites(one, one, 0 * one[0], one)
        >>> posterior = condition_coupled(0 * one, torch.eye(1).double().expand(2, 1, 1), sites)
        >>> isinstance(posterior, JointPosterior), posterior.variance.mT
        (True, tensor([[0.5000, 0.5000]], dtype=torch.float64))
    """

    sites: JointSites
    prior_mean: Tensor  # (..., D, N)

    @property
    @abstractmethod
    def positive_definite(self) -> Tensor:
        """Whether there is such a posterior (...)."""

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """The posterior means (..., D, N)."""

    @property
    @abstractmethod
    def weights(self) -> Tensor:
        """K^-1 (m - mu) (..., D, N)."""

    @property
    @abstractmethod
    def blocks(self) -> Tensor:
        """The posterior covariance of the latents of each datum (..., D, D, N)."""

    @property
    @abstractmethod
    def log_det(self) -> Tensor:
        """log|I + K U| (...)."""

    @property
    def log_normalizer(self) -> Tensor:
        r"""The evidence of the sites (...), :math:`A = \log\int N(f|\mu,K) \prod_i t_i(f_i) df`.

        With e = nu - U mu: A = sum(nu' mu - mu' U mu / 2) + e' V e / 2 - log|I + K U| / 2.
        """
        mu, e = self.prior_mean, self._residual_shift
        at_mean = self.sites.shift * mu - 0.5 * mu * self.sites.times(mu)
        return (at_mean + 0.5 * e * (self.mean - mu)).sum((-2, -1)) - 0.5 * self.log_det

    @property
    def _residual_shift(self) -> Tensor:
        """Nu - U mu (..., D, N)."""
        return self.sites.shift - self.sites.times(self.prior_mean)

    @abstractmethod
    def covariance_times(self, vector: Tensor) -> Tensor:
        """Return V vector (..., D, N)."""

    def solve(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Return V vector and K^-1 V vector (..., D, N)."""
        product = self.covariance_times(vector)
        return product, vector - self.sites.times(product)

    @abstractmethod
    def distribution(self, dtype: torch.dtype) -> MultitaskMultivariateNormal:
        """Return the posterior of all latents at the training inputs."""

    @abstractmethod
    def predict(
        self, test_mean: Tensor, link: Tensor, test_covariance: LinearOperator, /
    ) -> MultitaskMultivariateNormal:
        """Return the posterior of all latents at S new inputs, coupled, its covariance lazily.

        Args:
            test_mean: (..., D, S) prior means there.
            link: what ties them to the training values: prior covariances (..., D, N, S), or a root (..., D, S, M).
            test_covariance: (..., D, S, S) prior covariances there, or what the root leaves of them.
        """

    @property
    def variance(self) -> Tensor:
        """The posterior marginal variances (..., D, N)."""
        return self.blocks.diagonal(dim1=-3, dim2=-2).movedim(-1, -2)

    @property
    def leave_one_out(self) -> tuple[Tensor, Tensor]:
        """Means (..., D, N) and covariances (..., D, D, N) of each f_i given all sites but its own: the cavities.

        A covariance that is not positive definite means that there is no cavity.
        """
        return self.cavities(1.0)

    def cavities(self, power: float) -> tuple[Tensor, Tensor]:
        """Return `leave_one_out`, or the same with only a fraction `power` of its own site taken from each datum."""
        U = precision_blocks(self.sites)
        return _cavities(self.mean, self.blocks, power * self.sites.shift, power * U)


def precision_blocks(sites: JointSites) -> Tensor:
    """Return U (..., D, D, N).

    Example:
        >>> import torch
        >>> from gpext.sites import CoupledSites
        >>> one = torch.ones(2, 1)
        >>> precision_blocks(CoupledSites(one, one, torch.tensor([3.0]), one)).squeeze(-1)  # diag(1, 1) + 3 w w'
        tensor([[4., 3.],
                [3., 4.]])
    """
    if isinstance(sites, CoupledSites):
        return structured_blocks(sites.precision, sites.coupling, sites.direction)
    return sites.precision


def _cavities(mean: Tensor, blocks: Tensor, shift: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
    """Return N(m, V) of each datum without its own site: (V^-1 - U)^-1 and its mean, V not inverted.

    nan where rounding leaves I - V U, which is (I + V_cavity U)^-1, no digits.

    Args:
        mean: m (..., D, N).
        blocks: V (..., D, D, N).
        shift: nu (..., D, N).
        precision: U (..., D, D, N).
    """
    V, U = blocks.movedim(-1, -3), precision.movedim(-1, -3)
    m, nu = mean.mT.unsqueeze(-1), shift.mT.unsqueeze(-1)
    rest = torch.eye(V.size(-1), dtype=V.dtype, device=V.device) - V @ U
    solved, info = torch.linalg.solve_ex(rest, torch.cat([V, m - V @ nu], -1))
    covariance, cavity_mean = solved[..., :-1], solved[..., -1]
    known = (info == 0) & (torch.linalg.matrix_norm(covariance @ U) < _MOST_CONTRAST)
    covariance = torch.where(known[..., None, None], covariance, torch.nan)
    cavity_mean = torch.where(known.unsqueeze(-1), cavity_mean, torch.nan)
    return cavity_mean.mT, (0.5 * (covariance + covariance.mT)).movedim(-3, -1)
