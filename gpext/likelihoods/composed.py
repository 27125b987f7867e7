"""The base of likelihoods that are made of other ones, and of those that hold a number for each datum.

A number for each datum, such as a weight, becomes a further number of its target: targets (..., N) become (..., N, 2).
So it comes along wherever targets are indexed, shuffled or moved to a device. It may be given to the likelihood once
(`Weighted(likelihood, weights)`, targets (N,)), or with the targets (`Weighted(likelihood)`, targets (N, 2)).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from torch import Tensor
from torch.distributions import Distribution

from gpext.bounds import conditional_log_prob, num_latents
from gpext.bounds.contracts import HasExpansionPoint
from gpext.checks import check_finite, check_tensor
from gpext.likelihoods.checks import check_targets, floating
from gpext.likelihoods.latent import LatentLikelihood
from gpext.quadrature import expectation, log_expectation


@dataclass(frozen=True)
class Observed:
    """Data that one likelihood has observed: what their targets are to it, at which means of f."""

    index: Tensor  # of the data
    likelihood: Any
    targets: Tensor  # (..., n), or what the likelihood takes
    mean: Tensor  # (..., n)


class ComposedLikelihood(LatentLikelihood):
    """A likelihood of one latent that is made of one other or several, each of gpext or gpytorch, of one latent.

    Example:
        >>> from gpext.likelihoods import PoissonLikelihood, ZeroInflated
        >>> isinstance(ZeroInflated(PoissonLikelihood()), ComposedLikelihood)
        True
    """

    def pyro_model(self, function_dist: Any, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Draw f and observe the targets in a Pyro model, by their log density: a target may be several numbers."""
        import pyro

        with self._plates(function_dist):
            log_prob = self.log_prob(target, self._sample_latents(function_dist))
            pyro.factor(f"{self.name_prefix}.y", log_prob)
        return target

    @abstractmethod
    def observed(self, targets: Tensor, mean: Tensor) -> list[Observed]:
        """Return the data that are values of a likelihood inside: for tail probabilities, and for floors of noise."""


