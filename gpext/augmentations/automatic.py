"""The scale mixture of any phi, by automatic differentiation and numerical inversion [GWO20 Sec. 3.3.1, 3.4]."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gpext.augmentations.radial import RadialFunction
from gpext.distributions import RadialTransform, ScaleMixture


class AutomaticRadial(RadialFunction):
    """The radial function given by the user's phi or log phi.

    Evaluated in float64 whatever the dtype of the argument: phi itself underflows early in float32.

    Args:
        phi: completely monotone, phi(0) = 1, elementwise on a tensor of any shape; to draw from `mixing`, also on
            complex128 tensors.
        log_phi: its logarithm; give this instead where phi would underflow. Exactly one of the two.

    Raises:
        ValueError: neither or both are given; or, when evaluated, phi has underflowed to zero or is not finite.

    Example:
        >>> import torch
        >>> radial = AutomaticRadial(lambda r: torch.exp(1 - torch.sqrt(1 + r)))
        >>> radial.mean(torch.ones(1))  # E[w] = -phi'(c^2) / phi(c^2) at c = 1
        tensor([0.3536])
    """

    def __init__(
        self, phi: Callable[[Tensor], Tensor] | None = None, *, log_phi: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._transform = RadialTransform(phi, log_phi)

    def log_phi(self, r: Tensor) -> Tensor:
        """Return log phi(r); raises ValueError where it is not finite."""
        return self._transform.checked(r).to(r.dtype)

    def mean(self, r: Tensor) -> Tensor:
        """Return E[w | c] at r = c^2; parameters inside phi are not differentiated."""
        return self._transform.mean(r)

    def mixing(self, r: Tensor) -> ScaleMixture:
        """Return the tilted mixing density by numerical inversion of phi."""
        return ScaleMixture(self._transform.phi, r.sqrt(), log_phi=self._transform.log_phi)

    def evaluate(self, r: Tensor) -> Tensor:
        """Return log phi(r) as the user wrote it, with no check, in whatever dtype r has."""
        return self._transform(r)
