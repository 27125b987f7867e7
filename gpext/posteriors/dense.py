r"""Condition a dense Gaussian prior on Gaussian sites of any sign, without inverting K [JVV11 Sec. 4.1, R&W 3.5].

    q(f) prop. to N(f | mu, K) prod_i exp(nu_i f_i - tau_i f_i^2 / 2) = N(m, V)
    V = (K^-1 + T)^-1,   m = mu + V (nu - tau mu),   T = diag(tau)

The sites are split by sign, T = P^2 - Q^2, and conditioned on in turn, the negative ones (index set n) on their own:

    B1 = I + P K P = L1 L1',              W1 = L1^-1 P K,           V1 = K - W1' W1
    B2 = I - Q_n V1_nn Q_n = L2 L2',      W2 = L2^-1 Q_n V1_n:,     V  = V1 + W2' W2
    log|I + K T| = log|B1| + log|B2|

B1 is positive definite whatever K and P are, duplicates included; B2 failing means that V is not positive definite,
which the result says. Everything is computed in float64, in O(N^3): one Cholesky, and where variances are asked for the
inverse of L1, for P V1 P = I - B1^-1. The mean and the evidence do without.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from linear_operator.operators import LinearOperator, MatmulLinearOperator
from torch import Tensor

from gpext.distributions import LatentNormal
from gpext.linalg.products import times
from gpext.linalg.triangles import take_columns
from gpext.posteriors.gaussian import GaussianPosterior
from gpext.posteriors.negative_sites import NegativeSites, condition_on_negative
from gpext.posteriors.positive_factor import PositiveFactor
from gpext.sites import GaussianSites

_RELIABLE = 1e-3  # tau v, as one less a diagonal element of B1^-1, from which it has digits enough


@dataclass(frozen=True)
class DensePosterior(GaussianPosterior):
    """A Gaussian prior over N latent values conditioned on N sites; float64.

    `positive_definite` is False when no such posterior exists (too negative a precision, or a prior covariance that is
    not positive semidefinite); every number is then meaningless.

    Example:
        >>> import torch
        >>> from gpext.posteriors import condition_dense
        >>> from gpext.sites import GaussianSites
        >>> sites = GaussianSites(shift=torch.tensor([2.0]), precision=torch.tensor([1.0]))
        >>> posterior = condition_dense(torch.zeros(1), torch.eye(1), sites)
        >>> posterior.variance  # 1 / (1 + tau)
        tensor([0.5000], dtype=torch.float64)
    """

    prior_mean: Tensor  # (..., N)
    prior_covariance: Tensor  # (..., N, N)
    sites: GaussianSites
    factor: PositiveFactor  # L1
    negative: NegativeSites | None
    positive_definite: Tensor  # (...), bool

    @cached_property
    def whitened_positive(self) -> Tensor:
        """W1 = L1^-1 P K (..., n, N), of the n data that the factor has."""
        return self.factor.whiten(self.prior_covariance)

    @cached_property
    def weights(self) -> Tensor:
        """K^-1 (m - mu) = (I + T K)^-1 (nu - tau mu) (..., N): what prediction at new inputs multiplies."""
        return self.respond(self._residual_shift)

    @cached_property
    def mean(self) -> Tensor:
        """The posterior mean (..., N)."""
        return self.prior_mean + times(self.prior_covariance, self.weights)

    @property
    def variance(self) -> Tensor:
        """The posterior marginal variances v (..., N)."""
        return self._marginals[0]

    @property
    def cavity_share(self) -> Tensor:
        """1 - tau v (..., N), the part of a marginal's precision that is not its own site's, without cancellation."""
        return self._marginals[1]

    @cached_property
    def _marginals(self) -> tuple[Tensor, Tensor]:
        tau = self.sites.precision
        variance, share = self._marginals_of_positive()
        if self.negative is not None:
            more = self.negative.whitened.square().sum(-2)
            variance, share = variance + more, share - tau * more
            share = torch.where(tau < 0, 1 - tau * variance, share)
        return variance, share

    def _marginals_of_positive(self) -> tuple[Tensor, Tensor]:
        """Return v and 1 - tau v under V1: by diag(B1^-1) = 1 - tau v where tau v has digits, else by K - W1' W1."""
        prior = self.prior_covariance.diagonal(dim1=-2, dim2=-1)
        tau, prior = torch.broadcast_tensors(self.sites.precision.clamp_min(0), prior)
        if not bool((tau > 0).any()):
            return prior, torch.ones_like(prior)
        lost = tau * prior < _RELIABLE
        if not _most(lost):
            share = self._share_of_positive
            lost = lost | (1 - share < _RELIABLE)
        if _most(lost):
            variance = prior - self.whitened_positive.square().sum(-2)
            return self._with_sharp(variance, 1 - tau * variance)
        variance = (1 - share) / torch.where(lost, 1.0, tau)
        if self.negative is not None:  # it has those of its own
            index, there = self.negative.index, self.negative.variance
            variance = variance.scatter(-1, index, there)
            share = share.scatter(-1, index, 1 - tau.gather(-1, index) * there)
            lost = lost.scatter(-1, index, False)
        count = int(lost.sum(-1).max())
        if count:
            index = lost.to(tau).topk(count, -1).indices
            whitened = self.factor.whiten(take_columns(self.prior_covariance, index))
            exact = prior.gather(-1, index) - whitened.square().sum(-2)
            variance = variance.scatter(-1, index, exact)
            share = share.scatter(-1, index, 1 - tau.gather(-1, index) * exact)
        return variance, share

    @property
    def _share_of_positive(self) -> Tensor:
        """The diagonal of B1^-1 (..., N), from R1 = P B1^-1 P if that is known."""
        if self.negative is not None or "response" not in vars(self):
            return self.factor.inverse_diagonal
        tau = self.sites.precision
        return torch.where(tau > 0, self.response.diagonal(dim1=-2, dim2=-1) / tau, 1.0)

    def _with_sharp(self, variance: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """Return v and 1 - tau v with those of sharp sites by columns of L1^-1: next to a prior they have no digits."""
        tau, is_sharp = torch.broadcast_tensors(self.sites.precision, self._is_sharp)
        count = int(is_sharp.sum(-1).max())
        if not count:
            return variance, share
        index = torch.where(is_sharp, tau, 0.0).topk(count, -1).indices
        by_column = self.factor.inverse_diagonal_at(index)
        there = is_sharp.gather(-1, index)  # in a batch others may have fewer
        by_column = torch.where(there, by_column, share.gather(-1, index))
        sharp = (1 - by_column) / torch.where(there, tau.gather(-1, index), 1.0)
        sharp = torch.where(there, sharp, variance.gather(-1, index))
        return variance.scatter(-1, index, sharp), share.scatter(-1, index, by_column)

    @cached_property
    def covariance(self) -> Tensor:
        """The posterior covariance V (..., N, N)."""
        covariance = self._given_positive(self.prior_covariance, self.whitened_positive)
        # of the rows of two data, that of the sharper site has the digits of their covariance
        rank = self._sharpness.argsort(-1).argsort(-1)
        covariance = torch.where(rank.unsqueeze(-1) > rank.unsqueeze(-2), covariance, covariance.mT)
        if self.negative is not None:
            covariance = covariance + self.negative.whitened.mT @ self.negative.whitened
        return covariance

    def covariance_with(self, cross: Tensor, reduced: Tensor) -> Tensor:
        """Return the posterior covariance of the values and S others (..., N, S); arguments as of `covariance_of`."""
        covariance = self._given_positive(cross, reduced)
        if self.negative is not None:
            covariance = covariance + self.negative.whitened.mT @ self.negative.condition(cross, reduced)
        return covariance

    def _given_positive(self, cross: Tensor, reduced: Tensor) -> Tensor:
        """Return the covariance under V1 of the values and others (..., N, S), given the prior's and L1^-1 P cross.

        Where there is no positive site it is cross - W1' reduced.
        """
        given, positive = self.factor.given(reduced), self.factor.root > 0
        if bool(positive.all()):
            return given
        return torch.where(positive.unsqueeze(-1), given, cross - self.whitened_positive.mT @ reduced)

    @property
    def _is_sharp(self) -> Tensor:
        """Whether the precision of a site is above the prior's (..., N)."""
        return self._sharpness > 1

    @property
    def _sharpness(self) -> Tensor:
        """The precisions of the sites in those of the prior (..., N)."""
        return self.sites.precision * self.prior_covariance.diagonal(dim1=-2, dim2=-1)

    @property
    def log_det(self) -> Tensor:
        """log|I + K T| (...)."""
        log_det = self.factor.log_det
        if self.negative is not None:
            log_det = log_det + 2 * self.negative.chol.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return log_det

    @property
    def gradient(self) -> tuple[Tensor, Tensor]:
        """Derivatives of `log_normalizer` at fixed sites in the prior mean (..., N) and covariance (..., N, N).

        With a = K^-1 (m - mu): a, and (a a' - R) / 2, R the `response`.
        """
        weights = self.weights
        products = torch.addcmul(self.response, weights.unsqueeze(-1), weights.unsqueeze(-2), value=-1)
        return weights, products.mul_(-0.5)

    def prepare_gradient(self) -> None:
        """Find the response, which the gradient needs, before the marginal variances, which then take no more time."""
        _ = self.response

    @cached_property
    def response(self) -> Tensor:
        """R = (K + T^-1)^-1 (..., N, N), which is T - T V T: V = K - K R K.

        R1 = P B1^-1 P of the positive sites; the negative ones take R1 - S_:n Q_n B2^-1 Q_n S_:n', S = I - R1 K.
        """
        response = self.factor.response
        if self.negative is not None:
            reduced = self.negative.reduce(self.factor)
            response = response - reduced.mT @ reduced
        return response

    def predict(
        self, test_mean: Tensor, cross_covariance: Tensor, test_covariance: Tensor | LinearOperator
    ) -> MultivariateNormal:
        """Return the posterior at S new inputs, its covariance lazily; differentiable in the arguments.

        Args:
            test_mean: (..., S) prior mean there.
            cross_covariance: (..., N, S) prior covariance of the training and the new values.
            test_covariance: (..., S, S) prior covariance there.
        """
        dtype = test_mean.dtype
        cross = cross_covariance.double()
        mean = test_mean.double() + (cross.mT @ self.weights.unsqueeze(-1)).squeeze(-1)
        covariance = self.covariance_of(test_covariance, cross, self.factor.whiten(cross), dtype)
        return LatentNormal(mean.to(dtype), covariance)

    def covariance_of(
        self, prior_covariance: Tensor | LinearOperator, cross: Tensor, reduced: Tensor, dtype: torch.dtype
    ) -> LinearOperator:
        """Return the posterior covariance of S other values (..., S, S), lazily, from the prior's.

        Args:
            prior_covariance: theirs (..., S, S).
            cross: that of the values and them (..., N, S).
            reduced: L1^-1 P cross.
            dtype: of what is returned.
        """
        covariance = to_linear_operator(prior_covariance) + _gram(reduced, -1, dtype)
        if self.negative is not None:
            covariance = covariance + _gram(self.negative.condition(cross, reduced), 1, dtype)
        return covariance

    def covariance_times(self, vector: Tensor) -> Tensor:
        """Return V vector (..., N), in O(N^2)."""
        return times(self.prior_covariance, self.respond(vector))

    def respond(self, x: Tensor) -> Tensor:
        """Return (I + T K)^-1 x (..., N).

        (I + P^2 K)^-1 is both P B1^-1 P^-1 and I - P B1^-1 P K: the first loses no digits where sites are sharp, the
        second is needed where they are nothing.
        """
        if self.negative is not None:
            x = x + self.negative.respond(x)
        root, is_sharp = self.factor.root, self._is_sharp
        blunt = torch.where(is_sharp, 0.0, x)
        right = torch.where(is_sharp, x / torch.where(is_sharp, root, 1.0), 0.0)
        right = right - root * times(self.prior_covariance, blunt)
        return blunt + self.factor.solve(right)


def condition_dense(prior_mean: Tensor, prior_covariance: Tensor, sites: GaussianSites) -> DensePosterior:
    """Condition N(prior_mean, prior_covariance) on sites; differentiable in all of them.

    Args:
        prior_mean: mu (..., N).
        prior_covariance: K (..., N, N), symmetric positive semidefinite; may be singular.
        sites: (..., N), of any sign.

    Example:
        >>> import torch
        >>> from gpext.sites import GaussianSites
        >>> sites = GaussianSites(shift=torch.tensor([2.0]), precision=torch.tensor([1.0]))
        >>> posterior = condition_dense(torch.zeros(1), torch.eye(1), sites)
        >>> posterior.mean  # nu / (1 + tau)
        tensor([1.], dtype=torch.float64)
    """
    prior_mean, covariance, sites = prior_mean.double(), prior_covariance.double(), sites.to(torch.float64)
    factor, ok = PositiveFactor.of(covariance, sites.precision.clamp_min(0).sqrt())
    negative = None
    if bool((sites.precision < 0).any()):
        count = int((sites.precision <= 0).sum(-1).max())
        negative, second_ok = condition_on_negative(covariance, sites.precision, factor, count)
        ok = ok & second_ok
    return DensePosterior(prior_mean, covariance, sites, factor, negative, ok)


def _most(flags: Tensor) -> bool:
    return bool((flags.sum(-1) > 0.5 * flags.size(-1)).any())


def _gram(columns: Tensor, sign: int, dtype: torch.dtype) -> LinearOperator:
    """Return sign columns' columns."""
    columns = columns.to(dtype)
    return MatmulLinearOperator(sign * columns.mT, columns)
