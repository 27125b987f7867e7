"""Completely monotone radial functions and the moments of the scale mixtures behind them.

On paper [GWO20 Sec. 3.1]          in code
phi(r)                             exp(radial.log_phi(r))
p(w), phi(r) = int e^{-r w} p(w)   the mixing density; radial.mixing(0)
pi(w | c) = e^{-c^2 w} p(w)/phi    the tilted mixing density, radial.mixing(r) at r = c^2
E[w | c] = -phi'(c^2) / phi(c^2)   radial.mean(r) at r = c^2
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from gpext.distributions import PositiveDistribution, ScaleMixture

_PLACES = 65  # of the grid, eight a factor of ten
_CONVEX = 1e-6  # h times the second derivative, as a part of the first, beyond rounding


def distance(r: Tensor) -> Tensor:
    """Return c = sqrt(r) with the derivative 0 at r = 0, where the square root has none.

    A likelihood with a kink (Laplace, hinge) evaluated exactly on it then has the subgradient 0 and not NaN. Negative
    and NaN arguments give NaN.
    """
    on_kink = r == 0
    return torch.where(on_kink, r, torch.where(on_kink, torch.ones_like(r), r).sqrt())


def folded_mean(gap: Tensor, variance: Tensor) -> Tensor:
    """Return E|z| for z ~ N(gap, variance), (...).

    With s = sqrt(variance): s sqrt(2/pi) exp(-gap^2 / (2 s^2)) + gap erf(gap / (s sqrt 2)).
    """
    s = distance(variance)
    at_point = s == 0
    ratio = gap / torch.where(at_point, torch.ones_like(s), s)
    folded = s * math.sqrt(2 / math.pi) * torch.exp(-0.5 * ratio.square()) + gap * torch.erf(ratio / math.sqrt(2))
    return torch.where(at_point, gap.abs(), folded)


class RadialFunction(ABC):
    r"""A completely monotone function with :math:`\varphi(0) = 1`: the Laplace transform of a probability density p(w).

    Subclasses give :meth:`log_phi`, and :meth:`mean` in closed form; parameters are tensors that broadcast against the
    argument.

    Example:
        >>> from gpext.augmentations import ExponentialRadial
        >>> isinstance(ExponentialRadial(), RadialFunction)
        True
    """

    @abstractmethod
    def log_phi(self, r: Tensor) -> Tensor:
        """Return log phi(r), elementwise, differentiable, for r >= 0."""

    @abstractmethod
    def mean(self, r: Tensor) -> Tensor:
        r"""Return :math:`E[w \mid c] = -\varphi'(r) / \varphi(r)` at r = c^2 [GWO20 Sec. 3.3.1]."""

    def is_log_concave(self, like: Tensor) -> bool:
        """Return whether log phi(h^2) is concave in h, as far as a grid from h = 1e-3 to 1e5 shows.

        Args:
            like: a tensor of the dimensions of the data, that parameters broadcast against.
        """
        with torch.enable_grad():
            h = torch.logspace(-3, 5, _PLACES, dtype=torch.float64, device=like.device).requires_grad_()
            value = self.evaluate(h.square().view(-1, *like.dim() * (1,)))
            (slope,) = torch.autograd.grad(value.sum(), h, create_graph=True)
            if not slope.requires_grad:  # linear in h^2: a Gaussian
                return True
            (bend,) = torch.autograd.grad(slope.sum(), h, materialize_grads=True)
        return not bool((bend * h > _CONVEX * slope.abs()).any())  # where phi has underflowed both are nan

    def evaluate(self, r: Tensor) -> Tensor:
        """Return log phi(r), not finite where phi has underflowed."""
        return self.log_phi(r)

    def mixing(self, r: Tensor) -> PositiveDistribution:
        r"""Return :math:`\pi(w \mid c) = e^{-r w} p(w) / \varphi(r)` at r = c^2, batched as r and the parameters.

        Its draws are those of Gibbs sampling, `mixing(r).sample(generator=generator)`, and its mean is `mean(r)`. Here
        by numerical inversion, for which `log_phi` must take complex tensors; exact where a subclass knows the law.
        """
        return ScaleMixture(None, r.sqrt(), log_phi=self.log_phi)

    def mixing_of_power(self, r: Tensor, power: Tensor) -> PositiveDistribution:
        """Return the tilted law of w behind phi^power, where it has a closed form.

        Raises:
            TypeError: it has none.
        """
        raise TypeError(
            f"the law of the auxiliary variables behind a power of {type(self).__qualname__} has no closed form, which "
            "Gibbs sampling needs for weights; gpext.inference.CAVI(), KL(), EP() and Laplace() do not."
        )

    def expected_log_phi(self, gap: Tensor, variance: Tensor) -> Tensor | None:
        """Return E[log phi(z^2)] for z ~ N(gap, variance) by closed form or fixed rule; None if there is neither."""
        return None
