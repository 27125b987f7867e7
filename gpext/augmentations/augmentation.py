r"""A super-Gaussian likelihood and its conditionally conjugate augmentation, datum by datum [GWO20 Eqs. 4, 5, Thm. 1].

    p(y | f) = C e^{g f} phi(h^2),     h^2 = alpha - beta f + gamma f^2 = gamma (f - f0)^2 + delta
             = int C e^{g f - h^2 w} p(w) dw

On paper                                  in code
C, g(y)                                   exp(log_constant), potential
gamma, f0 = beta / (2 gamma)              curvature, center
delta = alpha - beta^2 / (4 gamma)        offset
E_q[h^2] = c^2                            tilt(mean, variance)
w = E[w | c]                              radial.mean(c^2)

The square is kept completed: alpha - beta f + gamma f^2 loses every digit when y is large and f is near it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gpext.augmentations.radial import RadialFunction
from gpext.quadrature import expectation, log_expectation

_CHUNK = 4096  # data in one adaptive integration: some 1000 nodes each, in float64
_CANCELS = 10.0  # g^2 v from which float32 loses digits in log_marginal, a difference of two numbers of that size


@dataclass(frozen=True)
class Augmentation:
    """The terms of the identity above for given targets; every tensor broadcasts against the latent values (..., N).

    Example:
        >>> import torch
        >>> from gpext.likelihoods import BernoulliLogitLikelihood
        >>> terms = BernoulliLogitLikelihood().augmentation(torch.tensor([1.0]))
        >>> terms.log_prob(torch.zeros(1)).exp()
        tensor([0.5000])
    """

    radial: RadialFunction
    log_constant: Tensor
    potential: Tensor
    center: Tensor
    curvature: Tensor
    offset: Tensor

    @classmethod
    def from_quadratic(
        cls, radial: RadialFunction, log_constant: Tensor, potential: Tensor, alpha: Tensor, beta: Tensor, gamma: Tensor
    ) -> Augmentation:
        """Complete the square of alpha - beta f + gamma f^2.

        An offset within the rounding error of alpha is zero.

        Raises:
            ValueError: gamma is not positive, or the quadratic takes negative values.
        """
        dtype = torch.promote_types(alpha.dtype, torch.promote_types(beta.dtype, gamma.dtype))
        a, b, c = alpha.double(), beta.double(), gamma.double()
        if not bool((c > 0).all()):
            raise ValueError(f"gamma must be positive; got a smallest value of {c.min().item():.6g}.")
        offset = a - b.square() / (4 * c)
        rounding = 8 * torch.finfo(dtype).eps * a.abs()
        if bool((offset < -rounding).any()):
            raise ValueError(
                "h^2 = alpha - beta f + gamma f^2 must be nonnegative for every f, so 4 alpha gamma >= beta^2; "
                f"got alpha - beta^2 / (4 gamma) = {offset.min().item():.6g}."
            )
        offset = torch.where(offset.abs() <= rounding, torch.zeros_like(offset), offset)
        return cls(radial, log_constant, potential, (b / (2 * c)).to(dtype), gamma, offset.to(dtype))

    def squared_distance(self, f: Tensor) -> Tensor:
        """Return h^2 at the latent values f (..., N)."""
        return self.curvature * (f - self.center).square() + self.offset

    def log_prob(self, f: Tensor) -> Tensor:
        """Return log p(y | f) (..., N)."""
        return self.log_constant + self.potential * f + self.radial.log_phi(self.squared_distance(f))

    def tilt(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return c^2 = E[h^2] under N(mean, variance), all (..., N) [GWO20 Alg. 1]."""
        return self.curvature * ((mean - self.center).square() + variance) + self.offset

    def bound(self, mean: Tensor, variance: Tensor) -> Tensor:
        r"""Return the augmented lower bound on E[log p(y | f)] at the best q(w), (..., N) [GWO20 App. A.4.2].

        :math:`\log C + g m + \log\varphi(E h^2)`; by Jensen's inequality it is below the exact expectation, because
        log phi is convex.
        """
        return self.log_constant + self.potential * mean + self.radial.log_phi(self.tilt(mean, variance))

    def expected_log_prob(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return E[log p(y | f)] under N(mean, variance), (..., N), by closed form or quadrature."""
        linear = self.log_constant + self.potential * mean
        if not bool(self.offset.any()):
            closed = self.radial.expected_log_phi(
                self.curvature.sqrt() * (mean - self.center), self.curvature * variance
            )
            if closed is not None:
                return linear + closed
        return linear + self._in_chunks(expectation, mean, variance)

    def log_marginal(self, mean: Tensor, variance: Tensor) -> Tensor:
        r"""Return :math:`\log \int p(y | f) N(f | m, v) df`, (..., N).

        The potential is absorbed exactly, :math:`e^{g f} N(f | m, v) = e^{g m + g^2 v / 2} N(f | m + g v, v)`; what is
        left to quadrature is phi alone, whose mass lies between its center and the shifted mean.
        """
        dtype = mean.dtype
        if bool((self.potential.square() * variance > _CANCELS).any()):
            mean, variance = mean.double(), variance.double()
        shifted = mean + self.potential * variance
        linear = self.log_constant + self.potential * (mean + 0.5 * self.potential * variance)
        return (linear + self._in_chunks(log_expectation, shifted, variance)).to(dtype)

    def site(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shift and the precision of the Gaussian site in f at the given w, (..., N) [GWO20 Thm. 2].

        nu = g + w beta = g + 2 w gamma f0 and tau = 2 w gamma: sampled w for Gibbs, expected w for CAVI.
        """
        precision = 2 * w * self.curvature
        return self.potential + precision * self.center, precision

    def split(self, size: int, num_data: int) -> list[Augmentation]:
        """Return the terms of `size` of all `num_data` data after another."""
        return _split(self, size, num_data)

    def _in_chunks(self, integral: Callable[..., Tensor], mean: Tensor, variance: Tensor) -> Tensor:
        """Return the integral of log phi (or phi) over f, by adaptive quadrature, a few thousand data at a time."""
        mean, variance = torch.broadcast_tensors(mean, variance)
        size = mean.size(-1) if mean.dim() else 1
        chunk = max(_CHUNK * size // max(mean.numel(), 1), 1)  # fewer of each of a batch
        if size <= chunk:
            return self._integral(integral, mean, variance)
        pieces = self.split(chunk, size), mean.split(chunk, -1), variance.split(chunk, -1)
        parts = [part._integral(integral, m, v) for part, m, v in zip(*pieces, strict=True)]
        return torch.cat(parts, -1)

    def _integral(self, integral: Callable[..., Tensor], mean: Tensor, variance: Tensor) -> Tensor:
        shape = torch.broadcast_shapes(self.center.shape, mean.shape)
        knots = self.center.expand(shape).unsqueeze(0)
        # Where a phi has underflowed there is no mass, but no expectation of its logarithm either.
        log_phi = self.radial.log_phi if integral is expectation else self.radial.evaluate
        found = integral(lambda f: log_phi(self.squared_distance(f)), mean, variance, knots=knots)
        if not bool(found.isfinite().all()):
            self.radial.log_phi(self.squared_distance(mean))  # its error says why
        return found


def _split(instance: Any, size: int, num_data: int) -> list[Any]:
    """Return a dataclass cut along the data wherever it holds a number for each."""
    count = math.ceil(num_data / size)
    pieces: dict[str, Sequence[Any]] = {}
    for name in (f.name for f in fields(instance)):
        value = getattr(instance, name)
        if isinstance(value, Tensor):
            pieces[name] = value.split(size, -1) if value.shape[-1:] == (num_data,) else [value] * count
        elif is_dataclass(value):
            pieces[name] = _split(value, size, num_data)
    return [replace(instance, **{name: each[i] for name, each in pieces.items()}) for i in range(count)]
