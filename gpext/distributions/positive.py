"""Distributions of a positive scale w whose draws can come from a generator: what scale mixtures are mixed by."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod

import torch
from gpytorch.distributions import Distribution
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.utils import broadcast_all

_MAX_STEPS = 200  # halvings of a bracket of logarithms reach the last bit of a float64 long before
_LOG_RANGE = (-745.0, 709.0)  # of float64


class PositiveDistribution(Distribution):
    """A distribution of w >= 0, elementwise over its batch.

    A subclass names its tensors in `arg_constraints`, sets them, all of the batch shape, and then calls `__init__`. It
    gives `sample`, and `cdf` and `log_prob` where it has them; `icdf` follows.

    Example:
        >>> import torch
        >>> from gpext.distributions import PolyaGamma
        >>> omega = PolyaGamma(torch.tensor(1.0), torch.tensor(0.0))
        >>> isinstance(omega, PositiveDistribution), omega.quantile(0.5).round(decimals=3)
        (True, tensor(0.1890))
    """

    arg_constraints: dict[str, constraints.Constraint]
    support = constraints.nonnegative

    def expand(self, batch_shape: torch.Size, _instance: PositiveDistribution | None = None) -> PositiveDistribution:
        """The same distribution, repeated over `batch_shape`."""
        new = self._get_checked_instance(type(self), _instance)
        for name in self.arg_constraints:
            setattr(new, name, getattr(self, name).expand(batch_shape))
        super(PositiveDistribution, new).__init__(torch.Size(batch_shape), validate_args=False)
        new._validate_args = self._validate_args
        return new

    @abstractmethod
    def sample(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws of shape sample_shape + batch_shape, from torch's global generator if none is given."""

    def icdf(self, value: Tensor | float) -> Tensor:
        """The quantile at probability `value` in [0, 1], to rounding of the cdf; no gradient.

        Raises:
            ValueError: a probability is not in [0, 1].
        """
        parameter = getattr(self, next(iter(self.arg_constraints)))
        value = torch.as_tensor(value, dtype=parameter.dtype, device=parameter.device)
        if not bool(((value >= 0) & (value <= 1)).all()):
            worst = value[~((value >= 0) & (value <= 1))].flatten()[0].item()
            raise ValueError(f"probabilities must be in [0, 1]; got {worst}.")
        with torch.no_grad():
            q = value.expand(torch.broadcast_shapes(value.shape, self.batch_shape)).double()
            twin = self._in_float64()
            low, high = torch.full_like(q, _LOG_RANGE[0]), torch.full_like(q, _LOG_RANGE[1])
            x = torch.where(twin.mean.isfinite() & (twin.mean > 0), twin.mean, 1.0).log().expand(q.shape)
            settled = torch.zeros_like(q, dtype=torch.bool)
            for _ in range(_MAX_STEPS):
                # Newton for the normal score of the cdf, which is nearly linear in x = log w.
                w = x.exp()
                cdf = twin.cdf(w)
                low, high = torch.where(cdf <= q, x, low), torch.where(cdf >= q, x, high)
                score = torch.special.ndtri(cdf)
                slope = math.sqrt(2 * math.pi) * torch.exp(0.5 * score.square() + twin.log_prob(w) + x)
                newton = x + (torch.special.ndtri(q) - score) / slope
                inside = (newton > low) & (newton < high)
                following = torch.where(inside, newton, low + (high - low) / 2)
                rounding = 4 * torch.finfo(x.dtype).eps
                # A step of Newton's shorter than rounding may end on the bracket, which is no reason to leave.
                step = torch.minimum((following - x).abs(), torch.where(newton.isnan(), math.inf, (newton - x).abs()))
                settled |= (step <= rounding * (1 + x.abs())) | ((cdf - q).abs() <= rounding * q)
                x = torch.where(settled, x, following)
                if bool(settled.all()):
                    break
            w = torch.where(q == 0, 0.0, torch.where(q == 1, math.inf, x.exp()))
            return w.to(value.dtype)

    def quantile(self, q: Tensor | float) -> Tensor:
        """The same as `icdf`."""
        return self.icdf(q)

    def _in_float64(self) -> PositiveDistribution:
        twin = self.expand(self.batch_shape)
        for name in self.arg_constraints:
            setattr(twin, name, getattr(twin, name).double())
        twin._validate_args = False
        return twin


def with_slopes(value: Tensor, *slopes: tuple[Tensor, Tensor]) -> Tensor:
    """Return a value that is outside the graph with first derivatives: in each x of pairs (x, dvalue / dx)."""
    if torch.is_grad_enabled():
        for x, slope in slopes:
            if x.requires_grad:
                move = torch.where(x.isfinite(), x - x.detach(), 0.0)
                value = value + slope.detach().to(value.dtype) * move
    return value


def broadcast_floating(*values: Tensor | float) -> tuple[Tensor, ...]:
    """Return parameters as tensors of one shape and one floating dtype: numbers and integers take that of the rest."""
    tensors = broadcast_all(*(_floating(value) for value in values))
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
    return tuple(t.to(dtype) for t in tensors)


def _floating(value: Tensor | float) -> Tensor | float:
    if isinstance(value, Tensor) and not value.is_floating_point():
        return value.to(torch.get_default_dtype())
    return value if isinstance(value, Tensor) else float(value)  # NumPy's numbers, too
