r"""Integrals against a Gaussian of functions known to be analytic in a strip about the real line, by equal steps.

Where g is analytic for |Im f| < a, the trapezoidal rule with step h (in standard deviations s, r = a / s) errs by about

    exp(r^2 / 2 - 2 pi r / h)                                                      [Trefethen & Weideman 2014, Thm. 5.1]

so that the step follows from r alone, and a Gaussian no wider than the strip takes some 40 nodes, where the adaptive
rule, which has to look for narrow features at every knot, takes hundreds. With twice the step the error has half the
exponent: the rule of every second node is the check. Data that fail it, or whose Gaussian is far wider than the strip,
are left to the adaptive rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gpext.quadrature.adaptive import expectation
from gpext.quadrature.gauss_kronrod import FINEST, Function
from gpext.quadrature.tilted import TiltedMoments, tilted_moments

Part = Callable[[Tensor], tuple[Function, Tensor | None]]
"""Rows (n,) of the data -> their function, of f (Q, ..., n), and its knots (J, ..., n)."""

_WIDTHS = (0.25, 0.4, 0.65, 1.0, 1.7, 3.0)  # s / a up to which Gaussians have as many nodes
_DIGITS = 32.0  # -log of the error
_REACH, _TILTED_REACH = 9.0, 12.0  # of the nodes; a tilted distribution may be some s away from the Gaussian
_ALIKE = 1e-5  # relative difference of a rule and its every second node: the rule has about twice as many digits
_NEXT_TO_NOTHING = 1e-6  # absolute expectations below which their relative accuracy no longer matters
_AT_ONCE = 2**20  # values of the function
_CUT = 1e-12  # share of the integral at the outermost nodes

_Fixed = Callable[[Function, Tensor, Tensor, float], tuple[Tensor, Tensor]]
_Adaptive = Callable[[Function, Tensor, Tensor, Tensor | None, float], Tensor]


def analytic_expectation(part: Part, mean: Tensor, variance: Tensor, strip: Tensor) -> Tensor:
    """Return E[g(f)] (..., N), differentiable in mean, variance and what g closes over, to about 1e-10 of E|g|.

    Args:
        part: the functions g of some of the data.
        mean: m (..., N).
        variance: v (..., N), nonnegative.
        strip: a (..., N), half the width of the strip in which g is analytic and grows little.

    Example:
        >>> import torch
        >>> def part(rows):
        ...     return lambda f: f.tanh().square(), None  # analytic for |Im f| < pi / 2
        >>> zero, one = torch.zeros(1).double(), torch.ones(1).double()
        >>> analytic_expectation(part, zero, one, 1.5 * one).round(decimals=6)
        tensor([0.3943], dtype=torch.float64)
    """

    def adaptive(function: Function, m: Tensor, v: Tensor, knots: Tensor | None, finest: float) -> Tensor:
        return expectation(function, m, v, knots=knots, finest=finest).unsqueeze(0)

    return _by_width(part, mean, variance, strip, _fixed_expectation, adaptive)[0]


def analytic_tilted_moments(part: Part, mean: Tensor, variance: Tensor, strip: Tensor) -> TiltedMoments:
    """Return the moments of N(f | mean, variance) exp(l(f)), to about 1e-10 of their scale, as `tilted_moments` does.

    Args:
        part: the functions l of some of the data.
        mean: m (..., N).
        variance: v (..., N), positive.
        strip: a (..., N), half the width of the strip in which exp(l) is analytic and grows little.

    Example:
        >>> import torch
        >>> def part(rows):
        ...     return lambda f: -0.5 * f.square(), None
        >>> zero, one = torch.zeros(1).double(), torch.ones(1).double()
        >>> analytic_tilted_moments(part, zero, one, 9 * one).variance.round(decimals=6)
        tensor([0.5000], dtype=torch.float64)
    """

    def adaptive(function: Function, m: Tensor, v: Tensor, knots: Tensor | None, finest: float) -> Tensor:
        found = tilted_moments(function, m, v, knots=knots, finest=finest)
        return torch.stack([found.log_normalizer, found.mean, found.variance, found.third, found.fourth])

    log_normalizer, *others = _by_width(part, mean, variance, strip, _fixed_moments, adaptive)
    return TiltedMoments(log_normalizer, *(moment.detach() for moment in others))


def _by_width(
    part: Part, mean: Tensor, variance: Tensor, strip: Tensor, fixed: _Fixed, adaptive: _Adaptive
) -> Tensor:  # (K, ..., N)
    """Return K integrals for each datum: by fixed rules where they resolve it, else adaptively."""
    mean, variance = torch.broadcast_tensors(mean, variance)
    dtype = torch.promote_types(mean.dtype, variance.dtype)
    with torch.no_grad():
        relative = (variance.sqrt() / strip).expand(mean.shape).reshape(-1, mean.size(-1))
        widest, alive = relative.amax(0), (relative > 0).all(0)
    found, rows_of, rest = [], [], [(~(alive & (widest <= _WIDTHS[-1]))).nonzero().squeeze(-1)]
    below = 0.0
    for width in _WIDTHS:
        rows = (alive & (widest > below) & (widest <= width)).nonzero().squeeze(-1)
        below = width
        if not len(rows):
            continue
        for some in rows.split(max(_AT_ONCE // (_num_nodes(width, _TILTED_REACH) * len(relative)), 1)):
            values, resolved = fixed(part(some)[0], mean[..., some], variance[..., some], width)
            resolved = resolved.reshape(-1, len(some)).all(0)
            if not bool(resolved.all()):  # once more without them: their derivatives may be infinite
                rest.append(some[~resolved])
                some = some[resolved]
                if not len(some):
                    continue
                values, _ = fixed(part(some)[0], mean[..., some], variance[..., some], width)
            found.append(values.to(dtype))
            rows_of.append(some)
    left = torch.cat(rest)
    if len(left) or not len(rows_of):
        function, knots = part(left)
        # The narrowest feature at a knot is as wide as the strip.
        finest = float(torch.cat([widest.new_ones(1), 1 / widest[left]]).amin().clamp(min=FINEST))
        found.append(adaptive(function, mean[..., left], variance[..., left], knots, finest).to(dtype))
        rows_of.append(left)
    return torch.cat(found, -1)[..., torch.cat(rows_of).argsort()]


def _num_nodes(width: float, reach: float) -> int:  # odd
    r = 1 / width
    return 2 * math.ceil(reach * (_DIGITS + 0.5 * r**2) / (2 * math.pi * r)) + 1


def _nodes(mean: Tensor, width: float, reach: float) -> Tensor:  # (Q, 1, ..., 1)
    z = torch.linspace(-reach, reach, _num_nodes(width, reach), dtype=torch.float64, device=mean.device)
    return z.view(-1, *mean.dim() * (1,))


def _fixed_expectation(function: Function, mean: Tensor, variance: Tensor, width: float) -> tuple[Tensor, Tensor]:
    z = _nodes(mean, width, _REACH)
    weights = torch.softmax(-0.5 * z.square(), 0)
    terms = weights * function(mean.double() + variance.double().sqrt() * z)
    value = terms.sum(0)
    with torch.no_grad():
        change = (terms[::2].sum(0) / weights[::2].sum() - value).abs()
        ends = terms[0].abs() + terms[-1].abs()
        size = terms.abs().sum(0).clamp_min(_NEXT_TO_NOTHING)
        resolved = (change <= _ALIKE * size) & (ends <= _CUT * size)
    return value.unsqueeze(0), resolved


def _fixed_moments(function: Function, mean: Tensor, variance: Tensor, width: float) -> tuple[Tensor, Tensor]:
    z, sd = _nodes(mean, width, _TILTED_REACH), variance.double().sqrt()
    log_weights = torch.log_softmax(-0.5 * z.square(), 0)
    exponent = log_weights + function(mean.double() + sd * z)
    log_normalizer = torch.logsumexp(exponent, 0)
    with torch.no_grad():
        share = (exponent - log_normalizer).exp_()
        change = (share[::2].sum(0) / log_weights[::2].exp().sum() - 1).abs()
        resolved = (change <= _ALIKE) & (share[0] + share[-1] <= _CUT)
        centre = (share * z).sum(0)
        offset = z - centre
        moments, weighted = [], share * offset
        for k in (2, 3, 4):
            weighted = weighted * offset  # share offset^k
            moments.append(sd**k * weighted.sum(0))
        shifted = mean.double() + sd * centre
    return torch.stack([log_normalizer, shifted, *moments]), resolved
