r"""Preferences: which of two inputs a and b was preferred, by noise on the utility f of each.

    p(a preferred to b | f) = P(f_a + e_a > f_b + e_b) = G(h),   h = f_a - f_b

    e normal of unit variance:   G(h) = Phi(h / sqrt 2)           Thurstone's case V [Chu & Ghahramani 2005]
    e of a standard Gumbel law:  G(h) = 1 / (1 + exp(-h))         [Bradley & Terry 1952]

The scale of the noise is fixed: only its ratio to that of f has an effect, and the kernel's outputscale is that ratio.
Utilities are known up to a constant, so the mean of the prior has no effect either.
"""

from __future__ import annotations

import math
from typing import Any

from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from gpext.checks import show_index
from gpext.designs import pairs
from gpext.distributions import Bernoulli, LatentNormal
from gpext.likelihoods.bernoulli_logit import BernoulliLogitLikelihood
from gpext.likelihoods.checks import check_binary, floating
from gpext.likelihoods.latent import LatentLikelihood
from gpext.special import log_ndtr


class PairwiseLikelihood(LatentLikelihood):
    """Checks of outcomes, and probabilities of new comparisons, that the links share.

    A target is 1 where the first input of its pair was preferred and 0 where the second was; the latent value of datum
    i is h_i = f_a - f_b, which `gpext.designs.pairs` makes of f.
    """

    def check_support(self, targets: Tensor) -> None:
        """Raise ValueError if a target is neither 0 nor 1.

        A draw is an outcome of its own: ordinal likelihoods of three classes serve it under the same design.
        """
        draws = (targets == 0.5).nonzero()
        if len(draws):
            raise ValueError(
                "targets must be 1 where the first input of a pair was preferred and 0 where the second was; got 0.5 "
                f"at index {show_index(tuple(draws[0].tolist()))}. If that is a draw take OrdinalLogitLikelihood(3) or "
                "OrdinalProbitLikelihood(3) with the same design: classes 0 (second), 1 (draw) and 2 (first)."
            )
        check_binary(targets)

    def win_probability(self, function_dist: MultivariateNormal, index: Tensor | None = None) -> Tensor:
        r"""Return :math:`\int G(f_a - f_b) q(f) df`, the probability that a is preferred to b, with their correlation.

        Args:
            function_dist: the joint distribution of f at P inputs, as `model(x)` returns it in eval mode.
            index: pairs (a, b) of these inputs (S, 2); all of them by default.

        Returns:
            (..., S), or a matrix (..., P, P) of all pairs, with 1/2 on its diagonal.

        Raises:
            TypeError: something else than a distribution of one latent function, or an index that is not whole.
            ValueError: an index out of range, or an input compared with itself.
        """
        if not isinstance(function_dist, MultivariateNormal) or isinstance(function_dist, MultitaskMultivariateNormal):
            raise TypeError(
                "expected the joint distribution of one latent function at the inputs compared, as a model returns it; "
                f"got {type(function_dist).__qualname__}."
            )
        mean, covariance = function_dist.mean, function_dist.lazy_covariance_matrix.to_dense()
        if index is None:
            own = covariance.diagonal(dim1=-2, dim2=-1)
            difference = mean.unsqueeze(-1) - mean.unsqueeze(-2)
            variance = own.unsqueeze(-1) + own.unsqueeze(-2) - 2 * covariance
        else:
            design = pairs(index, mean.size(-1))
            difference, variance = design.times(mean), design.row_variances(covariance)
        variance = variance.clamp_min(0)  # by rounding alone, where a and b are nearly the same input
        return self.marginal(LatentNormal(difference, DiagLinearOperator(variance))).mean


class PairwiseLogitLikelihood(PairwiseLikelihood, BernoulliLogitLikelihood):
    r""":math:`p(a \succ b | f) = 1 / (1 + e^{-(f_a - f_b)})`, the Bradley-Terry model; no parameters.

    The logit of :class:`BernoulliLogitLikelihood`, with its augmentation, for h = f_a - f_b: it is used with a
    `LatentGP(..., design=gpext.designs.pairs(index, P))`, or with `gpext.fit(..., design=...)`.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> f = MultivariateNormal(torch.tensor([1.0, 0.0]), torch.eye(2))
        >>> PairwiseLogitLikelihood().win_probability(f, torch.tensor([[0, 1], [1, 0]]))
        tensor([0.6751, 0.3249])
    """


class PairwiseProbitLikelihood(PairwiseLikelihood):
    r""":math:`p(a \succ b | f) = \Phi((f_a - f_b) / \sqrt 2)`: unit normal noise on each utility; no parameters.

    It is used with a `LatentGP(..., design=gpext.designs.pairs(index, P))`, or with `gpext.fit(..., design=...)`. The
    predictive probability is in closed form, :math:`\Phi(m / \sqrt{2 + v})` for a difference N(m, v). The convention is
    that of [Chu & Ghahramani 2005] with sigma = 1 and of BoTorch's `PairwiseProbitLikelihood`.

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> f = MultivariateNormal(torch.tensor([1.0, 0.0]), torch.eye(2))
        >>> PairwiseProbitLikelihood().win_probability(f)
        tensor([[0.5000, 0.6915],
                [0.3085, 0.5000]])
    """

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log p(targets | f) (..., N), for targets in the support."""
        return log_ndtr(math.sqrt(0.5) * _sign(targets) * f)

    def log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return log int p(y | f) N(f | mean, variance) df, elementwise, in closed form.

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        return log_ndtr(_sign(targets) * mean * (2 + variance).rsqrt())

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Bernoulli:
        """Return p(y | f)."""
        return _probit(math.sqrt(0.5) * function_samples)

    def marginal(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> Bernoulli:
        """Return the Bernoulli distribution of y at the marginals of function_dist; both tails keep full precision."""
        return _probit(function_dist.mean * (2 + function_dist.variance).rsqrt())


def _sign(targets: Tensor) -> Tensor:
    return 2 * floating(targets) - 1


def _probit(score: Tensor) -> Bernoulli:
    return Bernoulli(logits=log_ndtr(score) - log_ndtr(-score))
