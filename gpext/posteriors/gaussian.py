"""The base of posteriors of one latent a datum, whatever the algebra behind them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from gpext.sites import GaussianSites


class GaussianPosterior(ABC):
    """A Gaussian prior over N latent values conditioned on a site for each; float64."""

    prior_mean: Tensor  # mu (..., N)
    sites: GaussianSites

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """The posterior mean m (..., N)."""

    @property
    @abstractmethod
    def weights(self) -> Tensor:
        """K^-1 (m - mu) (..., N)."""

    @property
    @abstractmethod
    def variance(self) -> Tensor:
        """The posterior marginal variances v (..., N)."""

    @property
    @abstractmethod
    def cavity_share(self) -> Tensor:
        """1 - tau v (..., N)."""

    @property
    @abstractmethod
    def log_det(self) -> Tensor:
        """log|I + K T| (...)."""

    @abstractmethod
    def covariance_times(self, vector: Tensor) -> Tensor:
        """Return V vector (..., N)."""

    def solve(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Return V vector and K^-1 V vector (..., N)."""
        product = self.covariance_times(vector)
        return product, vector - self.sites.times(product)

    @property
    def log_normalizer(self) -> Tensor:
        r"""The evidence of the sites, :math:`A = \log\int N(f|\mu,K) \prod_i t_i(f_i) df` (...).

        With e = nu - tau mu: A = sum(nu mu - tau mu^2 / 2) + e' V e / 2 - log|I + K T| / 2.
        """
        mu = self.prior_mean
        at_mean = (self.sites.shift * mu - 0.5 * self.sites.precision * mu.square()).sum(-1)
        return at_mean + 0.5 * (self._residual_shift * (self.mean - mu)).sum(-1) - 0.5 * self.log_det

    @property
    def log_peak(self) -> Tensor:
        r"""A without the sites at the mean, :math:`\log\int N(f|\mu,K) \prod_i t_i(f_i) / t_i(m_i) df` (...).

        Which is -(m - mu)' K^-1 (m - mu) / 2 - log|I + K T| / 2. Of sharp sites A and the t_i(m_i) are huge, and their
        difference has no digits.
        """
        return -0.5 * (self.weights * (self.mean - self.prior_mean)).sum(-1) - 0.5 * self.log_det

    @property
    def leave_one_out(self) -> tuple[Tensor, Tensor]:
        """Mean and variance (..., N) of each f_i given all sites but its own: the cavities of JVV11 Sec. 4.

        A variance that is not positive means that the datum alone holds the posterior together: there is no cavity.
        """
        variance = self.variance / self.cavity_share
        return self.mean - variance * self.weights, variance

    @property
    def _residual_shift(self) -> Tensor:
        """Nu - tau mu (..., N)."""
        return self.sites.shift - self.sites.precision * self.prior_mean
