"""Symmetric noise given by one completely monotone function phi, phi(0) = 1.

    p(y) = C phi(c (y - loc)^2),    1/C = int phi(c x^2) dx = 2 / sqrt(c) int_0^inf phi(s^2) ds

All integrals live on the half line in s = sqrt(c) |y - loc|, so one table serves every curvature c. Panels are
geometric, four to an octave, with Gauss-Legendre in each: phi(s^2) is analytic on s > 0 and decreasing, hence smooth at
that scale whatever its own scale is. They start where phi = 1 to rounding and end where the floating-point range ends;
a power-law tail beyond is summed as a geometric series, and a ratio of 1 or more means that the integral diverges.
The tail probabilities keep their relative accuracy of about 1e-12 down to 1e-30.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from gpytorch.distributions import Distribution
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.utils import broadcast_all

LogPhi = Callable[[Tensor], Tensor]

_NODES, _WEIGHTS = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(24))
_PER_OCTAVE = 4
_BELOW_HALF_WIDTH = 60  # the first panel starts 60 octaves below the width of phi
_LAST_EXPONENT = 500  # s^2 = 2^1000 is near the end of float64
_DIVERGENT = 0.999  # a tail counts as divergent if its masses in neighbouring octaves have at least this ratio
_SMALLEST_LOG_PHI = -690.0  # log phi above it is exact even if the user's phi is not computed in log space
_NEWTON_STEPS = 100


@dataclass(frozen=True)
class _Panels:
    """Geometric panels of the half line: edges 0, then 2^first, 2^(first + 1/4), ..., 2^_LAST_EXPONENT."""

    edges: Tensor  # (P + 1,)
    nodes: Tensor  # (P, 24)
    log_weights: Tensor  # (P, 24)

    @classmethod
    def of(cls, log_phi: LogPhi, device: torch.device) -> _Panels:
        with torch.no_grad():
            exponents = torch.arange(-_LAST_EXPONENT, _LAST_EXPONENT + 1, dtype=torch.float64, device=device)
            values = _evaluate(log_phi, (2.0**exponents).square())
            if not abs(float(_evaluate(log_phi, torch.zeros_like(exponents[:1])))) < 1e-6:
                raise ValueError("log_phi must map 0 to 0, i.e. phi(0) = 1; put a factor into log_constant.")
            wide = values > -math.log(2.0)
            if bool(values.isnan().any() | (values.diff() > 1e-6).any()) or not bool(wide[0] & ~wide[-1]):
                raise ValueError("log_phi must be defined on r > 0 and decrease from 0 towards -inf: phi does not.")
            first = max(int(wide.sum()) - 1 - _LAST_EXPONENT - _BELOW_HALF_WIDTH, -_LAST_EXPONENT)
            steps = torch.arange(first * _PER_OCTAVE, _LAST_EXPONENT * _PER_OCTAVE + 1, device=device)
            edges = torch.cat([values.new_zeros(1), 2.0 ** (steps.double() / _PER_OCTAVE)])
            return cls(edges, *_rule(edges[:-1], edges[1:]))

    def log_masses(self, log_phi: LogPhi, power: float = 0.0) -> Tensor:  # (P + 1,)
        """Log int s^power phi(s^2) ds over each panel and beyond them, inf if the rest diverges; differentiable."""
        r = self.nodes.square()
        with torch.no_grad():
            underflow = _evaluate(log_phi, r) == -math.inf
        # Where phi(r) is zero, its logarithm has the derivative 0/0 in phi's parameters: keep autograd away from there.
        inside = _evaluate(log_phi, torch.where(underflow, 1.0, r))
        values = torch.where(underflow, -math.inf, inside)
        masses = torch.logsumexp(self.log_weights + values + power * self.nodes.log(), -1)
        nothing = masses.new_full((1,), -math.inf)
        # In some panel before the last, phi becomes subnormal and its logarithm coarse, or a log_phi that scales its
        # argument reaches the end of the floating-point range: that panel and those beyond are the rest.
        regular = (values > _SMALLEST_LOG_PHI).all(-1)
        last = int(regular.nonzero()[-1]) - 1
        if bool(masses[last] < masses.max() - 800):  # no power law: nothing is left
            return torch.cat([masses, nothing])
        log_ratio = masses[last] - masses[last - 1]
        if bool(_PER_OCTAVE * log_ratio < math.log(_DIVERGENT)):
            rest = (masses[last] + log_ratio - (-log_ratio.expm1()).log()).unsqueeze(0)
        else:
            rest = -nothing
        return torch.cat([masses[: last + 1], nothing.expand(masses.shape[0] - last - 1), rest])


def log_normalizer(
    log_phi: LogPhi,
    curvature: Tensor,  # any shape
) -> Tensor:
    """Log C = -log int phi(curvature x^2) dx over the real line, of the shape of curvature.

    Args:
        log_phi: r -> log phi(r), elementwise, r a float64 vector; phi completely monotone, phi(0) = 1.
        curvature: positive.

    Raises:
        ValueError: curvature is not positive, phi(0) != 1, phi is not decreasing, or the integral diverges.

    Example:
        >>> import torch
        >>> log_normalizer(lambda r: -r, torch.tensor(0.5, dtype=torch.float64)).exp()  # 1 / sqrt(2 pi)
        tensor(0.3989, dtype=torch.float64)
    """
    if not bool((curvature > 0).all()):
        raise ValueError("curvature must be positive.")
    half = _Panels.of(log_phi, curvature.device).log_masses(log_phi).logsumexp(0)
    if bool(half == math.inf):
        raise ValueError(
            "int phi(x^2) dx diverges, or converges too slowly to tell: phi must decay faster than r^-0.5."
        )
    return curvature.log() / 2 - (half + math.log(2.0)).to(curvature.dtype)


class RadialNoise(Distribution):
    """Noise with density C phi(curvature (y - loc)^2).

    `log_prob` is differentiable in everything; `cdf`, `icdf` and `sample` carry no gradient. Pickling needs a log_phi
    that can be pickled: not a lambda.

    Args:
        loc: centre of symmetry.
        log_phi: r -> log phi(r), elementwise and of one shape with r; phi completely monotone, phi(0) = 1.
        curvature: positive, broadcast with loc.
        log_constant: log C, broadcast with loc; computed by `log_normalizer` if left out.
        validate_args: as in torch.distributions.

    Example:
        >>> import torch
        >>> noise = RadialNoise(torch.zeros(()), lambda r: -r, torch.tensor(0.5))  # phi = exp(-r): a Gaussian
        >>> noise.log_prob(torch.zeros(()))
        tensor(-0.9189)
    """

    arg_constraints = {"loc": constraints.real, "curvature": constraints.positive}
    support = constraints.real

    def __init__(
        self,
        loc: Tensor,
        log_phi: LogPhi,
        curvature: Tensor | float,
        log_constant: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.loc, self.curvature = broadcast_all(loc, curvature)
        self.log_phi, self.log_constant = log_phi, log_constant
        self._table: _Table | None = None
        super().__init__(self.loc.shape, validate_args=validate_args)

    def expand(self, batch_shape: torch.Size, _instance: RadialNoise | None = None) -> RadialNoise:
        """The same distribution, repeated over `batch_shape`."""
        new = self._get_checked_instance(RadialNoise, _instance)
        new.loc, new.curvature = self.loc.expand(batch_shape), self.curvature.expand(batch_shape)
        new.log_phi, new.log_constant, new._table = self.log_phi, self.log_constant, self._table
        super(RadialNoise, new).__init__(torch.Size(batch_shape), validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def mean(self) -> Tensor:
        """The location, or nan where the first moment diverges."""
        return self.loc if self.table.log_moment(1) < math.inf else torch.full_like(self.loc, math.nan)

    @property
    def variance(self) -> Tensor:
        """The second moment about loc; inf where it diverges (nan where the mean does too, as torch's StudentT)."""
        if self.table.log_moment(1) == math.inf:
            return torch.full_like(self.loc, math.nan)
        return math.exp(self.table.log_moment(2)) / self.curvature

    @property
    def table(self) -> _Table:
        """Masses of the panels, made at the first use."""
        if self._table is None:
            self._table = _Table(self.log_phi, self.loc.device)
        return self._table

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density; value and result broadcast with the batch shape."""
        if self._validate_args:
            self._validate_sample(value)
        constant = log_normalizer(self.log_phi, self.curvature) if self.log_constant is None else self.log_constant
        return constant + self.log_phi(self.curvature * (value - self.loc).square())

    def cdf(self, value: Tensor) -> Tensor:
        """P(Y <= value), relatively accurate in the lower tail; no gradient."""
        if self._validate_args:
            self._validate_sample(value)
        with torch.no_grad():
            x = (value - self.loc).double() * self.curvature.double().sqrt()
            tail = self.table.tail(x.abs())
            return torch.where(x > 0, 1 - tail, tail).to(torch.promote_types(value.dtype, self.loc.dtype))

    def icdf(self, value: Tensor) -> Tensor:
        """The quantile at probability `value` in [0, 1]; no gradient."""
        with torch.no_grad():
            q = value.double()
            s = self.table.inverse_tail(torch.minimum(q, 1 - q))
            x = torch.where(q < 0.5, -s, s) / self.curvature.double().sqrt()
            return (self.loc.double() + x).to(self.loc.dtype)

    def sample(
        self, sample_shape: torch.Size | tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws of shape sample_shape + batch_shape by inversion; from torch's global generator by default."""
        shape = self._extended_shape(torch.Size(sample_shape))
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64, device=self.loc.device)
        # torch.rand may be 0, whose quantile is -inf.
        return self.icdf(uniform.clamp(min=torch.finfo(torch.float64).tiny))


