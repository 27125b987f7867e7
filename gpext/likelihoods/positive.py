"""Positive numbers whose scale is e^f: the base of their likelihoods, with one more parameter."""

from __future__ import annotations

import torch
from gpytorch.constraints import Interval, Positive
from gpytorch.priors import Prior
from torch import Tensor

from gpext.checks import show_index
from gpext.likelihoods.checks import floating_like
from gpext.likelihoods.latent import LatentLikelihood


class PositiveLikelihood(LatentLikelihood):
    """Targets y > 0 of which y e^-f has a law without f; its `shape` is trained with the other parameters.

    Args:
        batch_shape: shape of a batch of parameters.
        shape_prior: of `shape`.
        shape_constraint: of `shape`; positive by default.
    """

    def __init__(
        self,
        batch_shape: torch.Size = torch.Size(),  # noqa: B008  gpytorch's own signature; a Size is immutable
        shape_prior: Prior | None = None,
        shape_constraint: Interval | None = None,
    ) -> None:
        super().__init__()
        self.register_parameter("raw_shape", torch.nn.Parameter(torch.zeros(*batch_shape, 1)))
        if shape_prior is not None:
            self.register_prior("shape_prior", shape_prior, _get_shape, _set_shape)
        self.register_constraint("raw_shape", Positive() if shape_constraint is None else shape_constraint)

    @property
    def shape(self) -> Tensor:
        """The shape parameter (*batch_shape, 1)."""
        return self.raw_shape_constraint.transform(self.raw_shape)

    @shape.setter
    def shape(self, value: Tensor | float) -> None:
        value = torch.as_tensor(value, dtype=self.raw_shape.dtype, device=self.raw_shape.device)
        self.initialize(raw_shape=self.raw_shape_constraint.inverse_transform(value))

    def check_support(self, targets: Tensor) -> None:
        """Raise ValueError if a target is not positive."""
        wrong = (targets <= 0).nonzero()
        if len(wrong):
            index = tuple(wrong[0].tolist())
            raise ValueError(
                f"targets must be positive; got {float(targets[index]):g} at index {show_index(index)}. A value that "
                "is only known to be below a limit is censored: gpext.likelihoods.Censored."
            )

    def knots(self, targets: Tensor) -> Tensor:
        """Return log y, about which p(y | f) may be narrow."""
        return targets.double().log().unsqueeze(0)

    def expansion_point(self, targets: Tensor) -> Tensor:
        """Return log y, where Taylor expands."""
        return targets.double().log()

    def terms(self, targets: Tensor, f: Tensor) -> tuple[Tensor, Tensor, Tensor, torch.dtype]:
        """Return log y, log y - f and the shape in float64, and the dtype of the result."""
        log_y = targets.double().log()
        return log_y, log_y - f.double(), self.shape.double(), floating_like(targets, f).dtype


def _get_shape(module: PositiveLikelihood) -> Tensor:
    return module.shape


def _set_shape(module: PositiveLikelihood, value: Tensor) -> None:
    module.shape = value
