"""Checks of targets and of a likelihood's parameters: what was expected, what came, what to do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpext.checks import check_finite, check_tensor, show_index


def check_targets(targets: Tensor) -> None:
    """Raise unless targets are a tensor, finite and in a dtype that the algebra works in.

    Raises:
        TypeError: no tensor, or half precision.
        ValueError: NaN or infinite values, with the first offending index.
    """
    check_tensor("targets", targets)
    if targets.dtype in (torch.float16, torch.bfloat16):
        raise TypeError(f"targets in {targets.dtype} are not supported; convert with y.float() or y.double().")
    check_finite("targets", targets)


class HyperparameterError(ValueError):
    """Hyperparameters at which there is no prior, or no likelihood; training steps back from them."""


def check_parameters(likelihood: Any) -> None:
    """Raise HyperparameterError unless a likelihood's parameters are finite, and positive where they have to be."""
    for name, parameter, constraint in likelihood.named_parameters_and_constraints():
        value = parameter.detach() if constraint is None else constraint.transform(parameter.detach())
        positive = constraint is not None and bool((torch.as_tensor(constraint.lower_bound) == 0).all())
        if not bool(value.isfinite().all() and (not positive or (value > 0).all())):
            wanted = "positive and finite" if positive else "finite"
            raise HyperparameterError(
                f"{name.replace('raw_', '')} of {type(likelihood).__qualname__} must be {wanted}; got "
                f"{value.flatten().tolist()}. Set it anew, or bound it by a constraint or a prior."
            )


def check_binary(targets: Tensor) -> None:
    """Raise ValueError unless every target is 0 or 1."""
    wrong = (targets != 0) & (targets != 1)
    if bool(wrong.any()):
        seen = sorted({float(value) for value in targets[wrong].flatten()[:100]})[:4]
        shown = ", ".join(f"{value:g}" for value in seen)
        remedy = "Convert with (y + 1) / 2." if set(seen) == {-1.0} else "Encode the two classes as 0 and 1."
        index = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(f"targets must be in {{0, 1}}; got {{{shown}}}, first at index {show_index(index)}. {remedy}")


def check_counts(targets: Tensor) -> None:
    """Raise ValueError unless every target is a nonnegative integer."""
    wrong = (targets < 0) | _is_broken(targets)
    if bool(wrong.any()):
        index = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"targets must be counts 0, 1, 2, ...; got {targets[index].item():g} at index {show_index(index)}."
        )


def check_classes(targets: Tensor, num_classes: int) -> None:
    """Raise ValueError unless every target is one of the classes 0, ..., num_classes - 1."""
    wrong = (targets < 0) | (targets >= num_classes) | _is_broken(targets)
    if bool(wrong.any()):
        index = tuple(wrong.nonzero()[0].tolist())
        came = sorted({float(value) for value in targets[wrong].flatten()[:100]})[:4]
        shown = ", ".join(f"{value:g}" for value in came)
        remedy = " Classes are counted from 0." if came == [num_classes] else ""
        raise ValueError(
            f"targets must be classes 0, ..., {num_classes - 1}; got {{{shown}}}, first at index "
            f"{show_index(index)}.{remedy}"
        )


def floating(targets: Tensor) -> Tensor:
    """Return targets in a floating dtype, integers and booleans in torch's default one."""
    return targets if targets.is_floating_point() else targets.to(torch.get_default_dtype())


def floating_like(targets: Tensor, like: Tensor) -> Tensor:
    """Return targets in the floating dtype that they and `like` have in common."""
    return targets.to(torch.promote_types(targets.dtype, like.dtype))


def _is_broken(targets: Tensor) -> Tensor:
    """Return which targets are no whole numbers."""
    return targets != targets.round() if targets.is_floating_point() else torch.zeros_like(targets, dtype=torch.bool)