class _Table:
    """Tail probabilities in s at the edges of the panels."""

    def __init__(self, log_phi: LogPhi, device: torch.device) -> None:
        with torch.no_grad():
            self.log_phi = log_phi
            self.panels = _Panels.of(log_phi, device)
            masses = self.panels.log_masses(log_phi)  # (P + 1,)
            self.log_total = -log_normalizer(log_phi, masses.new_ones(()))
            # P(s > edge) / 2: summed from the far end, so the smallest keep their digits.
            self.log_tails = (masses - self.log_total).flip(0).logcumsumexp(0).flip(0)  # (P + 1,)
            self.tails = self.log_tails.exp()

    def log_moment(self, power: float) -> float:
        """Log E s^power, or inf."""
        with torch.no_grad():
            half = self.panels.log_masses(self.log_phi, power).logsumexp(0)
            return float(half + math.log(2.0) - self.log_total)

    def density(self, s: Tensor) -> Tensor:
        return (_evaluate(self.log_phi, s.square()) - self.log_total).exp()

    def tail(self, s: Tensor) -> Tensor:  # (*shape) of s >= 0
        """P(x > s) <= 1/2: the tail from the next edge, and the rest of this panel by a local rule."""
        return self.log_tail(s).exp()

    def log_tail(self, s: Tensor) -> Tensor:  # (*shape) of s >= 0
        """Log P(x > s)."""
        edges = self.panels.edges
        last = edges.shape[0] - 1
        panel = (torch.searchsorted(edges, s.contiguous(), right=True) - 1).clamp(max=last)
        right = edges[(panel + 1).clamp(max=last)]
        inside = panel < last
        nodes, log_weights = _rule(torch.where(inside, s, 0.0), torch.where(inside, right, 1.0))
        local = (log_weights + _evaluate(self.log_phi, nodes.square()) - self.log_total).logsumexp(-1)
        rest = self.log_tails[(panel + 1).clamp(max=last)]
        # Beyond 2^500 only an infinite s is of interest.
        end = torch.where(s.isinf(), -math.inf, self.log_tails[-1])
        tail = torch.where(inside, torch.logaddexp(local, rest), end)
        return torch.where(s.isnan(), s, tail)

    def log_cdf(self, z: Tensor) -> Tensor:
        """Log P(x <= z), of either sign."""
        far = self.log_tail(z.abs().double())
        return torch.where(z < 0, far, torch.log1p(-far.exp())).to(z.dtype)

    def inverse_tail(self, p: Tensor) -> Tensor:  # (*shape) of 0 <= p <= 1/2
        """S with P(x > s) = p: the panel from the table, then safeguarded Newton on log P in s."""
        edges, last = self.panels.edges, self.panels.edges.shape[0] - 1
        above = torch.searchsorted(-self.tails, -p.contiguous(), right=True).clamp(1, last)
        low, high = edges[above - 1], edges[above]
        target = p.clamp(min=torch.finfo(p.dtype).tiny).log()
        s = low
        for _ in range(_NEWTON_STEPS):
            tail = self.tail(s)
            excess = tail.log() - target  # decreasing in s
            low, high = torch.where(excess >= 0, s, low), torch.where(excess <= 0, s, high)
            newton = s + excess * tail / self.density(s)
            inside = (newton > low) & (newton < high)
            following = torch.where(inside, newton, (low + high) / 2)
            settled = (following - s).abs() <= 4 * torch.finfo(s.dtype).eps * s
            s = torch.where(excess == 0, s, following)
            if bool((settled | (excess == 0)).all()):
                break
        s = torch.where(p == 0.5, 0.0, s)
        return torch.where(p > 0, s, torch.where(p == 0, math.inf, math.nan))


def _rule(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:  # (*shape, 24) each
    """Gauss-Legendre nodes and log weights on [left, right]."""
    half = ((right - left) / 2).unsqueeze(-1)
    nodes = left.unsqueeze(-1) + half * (1 + _NODES.to(left.device))
    return nodes, (half * _WEIGHTS.to(left.device)).log()


def _evaluate(log_phi: LogPhi, r: Tensor) -> Tensor:
    """log_phi as a function of vectors: tables know no batch."""
    values = log_phi(r.flatten())
    if values.shape != r.flatten().shape:
        raise ValueError(
            f"log_phi must be elementwise: it mapped shape ({r.numel()},) to {tuple(values.shape)}. Its parameters "
            "must be scalars; put a batch of scales into curvature."
        )
    return values.to(r.dtype).view(r.shape)
