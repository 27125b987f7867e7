r"""D latents conditioned on coupled sites in float32, as a preconditioner: in half of the time of float64.

    R = (K + U^-1)^-1 in float32,      t = x - R K x ~ K^-1 V x,      K t ~ V x

Products with K are in float64, so that K t and t belong together whatever digits R has lost: a step along them is
exact, and R decides only where it leads. R is that of :mod:`gpext.posteriors.negative_coupling`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gpext.posteriors.negative_coupling import NegativeCoupling, condition_on_couplings
from gpext.posteriors.positive_factor import PositiveFactor
from gpext.sites import CoupledSites

_LARGEST = 1e6  # of the trace of Gamma K times its largest diagonal entry: float32 loses up to 6 % of H's eigenvalues


@dataclass(frozen=True)
class RoughPosterior:
    """D Gaussian priors over N latent values each, conditioned on sites that couple them; products have few digits.

    Example:
        >>> import torch
        >>> from gpext.sites import CoupledSites
        >>> half = torch.full((2, 1), 0.5).double()  # two equal classes of one datum
        >>> sites = CoupledSites(half, half, -torch.ones(1).double(), half)
        >>> posterior = condition_roughly(0 * half, torch.eye(1).double().expand(2, 1, 1), sites)
        >>> posterior.mean.mT, posterior.solve(half)[0].mT
        (tensor([[0.5000, 0.5000]], dtype=torch.float64), tensor([[0.5000, 0.5000]], dtype=torch.float64))
    """

    prior_mean: Tensor  # mu (..., D, N), float64 like K and the sites
    prior_covariance: Tensor  # K (..., D, N, N), or one (N, N) of all latents
    sites: CoupledSites
    first: Tensor  # R0 (..., D, N, N), of each latent given the diagonal; float32
    second: NegativeCoupling  # float32

    @property
    def positive_definite(self) -> Tensor:
        """Whether there is such a posterior (...)."""
        return self.second.positive_definite

    @property
    def mean(self) -> Tensor:
        """The posterior means m (..., D, N), to few digits."""
        return self.prior_mean + self._moved[0]

    @property
    def weights(self) -> Tensor:
        """K^-1 (m - mu) (..., D, N), for that m to all digits."""
        return self._moved[1]

    @cached_property
    def _moved(self) -> tuple[Tensor, Tensor]:
        return self.solve(self.sites.shift - self.sites.times(self.prior_mean))

    def solve(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Return V vector and K^-1 V vector (..., D, N), the first the product of K with the second."""
        return self.second.solve(self.prior_covariance, self.first, vector)


def condition_roughly(prior_mean: Tensor, prior_covariance: Tensor, sites: CoupledSites) -> RoughPosterior | None:
    """Condition D independent priors on sites that couple them in float32; None where it has too few digits for them.

    That is for sites far sharper than the prior, for negative precisions, and for couplings of another kind than those
    of a canonical exponential family.

    Args:
        prior_mean: mu (..., D, N); float64.
        prior_covariance: K (..., D, N, N), or one (N, N) of all latents; float64.
        sites: (..., D, N); float64.

    Example:
        >>> import torch
        >>> from gpext.sites import CoupledSites
        >>> half = torch.full((2, 1), 0.5).double()
        >>> sites = CoupledSites(half, half, -torch.ones(1).double(), half)
        >>> condition_roughly(0 * half, 1e9 * torch.eye(1).double(), sites) is None  # far sharper than the prior
        True
    """
    gamma = sites.precision
    share = gamma * prior_covariance.diagonal(dim1=-2, dim2=-1)
    if not bool((gamma >= 0).all() and (share.sum(-1) * share.amax(-1) < _LARGEST).all()):
        return None
    factor, ok = PositiveFactor.of(prior_covariance.float(), gamma.sqrt().float())
    first, no_mean = factor.response, torch.zeros_like(sites.coupling)  # g0, which products do not need
    second = condition_on_couplings(no_mean, first, gamma, sites.coupling, sites.direction)
    if second is None or not bool(ok.all() and second.positive_definite.all()):
        return None
    return RoughPosterior(prior_mean, prior_covariance, sites, first, second)
