r"""The hyperparameters a sampler moves, as one flat vector in unconstrained space, with their prior density there.

gpytorch states priors of constrained parameters, theta = T(raw). Their density in `raw`, where a sampler moves freely,
has the Jacobian of T:

    log p(raw) = log p(theta) + sum log |dT / draw|

The scale of a posterior is often unbounded in theta with a tail that T = softplus leaves as heavy as it was. Where a
lower bound a is the only one, log(theta - a) can be the coordinate instead: its density has the Jacobian theta - a.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import gpytorch
import torch
from gpytorch.constraints import GreaterThan, Interval
from torch import Tensor
from torch.nn import Parameter


@dataclass(frozen=True)
class Slot:
    """The place of one parameter in the flat vector."""

    name: str  # without the raw_ of a constrained one
    parameter: Parameter
    constraint: Interval | None
    place: slice
    is_log: bool  # whether its coordinate x is log(theta - lower bound); else raw itself

    @property
    def coordinate(self) -> str:
        """The coordinate that is moved, in words."""
        return f"log {self.name}" if self.is_log else self.name

    def log_slope(self, raw: Tensor) -> Tensor:
        """Return sum log |dtheta / dx| () at raw values of the parameter's shape, differentiable in them."""
        if self.constraint is None:
            return raw.new_zeros(())
        if self.is_log:
            return (self.constraint.transform(raw) - self.constraint.lower_bound).log().sum()
        return self._slope(raw).abs().log().sum()

    def rate(self, raw: Tensor) -> Tensor:
        """Return draw / dx at raw values of the parameter's shape."""
        if not self.is_log or self.constraint is None:
            return torch.ones_like(raw)
        return (self.constraint.transform(raw) - self.constraint.lower_bound) / self._slope(raw).detach()

    def constrained(self, x: Tensor) -> Tensor:
        """Return theta (..., *shape) of coordinates (..., size)."""
        x = x.view((*x.shape[:-1], *self.parameter.shape)).to(self.parameter)
        if self.constraint is None:
            return x
        return self.constraint.lower_bound + x.exp() if self.is_log else self.constraint.transform(x)

    def raw(self, x: Tensor) -> Tensor:
        """Return raw values of the parameter's shape of coordinates (size,)."""
        x = x.view(self.parameter.shape)
        if not self.is_log or self.constraint is None:
            return x
        bound = self.constraint.lower_bound.double()
        return self.constraint.inverse_transform(bound + x.to(bound).exp())

    def read(self) -> Tensor:
        """Return the current coordinates (size,), float64."""
        raw = self.parameter.detach().double().flatten()
        if not self.is_log or self.constraint is None:
            return raw
        theta = self.constraint.transform(raw.view(self.parameter.shape))
        return (theta - self.constraint.lower_bound).log().flatten()

    def _slope(self, raw: Tensor) -> Tensor:
        """Return dT / draw, of the shape of raw."""
        assert self.constraint is not None
        with torch.enable_grad():
            raw = raw if raw.requires_grad else raw.detach().requires_grad_(True)
            (slope,) = torch.autograd.grad(self.constraint.transform(raw).sum(), raw, create_graph=True)
        return slope


