r"""The Polya-Gamma distribution PG(b, z) [Polson, Scott & Windle 2013].

    E e^{-s W} = (cosh(z / 2) / cosh sqrt(z^2 / 4 + s / 2))^b
    W = sum_k G_k / (2 pi^2 (k - 1/2)^2 + z^2 / 2),    G_k ~ Gamma(b, 1)

So W = V / 2, where V has the tilted mixing density of phi(r) = 1 / cosh(sqrt r)^b at c = |z| / 2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributions import constraints

from gpext.distributions.laplace_inversion.inversion_contour import Contour, Laws
from gpext.distributions.laplace_inversion.radial_transform import RadialTransform
from gpext.distributions.laplace_inversion.saddle_model import SaddleModel
from gpext.distributions.mixing.jacobi import jacobi_draws
from gpext.distributions.mixing.sech_cumulants import log_sech_series, sech_cumulants
from gpext.distributions.positive import PositiveDistribution, broadcast_floating, with_slopes

_POLE = 0.25 * math.pi**2  # 1 / cosh(sqrt r) has its first pole at -_POLE
_SERIES = 0.25  # distance from the origin within which it is used
_NOTHING = 1000.0  # nats below which there is no mass to speak of


class PolyaGamma(PositiveDistribution):
    """Polya-Gamma W >= 0.

    Draws are exact for counts below 64, whole or not; from there on their cdf is wrong by 1.2e-7 at most (see
    `jacobi`). The cdf and the density, by numerical inversion, are relatively accurate in both tails: to 1e-12 where
    it was measured, counts 0.3 to 7 and tilts 0 to 20.

    Args:
        count: b >= 0 and finite; at 0 all draws are 0.
        tilt: z of either sign; at infinity all draws are 0.
        validate_args: as in torch.distributions.

    Raises:
        ValueError: a parameter is not in its range.

    Example:
        >>> import torch
        >>> w = PolyaGamma(torch.tensor(1.0), torch.tensor(0.0))
        >>> w.mean, w.sample((4,), generator=torch.Generator().manual_seed(0)).shape
        (tensor(0.2500), torch.Size([4]))
    """

    arg_constraints = {"count": constraints.nonnegative, "tilt": constraints.real}

    def __init__(self, count: Tensor | float, tilt: Tensor | float, validate_args: bool | None = None) -> None:
        self.count, self.tilt = broadcast_floating(count, tilt)
        super().__init__(self.count.shape, validate_args=validate_args)
        if bool(self.count.isinf().any()):
            index = tuple(self.count.isinf().nonzero()[0].tolist())
            raise ValueError(f"count must be finite; got inf at index {index}.")

    @property
    def mean(self) -> Tensor:
        """``count tanh(tilt / 2) / (2 tilt)``, count / 4 at tilt 0."""
        return self._cumulant(1)

    @property
    def variance(self) -> Tensor:
        """``count (tanh(c) / c - sech(c)^2) / (16 c^2)`` with c = tilt / 2, count / 24 at tilt 0."""
        return self._cumulant(2)

    def _cumulant(self, order: int) -> Tensor:
        r = (0.5 * self.tilt.double()).square()
        finite = r < math.inf
        cumulant = 0.5**order * self.count * sech_cumulants(torch.where(finite, r, 1.0), order)[-1]
        return torch.where(finite, cumulant, 0.0).to(self.tilt.dtype)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density, by numerical inversion. Infinite at the point mass of count 0 or tilt inf.

        It has first derivatives, in the value and in the tilt.

        Raises:
            NotImplementedError: count requires a gradient.
        """
        if torch.is_grad_enabled() and self.count.requires_grad:
            raise NotImplementedError("log_prob of PolyaGamma has no derivative in count; pass count.detach().")
        atom = (self.count == 0) | self.tilt.isinf()
        inside = (value > self._near()) & (value < self._far()) & ~atom
        laws = self._laws(value, inside)
        outside = torch.where(atom & (value == 0), math.inf, -math.inf)
        log_density = torch.where(inside, (2 * laws.density.clamp_min(0)).log(), outside).to(self.tilt.dtype)
        moves = inside & log_density.isfinite()
        by_value = torch.where(moves, 2 * laws.slope / laws.density, 0.0)
        by_tilt = torch.where(moves, 0.5 * self.count * torch.tanh(0.5 * self.tilt) - self.tilt * value, 0.0)
        return with_slopes(log_density, (value, by_value), (self.tilt, by_tilt))

    def cdf(self, value: Tensor) -> Tensor:
        """P(W <= value), by numerical inversion, absolute error below 1e-11 and 1e-16 count abs(tilt); no gradient."""
        atom = (self.count == 0) | self.tilt.isinf()
        inside = (value > self._near()) & (value < self._far()) & ~atom
        outside = torch.where((value >= self._far()) | atom, 1.0, 0.0)
        return torch.where(inside, self._laws(value, inside).cdf.clamp(0, 1), outside).to(self.tilt.dtype)

    def _near(self) -> Tensor:
        """Below are less than e^-1000 of the mass.

        P(W <= w) <= (2 cosh(z / 2))^b exp(-b^2 / (8 w)), by Chernoff's bound.
        """
        return self.count.square() / (8 * (_NOTHING + self.count * (math.log(2) + 0.5 * self.tilt.abs())))

    def _far(self) -> Tensor:
        """Beyond are less than e^-1000 of the mass and points too near to the pole of phi to be told from it."""
        return 1e6 * (1 + self.count)

    def _laws(self, value: Tensor, inside: Tensor) -> Laws:
        """Cdf and density of V = 2 W at 2 value, where inside.

        With the origin at the pole of phi, saddle points exist for all V, and both tails are relatively accurate.
        """
        if self._validate_args:
            self._validate_sample(value)
        with torch.no_grad():
            count, tilt, v = torch.broadcast_tensors(
                torch.where(inside, self.count, 1.0).double(),
                torch.where(inside, self.tilt, 1.0).double(),
                torch.where(inside, 2 * value, 1.0).double(),
            )
            transform = RadialTransform(log_phi=lambda r: count * _log_sech_beyond_pole(r))
            r = (0.5 * tilt).square() + _POLE
            contour = Contour.through(transform, r, v, SaddleModel.reference(transform, r), num_nodes=24)
            return contour.laws()

    def sample(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws of shape sample_shape + batch_shape."""
        with torch.no_grad():
            shape = self._extended_shape(torch.Size(sample_shape))
            count, tilt = self.count.double().expand(shape).flatten(), self.tilt.double().expand(shape).flatten()
            return (0.25 * jacobi_draws(count, 0.5 * tilt.abs(), generator)).view(shape).to(self.tilt.dtype)


def _log_sech_beyond_pole(r: Tensor) -> Tensor:
    """-log cosh sqrt(r - pole) for real r > 0, where it is the cosine below the pole, and complex r."""
    u = r.to(torch.complex128) - _POLE
    near = u.abs() < _SERIES
    c = torch.where(near, 1.0, u).sqrt()
    # Not log1p: torch's is nan at complex subnormal numbers.
    value = math.log(2) - c - torch.log(1 + torch.exp(-2 * c))
    # Powers of large counts see the rounding of derivatives in c near the origin.
    value = torch.where(near, log_sech_series(torch.where(near, u, 0.0)), value)
    return value if r.is_complex() else value.real
