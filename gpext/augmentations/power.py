"""A power of a radial function: a datum that counts as w of them, or as a part of one.

phi^w has w times the E[omega | c] of phi, and the augmented bound only needs log phi(h^2) to be convex in h^2. Draws
need the law behind phi^w, which has a closed form for powers of the hyperbolic secant, of the Student-t and of the
exponential.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gpext.augmentations.radial import RadialFunction
from gpext.distributions import PositiveDistribution


@dataclass(frozen=True)
class PowerRadial(RadialFunction):
    """phi(r)^w.

    Args:
        radial: phi.
        power: w > 0, broadcastable against the argument.

    Example:
        >>> import torch
        >>> from gpext.augmentations import ExponentialRadial
        >>> PowerRadial(ExponentialRadial(), torch.tensor(2.0)).mean(torch.tensor([2.0]))
        tensor([0.7071])
    """

    radial: RadialFunction
    power: Tensor

    def log_phi(self, r: Tensor) -> Tensor:
        """Return w log phi(r)."""
        return self.power * self.radial.log_phi(r)

    def evaluate(self, r: Tensor) -> Tensor:
        """Return w log phi(r), not finite where phi has underflowed."""
        return self.power * self.radial.evaluate(r)

    def mean(self, r: Tensor) -> Tensor:
        """Return w E[omega | c] under phi."""
        return self.power * self.radial.mean(r)

    def mixing(self, r: Tensor) -> PositiveDistribution:
        """Return the tilted law of omega behind phi^w.

        Raises:
            TypeError: it has no closed form.
        """
        return self.radial.mixing_of_power(r, self.power)

    def expected_log_phi(self, gap: Tensor, variance: Tensor) -> Tensor | None:
        """Return w E[log phi(z^2)], or None if phi has neither a closed form nor a fixed rule."""
        expected = self.radial.expected_log_phi(gap, variance)
        return None if expected is None else self.power * expected
