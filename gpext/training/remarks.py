"""Parameters that training has driven far away, where the objective may have no maximum, or has not moved at all."""

from __future__ import annotations

from collections.abc import Iterator

from gpytorch import Module
from gpytorch.constraints import Interval
from torch import Tensor
from torch.nn import Parameter

_FAR = 1e6  # times the value at the start


def positive_parameters(module: Module) -> dict[str, Tensor]:
    """Return the values of all trained parameters that may be any positive number, by name."""
    return {name: value.clone() for name, _, value in _positive(module)}


def _positive(module: Module) -> Iterator[tuple[str, Parameter, Tensor]]:
    for name, parameter, constraint in module.named_parameters_and_constraints():
        if parameter.requires_grad and constraint is not None and _is_positive(constraint):
            yield name.replace("raw_", ""), parameter, constraint.transform(parameter.detach())


def _is_positive(constraint: Interval) -> bool:
    return bool((constraint.lower_bound >= 0).all() and constraint.upper_bound.isinf().all())


def remarks(module: Module, before: dict[str, Tensor]) -> str:
    """Return clauses on parameters that have grown or fallen a million times, or stayed for want of a gradient."""
    grown, fallen, unmoved = [], [], []
    for name, parameter, after in _positive(module):
        up, down = float((after / before[name]).max()), float((before[name] / after).max())
        if up > _FAR:
            grown.append(f"{name} grew {up:.0e} times")
        if down > _FAR:
            fallen.append(f"{name} fell {down:.0e} times")
        gradient = parameter.grad
        if gradient is not None and bool(((gradient == 0) & (after == before[name])).any()):
            unmoved.append(name)
    clauses = (
        (grown, ": the objective may have no maximum there; a prior, `register_prior`, can give it one"),
        (fallen, ": the objective may rise all the way to zero; a prior, or the constraint `GreaterThan`, can stop it"),
        (unmoved, " did not move, with a gradient of zero: inputs may be many lengthscales apart; scale one or other"),
    )
    return "; ".join(", ".join(names) + remedy for names, remedy in clauses if names)
