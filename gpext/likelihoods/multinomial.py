r"""The multinomial likelihood with logit (softmax) link: K latent functions, one class or several trials a datum.

    p(y | f) = n! / (y_1! ... y_K!)  prod_k e^{y_k f_k} / (sum_k e^{f_k})^n

The integrals over independent Gaussian latents are exact: `gpext.quadrature.expected_log_sum_exp` and its neighbours.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal, base_distributions
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.functional import one_hot, pad

from gpext.bounds import MultinomialTerms
from gpext.checks import whole_number
from gpext.distributions import Categorical, CompoundCategorical, CompoundMultinomial
from gpext.likelihoods.checks import check_classes, check_counts, floating_like
from gpext.likelihoods.curvature import Curvature, independent_variance
from gpext.likelihoods.joint import JointLikelihood, correlated_blocks
from gpext.quadrature import (
    SecondOrder,
    expected_log_sum_exp,
    expected_softmax,
    in_parts,
    joint_expectation,
    log_joint_expectation,
    log_multinomial_density,
)

_SMALL = 0.1  # for a probability with an error of 1e-11 to have a logarithm to 1e-10


class MultinomialLogitLikelihood(JointLikelihood):
    """Unordered classes, :math:`p(y=k|f) = e^{f_k} / sum_j e^{f_j}`, or the counts of several trials.

    Args:
        num_classes: K, the number of classes and of latent functions, at least 2.
        total_count: trials a datum. With 1, targets are class labels 0, ..., K - 1 (..., N); with more, counts
            (..., N, K) whose rows sum to it; with None, counts of any totals.
        tolerance: absolute error of expected log densities a trial, as in `gpext.quadrature.expected_log_sum_exp`:
            with 1e-7 variational training takes less time. Predictions are not affected.

    Raises:
        TypeError: a total_count that is no whole number.
        ValueError: fewer than two classes, a total_count below 1, or a tolerance that is not positive.

    Example:
        >>> import torch
        >>> f = torch.tensor([[1.0], [0.0], [0.0]])  # three latent functions of one datum
        >>> MultinomialLogitLikelihood(3).log_prob(torch.tensor([0]), f).exp()
        tensor([0.5761])
    """

    def __init__(self, num_classes: int, total_count: int | None = 1, *, tolerance: float = 1e-11) -> None:
        super().__init__()
        num_classes = whole_number("num_classes", num_classes, 2)
        self.num_classes = self.num_latents = num_classes
        self.total_count = None if total_count is None else _one_number(total_count)
        if not tolerance > 0:
            raise ValueError(f"tolerance must be positive; got {tolerance}.")
        self.tolerance = tolerance

    def check_support(self, targets: Tensor) -> None:
        """Raise ValueError if a target is outside the support."""
        if self.total_count == 1:
            check_classes(targets, self.num_classes)
            return
        if targets.dim() < 2 or targets.size(-1) != self.num_classes:
            raise ValueError(
                f"targets must be counts of shape (..., N, {self.num_classes}); got shape {tuple(targets.shape)}. "
                "Class labels go with total_count=1."
            )
        check_counts(targets)
        totals = targets.sum(-1)
        if self.total_count is not None and bool((totals != self.total_count).any()):
            index = tuple((totals != self.total_count).nonzero()[0].tolist())
            raise ValueError(
                f"the counts of each datum must sum to total_count={self.total_count}; got {totals[index].item():g} "
                f"at index {index[0] if len(index) == 1 else index}. With total_count=None the totals may vary."
            )

    @property
    def target_numbers(self) -> int:
        """The number of numbers in the target of a datum: its class, or the counts of all."""
        return 1 if self.total_count == 1 else self.num_classes

    def datum_shape(self, targets: Tensor) -> torch.Size:
        """Return (..., N): labels have it, counts another dimension of size K."""
        return targets.shape if self.total_count == 1 else targets.shape[:-1]

    def _terms(self, targets: Tensor, dtype: torch.dtype = torch.float64) -> MultinomialTerms:
        by_class = one_hot(targets.long(), self.num_classes) if self.total_count == 1 else targets
        return MultinomialTerms.of_counts(by_class.to(dtype).mT)

    def multinomial_terms(self, targets: Tensor) -> MultinomialTerms:
        """Return log p(y | f) as a constant, the counts (..., K, N) and the totals, one log-sum-exp a trial, float64.

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        return self._terms(targets)

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log p(targets | f) (..., N), for targets in the support."""
        terms, latent = self._terms(targets), f.double()  # large terms leave a small sum
        return terms.log_prob(latent, latent.logsumexp(-2)).to(floating_like(targets, f).dtype)

    def curvature(self, targets: Tensor, f: Tensor) -> Curvature:
        """Return log p(y | f) to second order at f (..., K, N): u = y - n pi, U = n (diag pi - pi pi') [Cha13 Eq. 35].

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        terms = self._terms(targets, floating_like(targets, f).dtype)
        probs, counts = f.softmax(-2), terms.counts.expand_as(f)
        totals = counts.sum(-2)
        precision = totals.unsqueeze(-2) * probs
        return Curvature(self.unchecked_log_prob(targets, f), counts - precision, precision, -totals, probs, precision)

    def expected_log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return E[log p(y | f)] (..., N) under independent N(mean, variance), (..., K, N), to the tolerance.

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        terms, m, v = self._terms(targets), mean.double(), variance.double()
        return terms.log_prob(m, expected_log_sum_exp(m, v, tolerance=self.tolerance)).to(
            floating_like(targets, mean).dtype
        )

    def log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return log int p(y | f) N(f | mean, variance) df (..., N), to 1e-10 however small the probability.

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        counts, m, v = self._terms(targets).counts, mean.double(), variance.double()
        follows = torch.is_grad_enabled() and (mean.requires_grad or variance.requires_grad)
        one_of_known = self.total_count == 1 and not follows
        value = _log_probability(counts, m, v) if one_of_known else log_multinomial_density(counts, m, v)
        return value.to(floating_like(targets, mean).dtype)

    def joint_log_density(self, targets: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
        """Return log int p(y | f) N(f | mean, covariance) df (..., N): K - 1 integrals, over differences of latents.

        Uncorrelated latents are a sum of one-dimensional integrals.

        Raises:
            TypeError, ValueError: as :meth:`JointLikelihood.joint_log_density`.
        """
        variance = independent_variance(covariance)
        if variance is not None:
            return self.log_density(targets, mean, variance)
        self.check(targets)

        def integral(m: Tensor, V: Tensor, y: Tensor) -> Tensor:
            def expand(differences: Tensor) -> SecondOrder:
                at = self._second_order(y, pad(differences, (0, 0, 0, 1)))
                return SecondOrder(at.value, at.gradient[..., :-1, :], at.precision[..., :-1, :-1, :])

            return log_joint_expectation(lambda f: self.unchecked_log_prob(y, pad(f, (0, 0, 0, 1))), expand, m, V)

        return self._in_parts(integral, targets, *_contrasts(mean, covariance))

    def joint_expected_log_density(self, targets: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
        """Return E[log p(y | f)] under N(mean, covariance), (..., N); arguments as :meth:`joint_log_density`.

        Raises:
            TypeError, ValueError: as :meth:`JointLikelihood.joint_log_density`.
        """
        self.check(targets)

        def integral(m: Tensor, V: Tensor, y: Tensor) -> Tensor:
            return joint_expectation(lambda f: self.unchecked_log_prob(y, pad(f, (0, 0, 0, 1))), m, V)

        return self._in_parts(integral, targets, *_contrasts(mean, covariance))

    def class_probs(self, function_dist: MultivariateNormal) -> Tensor:
        """Return the probabilities of the classes in one trial, (..., N, K), at the marginals of function_dist."""
        mean, variance = self._marginals(function_dist)
        covariance = correlated_blocks(function_dist)
        if covariance is None:
            return expected_softmax(mean, variance).mT
        softmax = partial(joint_expectation, lambda f: pad(f, (0, 0, 0, 1)).softmax(-2))
        return in_parts(softmax, *_contrasts(mean, covariance)).mT

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Distribution:
        """Return p(y | f) for f (..., K, N): a Categorical, or for several trials a Multinomial distribution.

        Raises:
            NotImplementedError: the totals vary.
        """
        logits = function_samples.mT
        if self.total_count == 1:
            return Categorical(logits=logits)
        if self.total_count is None:
            raise NotImplementedError(
                "with total_count=None p(y | f) is no single distribution: log_prob(targets, f) has its values, "
                "softmax(f, -2) its class probabilities."
            )
        return base_distributions.Multinomial(self.total_count, logits=logits)

    def marginal(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> Distribution:
        """Return p(y): a :class:`gpext.distributions.CompoundCategorical`, its probabilities to 1e-11.

        Of several trials it is a :class:`gpext.distributions.CompoundMultinomial`.

        Raises:
            NotImplementedError: the totals vary.
        """
        if self.total_count == 1:
            probs = self.class_probs(function_dist)
            return CompoundCategorical(probs, *self._blocks(function_dist), self.joint_log_density)
        if self.total_count is None:
            raise NotImplementedError(
                "with total_count=None p(y) is no single distribution: log_marginal(targets, function_dist) has its "
                "log probabilities, class_probs(function_dist) its mean in one trial."
            )
        of_any_total = MultinomialLogitLikelihood(self.num_classes, total_count=None)
        return CompoundMultinomial(self.total_count, *self._blocks(function_dist), of_any_total.joint_log_density)


def _log_probability(counts: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return the log density (..., N) of one trial: by E[softmax] in a twentieth of the time, where it has the digits.

    Args:
        counts: one for the class, zero for the others (..., K, N).
        mean: (..., K, N).
        variance: (..., K, N).
    """
    counts, mean, variance = torch.broadcast_tensors(counts, mean, variance)
    probability = (counts * expected_softmax(mean, variance)).sum(-2)
    value, is_small = probability.log(), probability < _SMALL
    if bool(is_small.any()):
        value[is_small] = log_multinomial_density(*(t.mT[is_small].mT for t in (counts, mean, variance)))
    return value


def _one_number(total_count: Any) -> int:
    remedy = "With total_count=None every datum has its own total, the sum of its counts."
    return whole_number("total_count", total_count, 1, remedy=remedy)


def _contrasts(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean (..., K - 1, N) and covariance (..., K - 1, K - 1, N) of f_k - f_K, which determine a softmax."""
    across = covariance[..., :-1, :, :] - covariance[..., -1:, :, :]
    return mean[..., :-1, :] - mean[..., -1:, :], across[..., :-1, :] - across[..., -1:, :]
