r"""The numbers of a map: mean and standard deviation of u at each input, and P(u > t); u is f, g(f), or y.

    E[g(f)] = int g(f) N(f | m, v) df,    P(g(f) > t) = Phi((m - r) / sqrt(v)),    r = sup{f: g(f) <= t},  g increasing

A decreasing g is the increasing u -> g(-u) of u ~ N(-m, v).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeAlias

import torch
from gpytorch.likelihoods import Likelihood
from torch import Tensor
from torch.distributions import Categorical, Distribution, MultivariateNormal

from gpext.distributions.circular.distribution import CircularDistribution
from gpext.distributions.tails import is_count
from gpext.distributions.with_cdf import with_cdf
from gpext.plots.style import check_one_number
from gpext.progress import Progress
from gpext.quadrature import expectation
from gpext.special import log_ndtr

Function = Callable[[Tensor], Tensor]
Quantity: TypeAlias = Likelihood | Function | None

_ROWS = 2000  # inputs predicted at a time
_REACH = 40.0  # standard deviations beyond which f has no probability
_NODES = 257  # at which g must be monotone
_BISECTIONS = 80


@torch.no_grad()
def numbers_of_model(
    model: torch.nn.Module, inputs: Tensor, kinds: Collection[str], of: Quantity, threshold: float, *, progress: bool
) -> dict[str, Tensor]:
    """Return the numbers of each kind (S,) at inputs (S, d), predicted some thousands at a time, on the CPU.

    The bar begins when the first input has been predicted, with which a model may infer its posterior: every further
    part takes as long as the one before, and the remaining time is in proportion.
    """
    numbers_of(model(inputs[:1]), kinds, of, threshold)
    parts = []
    with Progress("map", len(inputs), shown=progress) as bar:
        for part in inputs.split(_ROWS):
            parts.append(numbers_of(model(part), kinds, of, threshold))
            bar.update(len(part))
    return {kind: torch.cat([part[kind] for part in parts]) for kind in kinds}


@torch.no_grad()
def numbers_of(distribution: Distribution, kinds: Collection[str], of: Quantity, threshold: float) -> dict[str, Tensor]:
    """Return the numbers of each kind (S,) of a distribution of S values, or of what `of` makes of it, on the CPU.

    Args:
        distribution: of S values.
        kinds: some of "mean", "sd" and "exceedance".
        of: None for the distribution itself; a likelihood for its data, given this distribution of f; or g for g(f).
        threshold: t.

    Raises:
        TypeError: not one number an input, a distribution that is no normal one for `g`, or tails that are not known.
        ValueError: a mean or standard deviation that is not finite, or a `g` that is neither increasing nor decreasing.
    """
    if isinstance(of, Likelihood):
        distribution, of = of(distribution), None
    check_one_number(distribution)
    if isinstance(distribution, Categorical | CircularDistribution):
        name = type(distribution).__name__
        raise TypeError(f"a {name} has no mean on a line; draw plots.class_map of classes, plots.headings of angles.")
    if of is None:
        found = _of_distribution(distribution, kinds, threshold)
    elif isinstance(distribution, MultivariateNormal):
        mean, variance = distribution.mean.double(), distribution.variance.double()
        found = _of_function(of, mean, variance, kinds, threshold)
    else:
        raise TypeError(f"a function of f needs a normal distribution of f; got a {type(distribution).__name__}.")
    for kind, values in found.items():
        if missing := int((~values.isfinite()).sum()):
            raise ValueError(
                f"the {kind} is not finite at {missing} of {len(values)} inputs: the distribution may have none. Draw "
                "f itself, or an exceedance probability."
            )
    return {kind: values.cpu() for kind, values in found.items()}


def _of_distribution(distribution: Distribution, kinds: Collection[str], threshold: float) -> dict[str, Tensor]:
    found = {}
    if "mean" in kinds:
        found["mean"] = distribution.mean
    if "sd" in kinds:
        found["sd"] = distribution.variance.sqrt()
    if "exceedance" in kinds:
        if isinstance(distribution, MultivariateNormal):
            found["exceedance"] = _beyond(distribution.mean, distribution.variance.sqrt(), threshold)
        else:
            known = with_cdf(distribution)
            level = known.mean.new_tensor(threshold)
            try:
                found["exceedance"] = 1 - known.cdf(level.floor() if is_count(known) else level)
            except NotImplementedError as error:
                raise TypeError(
                    f"the tails of a {type(known).__name__} are not known. Draw the probability that a function g of f "
                    "exceeds a threshold: of=g."
                ) from error
    return found


def _of_function(
    g: Function, mean: Tensor, variance: Tensor, kinds: Collection[str], threshold: float
) -> dict[str, Tensor]:
    found, sd = {}, variance.sqrt()
    if "mean" in kinds or "sd" in kinds:
        found["mean"] = centre = expectation(g, mean, variance)
        if "sd" in kinds:
            found["sd"] = expectation(lambda f: (g(f) - centre).square(), mean, variance).sqrt()
    if "exceedance" in kinds:
        low, high = (mean - _REACH * sd).min(), (mean + _REACH * sd).max()
        nodes = torch.linspace(float(low), float(high), _NODES, dtype=mean.dtype, device=mean.device)
        values = g(nodes)
        if bool((values[1:] >= values[:-1]).all()):
            found["exceedance"] = _beyond(mean, sd, _root(g, threshold, low, high))
        elif bool((values[1:] <= values[:-1]).all()):
            found["exceedance"] = _beyond(-mean, sd, _root(lambda u: g(-u), threshold, -high, -low))
        else:
            raise ValueError(
                f"expected an increasing or decreasing function of f for P(g(f) > {threshold:g}); it is neither "
                f"between {float(low):.3g} and {float(high):.3g}."
            )
    return {kind: found[kind] for kind in kinds}


def _root(g: Function, threshold: float, low: Tensor, high: Tensor) -> float:
    """Return sup{f: g(f) <= t} of increasing g by bisection: an infinity if it is not between the two."""
    if bool(g(low) > threshold):
        return -torch.inf
    if bool(g(high) <= threshold):
        return torch.inf
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if bool(g(middle) > threshold) else (middle, high)
    return float(low)


def _beyond(mean: Tensor, sd: Tensor, level: float) -> Tensor:
    """Return P(f > level) of f ~ N(mean, sd^2), of a known f too."""
    return torch.where(sd > 0, log_ndtr((mean - level) / sd).exp(), (mean > level).to(mean))


def quantity_name(of: Any, *, is_model: bool) -> str | None:
    """Return the name of the quantity for labels, or None of a given distribution of something unknown."""
    if of is None:
        return "f" if is_model else None
    if isinstance(of, Likelihood):
        return "y"
    name = getattr(of, "__name__", "g")
    return f"{name if name.isidentifier() else 'g'}(f)"
