"""Diagnostics of trained parameters: moved very far, ended on a bound, or not moved at all; each names the entries."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from gpytorch import Module
from gpytorch.constraints import Interval
from torch import Tensor
from torch.nn import Parameter

from gpext.kernels.columns import stationary_kernels
from gpext.likelihoods.noise_floor import at_noise_floor

_FAR = 1e6  # times the value at the start
_AT_BOUND = 0.01  # of the bound, or of the interval between two
_MOST_ENTRIES = 4  # named one by one

_GROWN = ": the objective may have no maximum there; a prior, `register_prior`, can give it one"
_FALLEN = ": the objective may rise all the way to zero; a prior, or the constraint `GreaterThan`, can stop it"
_CONSTANT = " did not move: its input column is constant and says nothing of it; leave the column out"
_UNMOVED = " did not move, with a gradient of zero: inputs may be many lengthscales apart; scale one or other"
_FLOOR = ": noise below it cannot be told from none at the targets' spread; noise_constraint sets another bound"
_BOUND = ": the objective may rise beyond it; give another constraint, or a prior that keeps it away"
_HEAVY = (
    " ended so near to 2 that the predictive variance is huge, or infinite: report quantiles, likelihood(model(x))"
    ".icdf(q), or bound it by deg_free_constraint=GreaterThan(3.0)"
)


def trained_parameters(module: Module) -> dict[str, Tensor]:
    """Return the values of all trained parameters that have a constraint, by name."""
    return {name: value.clone() for name, _, _, value in _trained(module)}


def constant_columns(x: Tensor) -> Tensor:
    """Return which columns of inputs (..., N, d) are constant (d,); none for a single datum, or for inputs (N,)."""
    if x.dim() < 2 or x.size(-2) < 2:
        return torch.zeros(x.size(-1) if x.dim() > 1 else 1, dtype=torch.bool, device="cpu")
    constant = (x == x[..., :1, :]).all(-2)
    return constant.reshape(-1, x.size(-1)).all(0).cpu()


def ends_at_noise_floor(module: Module) -> bool:
    """Return whether a trained noise has fallen to its :class:`gpext.likelihoods.NoiseFloor`."""
    return any(at_noise_floor(constraint, value) for _, _, constraint, value in _trained(module))


def diagnose(module: Module, before: dict[str, Tensor], constant: Tensor) -> str:
    """Return clauses on parameters that have grown or fallen a million times, ended on a bound, or not moved.

    Args:
        module: the objective.
        before: what :func:`trained_parameters` returned at the start.
        constant: which columns of the inputs are constant (d,).
    """
    clauses: dict[str, list[str]] = {}
    idle_columns = _of_columns(module, constant)

    def note(name: str, which: Tensor, verb: str, remedy: str) -> None:
        if bool(which.any()):
            clauses.setdefault(remedy, []).append(_entries(name, which) + verb)

    for name, parameter, constraint, after in _trained(module):
        start = before[name]
        floor = at_noise_floor(constraint, after)
        if floor:
            bound = float(constraint.lower_bound)
            note(name, torch.ones_like(after, dtype=torch.bool), f" ended at its floor, {bound:.1e}", _FLOOR)
        if _is_positive(constraint):
            up, down = after / start, start / after
            note(name, up > _FAR, f" grew {float(up.max()):.0e} times", _GROWN)
            if not floor:
                far = f"{float(down.max()):.0e} times" if bool((after > 0).all()) else "to zero"
                note(name, down > _FAR, f" fell {far}", _FALLEN)
        for bound, at in () if floor else _bounds(constraint, start, after):
            if bound == 2 and name.endswith("deg_free"):
                note(name, at, "", _HEAVY)
            else:
                note(name, at, f" ended on the bound of its constraint, {bound:g}", _BOUND)
        if parameter.grad is not None:
            unmoved = (parameter.grad == 0) & (after == start)
            idle = unmoved & idle_columns.get(name, torch.zeros(1, dtype=torch.bool, device="cpu")).to(after.device)
            note(name, idle, "", _CONSTANT)
            note(name, unmoved & ~idle, "", _UNMOVED)
    return "; ".join(", ".join(names) + remedy for remedy, names in clauses.items())


def trained_constraints(module: Module) -> Iterator[tuple[str, Parameter, Interval]]:
    """Yield the name, the parameter behind it and the constraint of all trained parameters that have one."""
    for name, parameter, constraint in module.named_parameters_and_constraints():
        if parameter.requires_grad and constraint is not None and parameter.numel():  # e.g. no gaps of two classes
            path, dot, leaf = name.rpartition(".")
            yield path + dot + leaf.removeprefix("raw_"), parameter, constraint


def _trained(module: Module) -> Iterator[tuple[str, Parameter, Interval, Tensor]]:
    for name, parameter, constraint in trained_constraints(module):
        yield name, parameter, constraint, constraint.transform(parameter.detach())


def _is_positive(constraint: Interval) -> bool:
    return bool((constraint.lower_bound >= 0).all() and constraint.upper_bound.isinf().all())


def _bounds(constraint: Interval, start: Tensor, after: Tensor) -> Iterator[tuple[float, Tensor]]:
    """Yield each bound other than zero and infinity, and which entries have reached it."""
    low, high = constraint.lower_bound, constraint.upper_bound
    for bound in (low, high):
        if bound.numel() == 1 and bool(bound.isfinite() & (bound != 0)):
            near = _AT_BOUND * float(high - low if bool((high - low).isfinite()) else bound.abs())
            yield float(bound), ((after - bound).abs() < near) & ((start - bound).abs() >= near)


def _of_columns(module: Module, constant: Tensor) -> dict[str, Tensor]:
    """Return, by name, which lengthscales belong to constant columns, in shapes that broadcast."""
    kernels = stationary_kernels(module, len(constant))
    found = {}
    for name, kernel, columns in kernels:
        own = constant[columns]
        found[f"{name}.lengthscale".lstrip(".")] = own if kernel.lengthscale.size(-1) > 1 else own.all().reshape(1)
    return found


def _entries(name: str, which: Tensor) -> str:
    """Return the name of a parameter with the indices of some of its entries, where it has several."""
    if which.numel() == 1:
        return name
    if bool(which.all()):
        return f"{name} (all {which.numel()} entries)"
    indices = [str(index) for index in which.nonzero().tolist()]
    more = len(indices) - _MOST_ENTRIES
    return name + ", ".join(indices[:_MOST_ENTRIES]) + (f" and {more} more entries" if more > 0 else "")