class WrappedLikelihood(ComposedLikelihood):
    """A likelihood of one latent that is made of another one.

    Args:
        likelihood: of gpext or gpytorch, of one latent.

    Raises:
        TypeError: something else; or one whose targets are several numbers and that does not say how many.
    """

    def __init__(self, likelihood: Likelihood) -> None:
        super().__init__()
        self._inner_numbers = inner_numbers(type(self).__name__, likelihood)
        self.likelihood = likelihood

    @property
    def target_numbers(self) -> int | None:
        """The number of numbers in the target of a datum: as many as the likelihood inside takes."""
        return self._inner_numbers

    def datum_shape(self, targets: Tensor) -> torch.Size:
        """Return the shape of the data (..., N)."""
        return inner_shape(self.likelihood, targets)

    def check(self, targets: Tensor) -> None:
        """Raise unless the targets are allowed for the likelihood inside, and in the support.

        Raises:
            TypeError, ValueError: as the likelihood inside; a target outside the support.
        """
        check_inner(self.likelihood, targets)
        self.check_support(targets)

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Distribution:
        """Return p(y | f)."""
        return self.likelihood.forward(function_samples, *args, **kwargs)

    def marginal(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> Distribution:
        """Return p(y) at the marginals of function_dist, as the likelihood inside."""
        return self.likelihood.marginal(function_dist, *args, **kwargs)

    def knots(self, targets: Tensor) -> Tensor | None:
        """Return those of the likelihood inside."""
        return inner_knots(self.likelihood, targets)

    def expansion_point(self, targets: Tensor) -> Tensor:
        """Return where Taylor expands: where it does for the likelihood inside."""
        return inner_point(self.likelihood, targets)

    def observed(self, targets: Tensor, mean: Tensor) -> list[Observed]:
        """Return all data as those of the likelihood inside."""
        return [Observed(all_of(mean), self.likelihood, targets, mean)]


class ArgumentLikelihood(WrappedLikelihood):
    """A wrapped likelihood with one more number for each datum.

    Args:
        likelihood: of gpext or gpytorch, of one latent.
        argument: (N,), or None if targets have it as their last number.

    Raises:
        TypeError: as the base.
        ValueError: the argument is no finite vector.
    """

    argument: Tensor | None
    argument_name = "argument"
    argument_remedy = ""

    def __init__(self, likelihood: Likelihood, argument: Tensor | None) -> None:
        super().__init__(likelihood)
        if argument is not None:
            check_tensor(self.argument_name, argument)
            check_finite(self.argument_name, argument, remedy=self.argument_remedy)
            if argument.dim() != 1:
                raise ValueError(
                    f"{self.argument_name} must be a vector (N,), one of each datum; got shape {tuple(argument.shape)}."
                )
            self.check_argument(argument)
            argument = argument.detach().clone()
        # Data are no part of a state dict.
        self.register_buffer("argument", argument, persistent=False)

    def check_argument(self, argument: Tensor) -> None:
        """Raise ValueError if a number of a datum, known to be finite, is not allowed; to override."""

    @property
    def target_numbers(self) -> int:
        """One more than the likelihood inside has."""
        return self._inner_numbers + 1

    def _is_joined(self, targets: Tensor) -> bool:
        return targets.dim() > 1 and targets.size(-1) == self.target_numbers

    def datum_shape(self, targets: Tensor) -> torch.Size:
        """Return the shape of the data (..., N)."""
        return targets.shape[:-1] if self._is_joined(targets) else inner_shape(self.likelihood, targets)

    def join(self, targets: Tensor) -> Tensor:
        """Return targets (..., N, k + 1) from those of the likelihood inside, (..., N) or (..., N, k).

        Raises:
            ValueError: there is no number for each of them.
        """
        if self._is_joined(targets):
            return targets
        name, data = self.argument_name, self.datum_shape(targets)
        if self.argument is None:
            raise ValueError(
                f"expected targets (..., N, {self.target_numbers}) whose last number is that of the {name}, as "
                f"{type(self).__name__} was made without; got shape {tuple(targets.shape)}."
            )
        if data[-1:] != self.argument.shape:
            raise ValueError(
                f"{type(self).__name__} holds {name} of {len(self.argument)} data, and there are targets of shape "
                f"{tuple(targets.shape)}. For a part of the data take likelihood.take(targets, index) of all, or put "
                f"the {name} beside the targets: {type(self).__name__}(likelihood) with targets "
                f"(..., N, {self.target_numbers})."
            )
        rows = self.likelihood.join(targets) if isinstance(self.likelihood, LatentLikelihood) else targets
        dtype = rows.dtype if rows.is_floating_point() else torch.float64  # float32 would round large counts
        rows = rows.to(torch.promote_types(dtype, self.argument.dtype))
        rows = rows.unsqueeze(-1) if self._inner_numbers == 1 else rows
        return torch.cat([rows, self.argument.to(rows).expand(data).unsqueeze(-1)], -1)

    def parts(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the targets of the likelihood inside and the argument (..., N)."""
        joined = self.join(targets)
        inner = joined[..., :-1]
        return inner.squeeze(-1) if self._inner_numbers == 1 else inner, joined[..., -1]

    def take(self, targets: Tensor, index: Tensor | slice) -> Tensor:
        """Return the targets of the data at `index`, the argument with them: (..., n, k + 1)."""
        return self.join(targets)[..., index, :]

    def check(self, targets: Tensor) -> None:
        """Raise unless the targets and the argument are finite and allowed.

        Raises:
            TypeError, ValueError: as the likelihood inside; the argument is not allowed.
        """
        inner, argument = self.parts(targets)
        check_inner(self.likelihood, inner)
        check_finite(self.argument_name, argument, remedy=self.argument_remedy)
        self.check_argument(argument)


def values_of(likelihood: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of the data (N,) that are values of the predicted variable, and these values."""
    if not isinstance(likelihood, ComposedLikelihood):
        return torch.arange(len(targets), device=targets.device), targets
    parts = likelihood.observed(targets, floating(targets).new_zeros(likelihood.datum_shape(targets)))
    found = [(part.index, *values_of(part.likelihood, part.targets)) for part in parts]
    if not found:
        return (torch.arange(len(targets), device=targets.device), targets) if targets.dim() == 1 else _none(targets)
    return torch.cat([index[inner] for index, inner, _ in found]), torch.cat([values for *_, values in found])


def _none(targets: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros(0, dtype=torch.long, device=targets.device), floating(targets).new_zeros(0)


def inner_numbers(name: str, likelihood: Any, *, several_latents: bool = False) -> int:
    """Return how many numbers a target of a likelihood to be wrapped is, which may have `several_latents` or not.

    Raises:
        TypeError: it cannot be wrapped.
    """
    if not isinstance(likelihood, Likelihood):
        raise TypeError(f"{name} takes a likelihood of gpext or gpytorch; got {likelihood!r}.")
    if num_latents(likelihood) is not None and not several_latents:
        raise TypeError(
            f"{name} takes a likelihood of one latent function; {type(likelihood).__qualname__} has "
            f"{num_latents(likelihood)}."
        )
    if not isinstance(likelihood, LatentLikelihood):
        return 1
    if likelihood.target_numbers is None:
        raise TypeError(
            f"the targets of {type(likelihood).__qualname__} are several numbers: say how many by a property "
            "target_numbers, so that others can be put behind them."
        )
    return likelihood.target_numbers


def require_one_number(likelihood: WrappedLikelihood) -> None:
    """Raise TypeError if the targets of the likelihood inside are several numbers."""
    if likelihood._inner_numbers != 1:
        inside, name = type(likelihood.likelihood).__name__, type(likelihood).__name__
        raise TypeError(
            f"{name} takes a likelihood whose target is one number; that of {inside} is {likelihood._inner_numbers}. "
            f"Put it inside: {inside}({name}(...))."
        )


def check_inner(likelihood: Any, targets: Tensor) -> None:
    """Raise unless targets are allowed for a likelihood of gpext or gpytorch."""
    if isinstance(likelihood, LatentLikelihood):
        likelihood.check(targets)
    else:
        check_targets(targets)


def inner_shape(likelihood: Any, targets: Tensor) -> torch.Size:
    """Return the shape of the data (..., N) of a likelihood inside."""
    return likelihood.datum_shape(targets) if isinstance(likelihood, LatentLikelihood) else targets.shape


def inner_log_prob(likelihood: Any, targets: Tensor, f: Tensor) -> Tensor:
    """Return log p(targets | f) (..., N) of a likelihood inside, for targets that have been checked."""
    if isinstance(likelihood, LatentLikelihood):
        return likelihood.unchecked_log_prob(targets, f)
    return conditional_log_prob(likelihood, targets, f)


def inner_expected(likelihood: Any, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return E[log p(y | f)] under N(mean, variance) of a likelihood inside."""
    if isinstance(likelihood, LatentLikelihood):
        return likelihood.expected_log_density(targets, mean, variance)
    return expectation(lambda f: conditional_log_prob(likelihood, targets, f), mean, variance)


def inner_density(likelihood: Any, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return log E[p(y | f)] under N(mean, variance) of a likelihood inside."""
    if isinstance(likelihood, LatentLikelihood):
        return likelihood.log_density(targets, mean, variance)
    return log_expectation(lambda f: conditional_log_prob(likelihood, targets, f), mean, variance)


def inner_knots(likelihood: Any, targets: Tensor) -> Tensor | None:
    """Return latent values (J, ..., N) about which p(y | f) of a likelihood inside may be narrow, or None."""
    return likelihood.knots(targets) if isinstance(likelihood, LatentLikelihood) else None


def inner_point(likelihood: Any, targets: Tensor) -> Tensor:
    """Return where Taylor expands a likelihood inside, for targets that are one number: 0 unless it says."""
    if isinstance(likelihood, HasExpansionPoint):
        return likelihood.expansion_point(targets)
    return floating(targets).new_zeros(inner_shape(likelihood, targets))


def all_of(mean: Tensor) -> Tensor:
    """Return the index of all data (N,)."""
    return torch.arange(mean.size(-1), device=mean.device)