class Hyperparameters:
    """Some of a module's parameters.

    Args:
        module: a model with its likelihood. Moves change its parameters in place.
        names: which, as `module.named_parameters()` calls them, with or without `raw_`. None for every parameter that
            a registered prior depends on, but those that do not require gradients. A parameter without a prior has a
            uniform one, of theta.
        logarithms: whether the coordinates of parameters with a lower bound alone are log(theta - bound), not raw.

    Raises:
        TypeError: names is a string.
        ValueError: there is no such parameter.
    """

    def __init__(self, module: gpytorch.Module, names: Sequence[str] | None, *, logarithms: bool = False) -> None:
        self._priors = [(prior, closure, owner) for _, owner, prior, closure, _ in module.named_priors()]
        named = dict(module.named_parameters())
        learnt = {name for name, parameter in named.items() if parameter.requires_grad}
        module.requires_grad_(True)
        with torch.inference_mode(False), torch.enable_grad():  # wherever the sampler is made
            dependence = [_parameters_behind(closure(owner), named) for _, closure, owner in self._priors]
        for name, parameter in named.items():
            parameter.requires_grad_(name in learnt)
        chosen = learnt.intersection(set[str]().union(*dependence)) if names is None else _named(module, names)
        slots, start = [], 0
        for name, parameter, constraint in module.named_parameters_and_constraints():
            if name in chosen:
                stop = start + parameter.numel()
                is_log = logarithms and isinstance(constraint, GreaterThan)
                slots.append(Slot(name.replace("raw_", ""), parameter, constraint, slice(start, stop), is_log))
                start = stop
        self.slots, self.size = tuple(slots), start
        raw_names = {id(parameter): name for name, parameter in named.items()}
        # Of each slot, the priors that it has a say in.
        self._priors_of = [
            [k for k, names_behind in enumerate(dependence) if raw_names[id(slot.parameter)] in names_behind]
            for slot in slots
        ]

    def coordinates_of(self, module: torch.nn.Module) -> list[int]:
        """Return which coordinates belong to the parameters of a part of the module."""
        owned = {id(parameter) for parameter in module.parameters()}
        return [j for slot in self.slots if id(slot.parameter) in owned for j in range(self.size)[slot.place]]

    @torch.no_grad()
    def read(self) -> Tensor:
        """Return the current coordinates (P,), float64."""
        if not self.slots:
            return torch.zeros(0, dtype=torch.float64, device="cpu")
        return torch.cat([slot.read() for slot in self.slots])

    @torch.no_grad()
    def write(self, x: Tensor) -> None:
        """Set the module's parameters by coordinates (P,)."""
        for slot in self.slots:
            slot.parameter.copy_(slot.raw(x[slot.place]))

    def log_prior(self, coordinate: int) -> Tensor:
        """Return the log prior density of the coordinates as written, as far as it depends on one coordinate ().

        Args:
            coordinate: which of the P.
        """
        total = torch.zeros((), dtype=torch.float64, device="cpu")
        for slot, which in zip(self.slots, self._priors_of, strict=True):
            if slot.place.start <= coordinate < slot.place.stop:
                for prior, closure, owner in (self._priors[k] for k in which):
                    with torch.no_grad():
                        total = total + prior.log_prob(closure(owner)).sum().double().cpu()
                total = total + slot.log_slope(slot.parameter.detach().double()).detach().cpu()
        return total

    def log_jacobian(self) -> Tensor:
        """Return sum log |dtheta / dx| () at the coordinates as written, differentiable in the parameters."""
        return torch.stack([slot.log_slope(slot.parameter.double()).cpu() for slot in self.slots]).sum()

    def by_coordinates(self, slopes: Sequence[Tensor]) -> Tensor:
        """Return a gradient in the coordinates (P,), float64 on the CPU, from that in the parameters of the slots."""
        rates = [slot.rate(slot.parameter.detach().double()) for slot in self.slots]
        return torch.cat([(slope.double() * rate).cpu().flatten() for slope, rate in zip(slopes, rates, strict=True)])

    def constrained(self, x: Tensor) -> dict[str, Tensor]:
        """Return theta (..., *shape) by parameter name for coordinates (..., P)."""
        with torch.no_grad():
            return {slot.name: slot.constrained(x[..., slot.place]) for slot in self.slots}


def _parameters_behind(value: Tensor, named: dict[str, Parameter]) -> set[str]:
    """Return the names of the parameters that a value depends on."""
    if not value.requires_grad:
        return set()
    slopes = torch.autograd.grad(value.sum(), list(named.values()), allow_unused=True)
    return {name for name, slope in zip(named, slopes, strict=True) if slope is not None}


def _named(module: gpytorch.Module, names: Sequence[str]) -> set[str]:
    if isinstance(names, str):
        raise TypeError(f"expected a sequence of names of parameters; got a string. Write [{names!r}].")
    by_either = {}
    for name, _ in module.named_parameters():
        by_either[name] = by_either[name.replace("raw_", "")] = name
    for name in names:
        if name not in by_either:
            known = ", ".join(sorted({n.replace("raw_", "") for n in by_either}))
            raise ValueError(f"expected names of parameters of the model: {known}; got {name!r}.")
    return {by_either[name] for name in names}
