"""Parameters that training drives towards infinity, where the objective may have no maximum."""

from __future__ import annotations

from gpytorch import Module
from gpytorch.constraints import Interval
from torch import Tensor

_FAR = 1e6  # times the value at the start


def positive_parameters(module: Module) -> dict[str, Tensor]:
    """Return the values of all trained parameters that may be any positive number, by name."""
    return {
        name.replace("raw_", ""): constraint.transform(parameter.detach()).clone()
        for name, parameter, constraint in module.named_parameters_and_constraints()
        if parameter.requires_grad and constraint is not None and _is_positive(constraint)
    }


def _is_positive(constraint: Interval) -> bool:
    return bool((constraint.lower_bound >= 0).all() and constraint.upper_bound.isinf().all())


def grown(before: dict[str, Tensor], after: dict[str, Tensor]) -> str:
    """Return a clause that names the parameters that have grown a million times, with what to do; or nothing."""
    factors = {name: float((value / before[name]).max()) for name, value in after.items()}
    far = [f"{name} grew {factor:.0e} times" for name, factor in factors.items() if factor > _FAR]
    if not far:
        return ""
    return ", ".join(far) + ": the objective may have no maximum there; a prior, `register_prior`, can give it one"
