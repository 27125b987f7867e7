"""A rule of inference, from its options to its result: what all rules begin with stands here once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from gpext.inference.problem import Problem
from gpext.inference.result import InferenceResult
from gpext.threads import factor_flops, threads_for


class Rule(ABC):
    """Turns a Gaussian prior, a likelihood and targets into a Gaussian posterior at sites.

    Subclasses are frozen dataclasses of their options, and implement :meth:`_solve`.

    Example:
        >>> from gpext.inference import EP, KL, Laplace
        >>> all(isinstance(each, Rule) for each in (KL(), EP(), Laplace()))
        True
    """

    jitter: float

    def infer(
        self, prior: MultivariateNormal, likelihood: Any, targets: Tensor, *, start: Any = None
    ) -> InferenceResult:
        """Return the posterior, its sites and the log evidence, or the approximation or bound that the rule gives.

        Args:
            prior: p(f) at the training inputs, (..., N), or (..., D, N) for a likelihood of D latents.
            likelihood: one that the rule serves, see its class.
            targets: (..., N), or what the likelihood takes.
            start: where to start: the sites of an earlier result for these data; see the class.

        Raises:
            TypeError: a likelihood that the rule cannot serve, naming the rules that can; or half precision.
            ValueError: bad targets, shapes that do not fit, or a prior that is not finite.
        """
        if not isinstance(prior, MultivariateNormal):
            raise TypeError(f"expected a prior of f, a gpytorch MultivariateNormal; got {type(prior).__name__}.")
        self._require(likelihood)
        size = prior.loc.size(-1)
        # Small matrices gain nothing from threads. A prior of low rank counts as if it were dense.
        with threads_for(factor_flops(size, number=prior.loc.numel() // max(size, 1))):
            return self._solve(Problem.of(prior, likelihood, targets, self.jitter), start)

    def _require(self, likelihood: Any) -> None:  # noqa: B027 - most rules serve all that pass the other checks
        """Raise TypeError unless the rule can serve the likelihood."""

    @abstractmethod
    def _solve(self, problem: Problem, start: Any) -> InferenceResult:
        """Return the result for data that have been checked."""
