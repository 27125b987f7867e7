r"""Lower bounds on E_q[log p(y | f)], q = N(m, v), for one or several independent latents [KMM12 Sec. 4].

A bound is an object without state; :meth:`Bound.bind` makes of it, of a likelihood and of targets the function of the
marginals that inference maximises. What the two have to know of each other is small:

    the likelihood says                              and these bounds can serve it
    expected_log_density(y, m, v)                    Quadrature: the expectation itself
    softplus_terms(y), a sum of softplus functions   PiecewiseQuadratic, Jaakkola, Bohning
    multinomial_terms(y), one log-sum-exp            LogSumExp, ProductOfSigmoids
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpext.bounds.contracts import HasSoftplusTerms

LocalBound = Callable[[Tensor, Tensor], Tensor]
"""Maps marginal means and variances, (..., N) or (..., D, N) for D latents, to a lower bound per datum (..., N)."""


@dataclass(frozen=True)
class SoftplusTerms:
    """log p(y | f) = constant + slope f - sum_j weight_j softplus(sign_j f + offset_j) for each datum.

    With D latents the terms of a latent stand in dimension -2, `slope` (..., D, N), and the sum goes over D as well.

    Example:
        >>> import torch
        >>> from gpext.likelihoods import BernoulliLogitLikelihood
        >>> terms = BernoulliLogitLikelihood().softplus_terms(torch.tensor([1.0]))
        >>> terms.slope.shape
        torch.Size([1])
    """

    constant: Tensor  # (..., N)
    slope: Tensor  # (..., N), or (..., D, N)
    weight: Tensor  # (J, ..., N), or (J, ..., D, N), nonnegative
    sign: Tensor  # like weight, each 1 or -1
    offset: Tensor  # like weight
    has_several_latents: bool = False

    def lower_bound(
        self, expected_softplus: Callable[[Tensor, Tensor], Tensor], mean: Tensor, variance: Tensor
    ) -> Tensor:
        """Return the bound per datum (..., N) from an upper bound on E[softplus(x)], x ~ N(m, v)."""
        lead = (1,) * (mean.dim() + 1 - self.sign.dim())  # a batch of marginals may share the targets
        weight, sign, offset = (
            t.reshape(t.shape[:1] + lead + t.shape[1:]) for t in (self.weight, self.sign, self.offset)
        )
        expected = expected_softplus(sign * mean + offset, variance.expand(mean.shape).expand_as(sign * mean))
        varying = self.slope * mean - (weight * expected).sum(0)
        return self.constant + (varying.sum(-2) if self.has_several_latents else varying)


@dataclass(frozen=True)
class MultinomialTerms:
    """log p(y | f) = constant + sum_k counts_k f_k - total log sum_k exp(f_k) for each datum.

    Example:
        >>> import torch
        >>> counts = torch.tensor([[2.0], [1.0]])
        >>> terms = MultinomialTerms(constant=torch.log(torch.tensor([3.0])), counts=counts, total=counts.sum(0))
        >>> f = torch.zeros(2, 1)
        >>> log_p = terms.constant + (terms.counts * f).sum(0) - terms.total * f.logsumexp(0)
        >>> log_p.exp()  # 3 of the 8 outcomes
        tensor([0.3750])
    """

    constant: Tensor  # (..., N)
    counts: Tensor  # (..., K, N)
    total: Tensor  # (..., N)

    @classmethod
    def of_counts(cls, counts: Tensor) -> MultinomialTerms:
        """Return the terms of counts (..., K, N), the multinomial coefficient in the constant."""
        total = counts.sum(-2)
        return cls(torch.lgamma(total + 1) - torch.lgamma(counts + 1).sum(-2), counts, total)

    def log_prob(self, f: Tensor, log_sum_exp: Tensor) -> Tensor:
        """Return the line above (..., N) from f (..., K, N), or its mean, and log sum exp, or what bounds its mean."""
        return self.constant + (self.counts * f).sum(-2) - self.total * log_sum_exp


class Bound(ABC):
    """A family of lower bounds on E_q[log p(y | f)].

    Example:
        >>> from gpext.bounds import Jaakkola, Quadrature
        >>> isinstance(Jaakkola(), Bound), isinstance(Quadrature(), Bound)
        (True, True)
    """

    def __repr__(self) -> str:
        return type(self).__name__

    @abstractmethod
    def bind(self, likelihood: Any, targets: Tensor) -> LocalBound:
        """Return the bound as a function of the marginals, differentiable in them and in the likelihood's parameters.

        Args:
            likelihood: p(y | f).
            targets: (..., N), or what the likelihood takes.

        Raises:
            TypeError: the bound does not apply to the likelihood.
            ValueError: bad targets.
        """


class SoftplusBound(Bound):
    """A bound made of an upper bound on E[log(1 + e^x)], x ~ N(m, v): for every likelihood that is a sum of these.

    Example:
        >>> from gpext.bounds import Jaakkola, PiecewiseQuadratic
        >>> isinstance(PiecewiseQuadratic(), SoftplusBound), isinstance(Jaakkola(), SoftplusBound)
        (True, True)
    """

    @abstractmethod
    def expected_softplus(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return an upper bound on E[log(1 + e^x)] under N(mean, variance), elementwise and differentiable."""

    def bind(self, likelihood: Any, targets: Tensor) -> LocalBound:
        """Return the bound as a function of the marginals, as :meth:`Bound.bind`."""
        if not isinstance(likelihood, HasSoftplusTerms):
            raise TypeError(
                f"{type(self).__name__} bounds log(1 + e^f) and serves the Bernoulli-logit, ordinal-logit and "
                f"stick-breaking likelihoods; for {type(likelihood).__qualname__} use gpext.bounds.Quadrature()."
            )
        terms = likelihood.softplus_terms(targets)
        return lambda mean, variance: terms.lower_bound(self.expected_softplus, mean, variance)

    def __call__(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return the lower bound on E[log p(y | f)] of the Bernoulli-logit likelihood, targets in {0, 1}, (..., N)."""
        return targets * mean - self.expected_softplus(*torch.broadcast_tensors(mean, variance))
