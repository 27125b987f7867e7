r"""The tilted mixing density of any completely monotone phi, from phi alone [GWO20 Sec. 3.4].

    phi(r) = int e^{-r w} p(w) dw,      pi(w | c) = e^{-c^2 w} p(w) / phi(c^2)

Its cdf and density come by numerical inversion of phi (see `contour`), its draws by inverting the cdf at uniform
variables, its mean and variance from the derivatives of log phi.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributions import constraints

from gpext.distributions.laplace_inversion.inversion_contour import Contour, Laws
from gpext.distributions.laplace_inversion.quantile_table import interpolated
from gpext.distributions.laplace_inversion.quantiles import solve
from gpext.distributions.laplace_inversion.radial_transform import InversionError, RadialTransform
from gpext.distributions.laplace_inversion.saddle_model import SaddleModel
from gpext.distributions.positive import PositiveDistribution, broadcast_floating, with_slopes

_DEEPEST = 300.0  # nats of phi: a complex division squares, and numbers end at e^709
_SMALLEST = 745.0  # nats below one, of a float64
_TOLERANCE = 1e-7  # of the cdf, between rules that agree to 2e-10 where they converge
_CHUNK = 1024  # draws whose nodes stay in the cache


class ScaleMixture(PositiveDistribution):
    """The law of w with density e^{-c^2 w} p(w) / phi(c^2), where phi is the Laplace transform of p.

    Without gradients, but for those of `log_prob` in the value and in the tilt: `sample`, `cdf`, `icdf`, `mean` and
    `variance` are functions of numbers, and parameters inside phi are not differentiated. Pickling needs a phi that can
    be pickled: not a lambda. The absolute error of the cdf is below 1e-9, if log phi is accurate.

    Args:
        phi: completely monotone, phi(0) = 1, elementwise on tensors of any shape, float64 or complex128, and analytic
            off the negative real axis. Real powers of complex numbers are cut along their own negative axis: write
            cosh(c)^-b as exp(-b (c + log(1 + exp(-2c)) - log 2)). Parameters inside phi may have a batch shape that
            broadcasts with tilt.
        tilt: c >= 0. At infinity all draws are zero.
        log_phi: its logarithm; give this instead (and None for phi) where phi would underflow.
        validate_args: as in torch.distributions.

    Raises:
        ValueError: neither or both of phi and log_phi are given; or, when evaluated, the inversion does not converge,
            an `InversionError`.
        TypeError: phi does not return a tensor; or, when evaluated, it does not take complex ones.

    Example:
        >>> import torch
        >>> law = ScaleMixture(lambda r: torch.exp(-torch.sqrt(r)), torch.tensor(2.0))
        >>> law.mean, law.cdf(torch.tensor(0.25))
        (tensor(0.2500), tensor(0.6277))
    """

    arg_constraints = {"tilt": constraints.nonnegative}

    def __init__(
        self,
        phi: Callable[[Tensor], Tensor] | None,
        tilt: Tensor | float,
        *,
        log_phi: Callable[[Tensor], Tensor] | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self._transform = RadialTransform(phi, log_phi)
        (tilt,) = broadcast_floating(tilt)
        shape = self._transform.shape(torch.ones_like(tilt, dtype=torch.float64))
        self.tilt = tilt.expand(torch.broadcast_shapes(tilt.shape, shape))
        super().__init__(self.tilt.shape, validate_args=validate_args)

    def expand(self, batch_shape: torch.Size, _instance: ScaleMixture | None = None) -> ScaleMixture:
        """The same distribution, repeated over `batch_shape`."""
        new = self._get_checked_instance(ScaleMixture, _instance)
        new._transform = self._transform
        return super().expand(batch_shape, new)

    @property
    def mean(self) -> Tensor:
        """-(log phi)'(c^2)."""
        return self._at_finite_tilt(self._transform.mean)

    @property
    def variance(self) -> Tensor:
        """(log phi)''(c^2)."""
        return self._at_finite_tilt(self._transform.variance)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density, with first derivatives in value and tilt; value and result broadcast with the batch shape.

        It is -inf where the density underflows, and already where phi does at the saddle point of a very small value;
        log_phi does not.

        Raises:
            NotImplementedError: phi has parameters that require gradients.
        """
        if torch.is_grad_enabled() and self._transform(self._square().detach()).requires_grad:
            raise NotImplementedError(
                "log_prob of ScaleMixture has no derivative in the parameters of phi: evaluate it under "
                "torch.no_grad(), or let them require no gradients."
            )
        inside = self._in_reach(value)
        laws = self._laws(value, inside)
        log_density = torch.where(inside, laws.density.clamp_min(0).log(), -math.inf).to(self.tilt.dtype)
        moves = inside & log_density.isfinite()
        by_value = torch.where(moves, laws.slope / laws.density, 0.0)
        by_tilt = self.tilt.new_zeros(())
        if self.tilt.requires_grad:  # at 0 there is none, whatever the mean is
            by_tilt = torch.where(moves & (self.tilt > 0), 2 * self.tilt * (self.mean - value), 0.0)
        return with_slopes(log_density, (value, by_value), (self.tilt, by_tilt))

    def cdf(self, value: Tensor) -> Tensor:
        """P(W <= value); no gradient."""
        inside = self._in_reach(value)
        cdf = self._laws(value, inside).cdf.clamp(0, 1)
        at_ends = torch.where((value > 0) | (self.tilt == math.inf) & (value == 0), 1.0, 0.0)
        return torch.where(inside, cdf, at_ends).to(self.tilt.dtype)

    def icdf(self, value: Tensor | float) -> Tensor:
        """The quantile at probability `value` in [0, 1], with an error below 1e-9 in the cdf; no gradient.

        Raises:
            ValueError: a probability is not in [0, 1].
        """
        value = torch.as_tensor(value, dtype=torch.float64, device=self.tilt.device)
        if not bool(((value >= 0) & (value <= 1)).all()):
            worst = value[~((value >= 0) & (value <= 1))].flatten()[0].item()
            raise ValueError(f"probabilities must be in [0, 1]; got {worst}.")
        inside = (value > 0) & (value < 1)
        w = self._quantile(torch.special.ndtri(torch.where(inside, value, 0.5)))
        at_ends = torch.where(value == 1, math.inf, 0.0)
        return torch.where(self.tilt == math.inf, 0.0, torch.where(inside, w, at_ends)).to(self.tilt.dtype)

    def sample(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws of shape sample_shape + batch_shape: quantiles at normal scores."""
        shape = self._extended_shape(torch.Size(sample_shape))
        score = torch.empty(shape, dtype=torch.float64, device=self.tilt.device).normal_(generator=generator)
        return torch.where(self.tilt == math.inf, 0.0, self._quantile(score)).to(self.tilt.dtype)

    def _at_finite_tilt(self, moment: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.where(self.tilt < math.inf, moment(self._square()), 0.0).to(self.tilt.dtype)

    def _square(self) -> Tensor:
        return torch.where(self.tilt < math.inf, self.tilt, 1.0).double().square()

    def _in_reach(self, value: Tensor) -> Tensor:
        """Whether values are inside the support, and P(W > w) <= e^{-c^2 w} / phi(c^2) no number too small to be."""
        r = self._square()
        sunk = r * value + torch.where(r == 0, 0.0, self._transform(r).detach()) > _SMALLEST
        return (value > 0) & (value < math.inf) & (self.tilt < math.inf) & ~sunk

    def _laws(self, value: Tensor, inside: Tensor) -> Laws:
        """Cdf and density at the values inside the support, anything at the others."""
        if self._validate_args:
            self._validate_sample(value)
        with torch.no_grad():
            r = self._square()
            self._transform.checked(torch.where(r == 0, 1.0, r))
            w = torch.where(inside, value, 1.0).double()
            w = w.expand(torch.broadcast_shapes(w.shape, r.shape))
            # A phi without its logarithm underflows at the saddle points of the smallest w, whose cdf is zero anyway.
            limit = math.inf if self._transform.phi is None else self._transform.fallen(r, self._depth(r))
            known = True if isinstance(limit, float) else w >= self._transform.cumulants(limit)[0]
            model = SaddleModel.reference(self._transform, r)
            for nodes in ((24, 16), (96, 64)):  # the more for laws that are very skew
                laws, coarse = (Contour.through(self._transform, r, w, model, n, limit).laws() for n in nodes)
                bad = inside & ~((laws.cdf - coarse.cdf).abs() < _TOLERANCE)
                if not bool(bad.any()):
                    break
            # A branch cut of phi in the wrong place leaves every contour another result.
            self._refuse(bad, w)
            return replace(laws, density=laws.density * known)

    def _depth(self, r: Tensor) -> Tensor:
        """The number of nats that phi may fall from r, at a distance that `fallen` returns up to a factor of two."""
        return (0.8 * _DEEPEST + self._transform(r)).clamp(1.0, _DEEPEST)

    def _quantile(self, score: Tensor) -> Tensor:
        with torch.no_grad():
            r = self._square()
            self._transform.checked(torch.where(r == 0, 1.0, r))
            shape = torch.broadcast_shapes(score.shape, r.shape)
            score, r = score.expand(shape), r.expand(shape)
            if not self._transform.is_elementwise(score.device):
                w, failed = solve(self._transform, r, score, elementwise=False)
                self._refuse(failed, w)
                return w
            score, r = score.flatten(), r.flatten()
            found = interpolated(self._transform, r.sqrt(), score)
            w, waiting = (torch.empty_like(score), torch.ones_like(score, dtype=torch.bool)) if found is None else found
            rest = waiting.nonzero().squeeze(-1)
            failed = torch.zeros_like(waiting)
            for part in rest.split(_CHUNK):
                w[part], failed[part] = solve(self._transform, r[part], score[part], elementwise=True)
                if bool(failed[part].any()):
                    w[part], failed[part] = solve(self._transform, r[part], score[part], elementwise=True, num_nodes=64)
            self._refuse(failed.view(shape), w.view(shape))
            return w.view(shape)

    def _refuse(self, bad: Tensor, w: Tensor) -> None:
        if bool(bad.any()):
            index = tuple(bad.nonzero()[0].tolist())
            tilt = self.tilt.expand(bad.shape)[index].item()
            raise InversionError(
                f"the numerical inversion of phi does not converge at datum {index}, tilt {tilt:.6g}, w "
                f"{w[index].item():.6g}. phi must be completely monotone, analytic off the negative real axis and "
                "accurate to rounding at complex arguments there; p(w) must have a density."
            )
