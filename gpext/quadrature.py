"""One-dimensional integrals against a Gaussian: adaptive for all data at once, and fixed Gauss-Hermite.

    expectation:      E[g] = int g(f) N(f | m, v) df
    log_expectation:  log E[e^l] = log int exp(l(f)) N(f | m, v) df,   wholly in log space

The adaptive rule is Gauss-Kronrod 7-15 on panels, in the standardised coordinate z = (f - m) / sqrt(v). Every datum has
its own panels but all data have equally many, so `function` sees f of shape (Q, *shape) and broadcasts against its
targets. Panels start graded geometrically towards the knots (a likelihood 1e-9 times as wide as the Gaussian is still
seen, at its target) and towards the mean; each round a datum bisects its worst panels, and its range grows while an end
panel carries mass. The error of a panel is QUADPACK's [Piessens et al. 1983, QUADPACK, section 2.2.3.1]; the tolerance
is relative to int |g| N.

Derivatives: nodes are placed without autograd and then frozen in f; the frozen sum is evaluated once more with
autograd, where N(f | m, v) alone carries the derivative in m and v. A kink in g is therefore harmless. In float64 the
derivative in m (in v) carries rounding noise of about 1e-16 |g| / sd (1e-16 |g| / v): 1e-6 relative at v = 1e-10.

Memory: some 180 nodes a datum without knots, 500 to 1000 with one knot, times N, in float64, a few times over. Slice
the data to bound it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

# Gauss-Kronrod 7-15 on [0, 1] [QUADPACK, qk15]: abscissae (every second one, from index 1, is Gauss-7's), then weights.
_ABSCISSAE = (
    0.991455371120812639206854697526329,
    0.949107912342758524526189684047851,
    0.864864423359769072789712788640926,
    0.741531185599394439863864773280788,
    0.586087235467691130294144691693013,
    0.405845151377397166906606412076961,
    0.207784955007898467600689403773245,
    0.000000000000000000000000000000000,
)
_KRONROD = (
    0.022935322010529224963732008058970,
    0.063092092629978553290700663189204,
    0.104790010322250183839876322541518,
    0.140653259715525918745189590510238,
    0.169004726639267902826583426598550,
    0.190350578064785409913256402421014,
    0.204432940075298892414161999234649,
    0.209482141084727828012999174891714,
)
_GAUSS = (
    0.129484966168869693270611432679082,
    0.279705391489276667901467771423780,
    0.381830050505118944950369775488975,
    0.417959183673469387755102040816327,
)
_CORE_EDGES = (0.0, 1.2, 2.5, 4.0, 6.0, 8.5, 12.0)  # panel edges about the mean in sd: beyond 12 a Gaussian has 2e-33
_REACH = _CORE_EDGES[-1]
_FINEST = 1e-9  # smallest initial panel at a knot, in sd
_GRADING = 8.0  # ratio of neighbouring panels next to a knot
_MAX_LADDER = (
    24  # panels on one side of a knot; a knot that is very far away gets a steeper ladder instead of a longer one
)
_EPSILON = torch.finfo(torch.float64).eps
_MAX_SPLITS = 16  # panels bisected per datum and round
_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)

Function = Callable[[Tensor], Tensor]


class QuadratureWarning(UserWarning):
    """Some integrals did not reach the requested tolerance."""


class QuadratureStatus(Enum):
    """How an adaptive integration ended; the text is the remedy."""

    CONVERGED = "every integral reached the tolerance"
    MAX_ROUNDS = "pass knots where the integrand has kinks or narrow features, or increase max_rounds"
    NON_FINITE = "the function returned nan or +-inf where the Gaussian has mass: check its formula at the mean"


@dataclass(frozen=True)
class QuadratureResult:
    """Outcome of `integrate`.

    Attributes:
        value: (*shape) the integral, or its logarithm.
        error: (*shape) estimated absolute error of `value`; inf or nan where the integrand is not finite.
        resolved: (*shape) bool, whether the error is within the tolerance, or within the rounding of f and of the
            exponent that no rule can avoid (a function 1e-9 wide is known to 1e-7 at f = 1); `error` includes it.
        nodes: (Q, *shape) float64 nodes f of the frozen rule.
        log_weights: (Q, *shape) float64 logarithms of its weights, the Gaussian density included:
            value = sum_q exp(log_weights_q) g(nodes_q).
        num_evaluations: evaluations of the function per datum.
        num_rounds: rounds of refinement.
        status: the worst outcome over the data.
    """

    value: Tensor
    error: Tensor
    resolved: Tensor
    nodes: Tensor
    log_weights: Tensor
    num_evaluations: int
    num_rounds: int
    status: QuadratureStatus


def expectation(
    function: Function,
    mean: Tensor,  # (*shape), broadcast with variance
    variance: Tensor,  # (*shape)
    *,
    knots: Tensor | None = None,  # (J, *shape) or broadcastable
    relative_tolerance: float | None = None,
    absolute_tolerance: float = 0.0,
    max_rounds: int = 40,
) -> Tensor:
    """E[function(f)] for f ~ N(mean, variance), elementwise.

    Args:
        function: maps f (Q, *shape), float64, to values broadcastable to (Q, *shape); elementwise in f.
        mean: means of the Gaussians.
        variance: their variances, zero allowed.
        knots: where the function has a kink or a feature much narrower than the Gaussian, e.g. a likelihood's target.
        relative_tolerance: accepted error over E|function(f)|; default 1e-10 in float64, 1e-6 in float32.
        absolute_tolerance: accepted error whatever E|function(f)| is.
        max_rounds: rounds of refinement before a `QuadratureWarning`.

    Returns:
        (*shape), in the dtype of mean and variance; differentiable in them and in what `function` closes over.

    Raises:
        ValueError: mean, variance or knots are not finite, or variance is negative.
    """
    result = integrate(
        function,
        mean,
        variance,
        knots=knots,
        relative_tolerance=relative_tolerance,
        absolute_tolerance=absolute_tolerance,
        max_rounds=max_rounds,
    )
    return _warned(result)


def log_expectation(
    log_function: Function,
    mean: Tensor,  # (*shape), broadcast with variance
    variance: Tensor,  # (*shape)
    *,
    knots: Tensor | None = None,  # (J, *shape) or broadcastable
    relative_tolerance: float | None = None,
    max_rounds: int = 40,
) -> Tensor:
    """Log E[exp(log_function(f))] for f ~ N(mean, variance), elementwise; no underflow however far the mass lies.

    Arguments, result and errors are those of `expectation`. The tolerance is relative to E[exp(log_function(f))], so
    absolute for its logarithm.
    """
    result = integrate(
        log_function,
        mean,
        variance,
        log_space=True,
        knots=knots,
        relative_tolerance=relative_tolerance,
        max_rounds=max_rounds,
    )
    return _warned(result)


def integrate(
    function: Function,
    mean: Tensor,
    variance: Tensor,
    *,
    log_space: bool = False,
    knots: Tensor | None = None,
    relative_tolerance: float | None = None,
    absolute_tolerance: float = 0.0,
    max_rounds: int = 40,
) -> QuadratureResult:
    """`expectation` (`log_expectation` if log_space) as a result with its error estimate, rule and status; never warns.

    The rule serves for further expectations under the same weight, e.g. the moments of a tilted distribution:
    `(result.log_weights + log_function(result.nodes)).softmax(0)` are probabilities of the nodes.
    """
    dtype = torch.promote_types(mean.dtype, variance.dtype)
    if relative_tolerance is None:
        relative_tolerance = 1e-10 if dtype == torch.float64 else 1e-6
    mean, variance = torch.broadcast_tensors(mean, variance)
    _require(mean, torch.isfinite(mean), "mean must be finite")
    _require(variance, torch.isfinite(variance) & (variance >= 0), "variance must be finite and not negative")
    mean, variance = mean.double(), variance.double()
    with torch.no_grad():
        sd = variance.sqrt()
        centres = _standardised_knots(knots, mean, sd)
        panels = _Panels(function, mean, sd, log_space, _initial_edges(centres, mean, log_space))
        num_rounds = 0
        while num_rounds < max_rounds and panels.refine(relative_tolerance, absolute_tolerance):
            num_rounds += 1
        shift, rows = panels.common()
        total, error, noise, allowed = panels.totals(rows, relative_tolerance, absolute_tolerance)
        resolved = error <= allowed
        error = error + noise
        z, widths = panels.freeze(rows, relative_tolerance, allowed)
        value = shift + total.log() if log_space else total
        if log_space:
            error = torch.where(total > 0, error / total, error)
        nodes = mean + sd * z
        log_weights = widths.log() - 0.5 * z.square() - _LOG_SQRT_2PI
    if torch.is_grad_enabled():
        # One node tells whether anything here carries a gradient; the frozen rule is evaluated again only then.
        probe = function(mean.detach().unsqueeze(0))
        if probe.requires_grad or mean.requires_grad or variance.requires_grad:
            value = _with_gradient(function, mean, variance, z, widths, value, log_space)
    status = QuadratureStatus.CONVERGED
    if not bool(resolved.all()):
        status = QuadratureStatus.MAX_ROUNDS if bool(torch.isfinite(error).all()) else QuadratureStatus.NON_FINITE
    return QuadratureResult(
        value.to(dtype), error.to(dtype), resolved, nodes, log_weights, panels.num_evaluations, num_rounds, status
    )


@lru_cache(maxsize=64)
def _hermite(num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
    return nodes, weights / weights.sum()


def gauss_hermite(
    num_nodes: int, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """Nodes and weights, each (num_nodes,), with sum_q w_q g(x_q) = E[g(x)] for x ~ N(0, 1).

    Exact for polynomials of degree < 2 num_nodes, computed in float64; the weights sum to 1.
    """
    if num_nodes < 1:
        raise ValueError(f"num_nodes must be at least 1; got {num_nodes}.")
    # Only the arrays are cached: a tensor made inside inference_mode could not be used for training later.
    nodes, weights = _hermite(num_nodes)
    return torch.tensor(nodes, dtype=dtype, device=device), torch.tensor(weights, dtype=dtype, device=device)


def gauss_legendre(
    num_nodes: int, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """Nodes and weights, each (num_nodes,), with sum_q w_q g(x_q) = int_0^1 g(x) dx.

    Exact for polynomials of degree < 2 num_nodes, computed in float64.
    """
    nodes, weights = np.polynomial.legendre.leggauss(num_nodes)
    return (
        torch.tensor(0.5 * (nodes + 1), dtype=dtype, device=device),
        torch.tensor(0.5 * weights, dtype=dtype, device=device),
    )


def _require(tensor: Tensor, valid: Tensor, expected: str) -> None:
    if bool(valid.all()):
        return
    index = tuple((~valid).nonzero()[0].tolist())
    raise ValueError(f"{expected}; got {tensor[index].item()} at index {index} of shape {tuple(tensor.shape)}.")


def _warned(result: QuadratureResult) -> Tensor:
    if result.status is not QuadratureStatus.CONVERGED:
        missed = ~result.resolved
        worst = result.error[missed].nan_to_num(nan=math.inf).max().item()
        warnings.warn(
            f"{int(missed.sum())} of {missed.numel()} integrals did not reach the tolerance after "
            f"{result.num_rounds} rounds; worst estimated error {worst:.1e}, first at index "
            f"{tuple(missed.nonzero()[0].tolist())}. Remedy: {result.status.value}.",
            QuadratureWarning,
            stacklevel=3,
        )
    return result.value


def _standardised_knots(knots: Tensor | None, mean: Tensor, sd: Tensor) -> Tensor:  # (J, *shape)
    if knots is None:
        return mean.new_zeros((0, *mean.shape))
    knots = knots.detach().to(mean).expand(knots.shape[0], *mean.shape)
    _require(knots, torch.isfinite(knots), "knots must be finite")
    # All nodes coincide when sd = 0, and z^2 must not overflow when sd is tiny.
    return torch.where(sd > 0, (knots - mean) / sd, torch.zeros_like(mean)).clamp(-1e100, 1e100)


def _initial_edges(centres: Tensor, mean: Tensor, log_space: bool) -> Tensor:  # (E, *shape), increasing along dim 0
    """Edges about the mean and ladders towards each knot, in z; duplicates make empty panels, which are harmless."""
    column = (-1,) + (1,) * mean.dim()
    core = mean.new_tensor(_CORE_EDGES)
    core = torch.cat([-core[1:].flip(0), core]).view(column).expand(-1, *mean.shape)
    if centres.shape[0] == 0:
        return core
    if log_space:
        lower, upper = centres.amin(0).clamp(max=0) - _REACH, centres.amax(0).clamp(min=0) + _REACH
    else:  # E[g] has its mass near the mean wherever the knots are
        lower, upper = torch.full_like(mean, -_REACH), torch.full_like(mean, _REACH)
    span = upper - lower  # (*shape)
    widest = float(span.max()) if span.numel() else 2 * _REACH
    length = min(math.ceil(math.log(widest / _FINEST, _GRADING)), _MAX_LADDER)
    fraction = torch.arange(length, dtype=mean.dtype, device=mean.device).view(column) / length
    ladder = _FINEST * (span / _FINEST) ** fraction  # (L, *shape)
    edges = [core, centres, lower.unsqueeze(0), upper.unsqueeze(0)]
    for centre in centres:
        edges += [centre - ladder, centre + ladder]
    far = math.ceil(math.log(widest / (2 * _REACH), _GRADING))
    if far > 0:  # a bump may lie anywhere between the mean and a distant knot
        fraction = torch.arange(1, min(far, _MAX_LADDER) + 1, dtype=mean.dtype, device=mean.device).view(column)
        ladder = _REACH * (span / _REACH) ** (fraction / (fraction.shape[0] + 1))
        edges += [-ladder, ladder]
    return torch.cat(edges).clamp(lower, upper).sort(0).values


class _Panels:
    """The panels of all data, in z, with what the rule says of each, as multiples of the panel's own exp(peak)."""

    def __init__(self, function: Function, mean: Tensor, sd: Tensor, log_space: bool, edges: Tensor) -> None:
        self.function, self.mean, self.sd, self.log_space = function, mean, sd, log_space
        self.rounding = (mean / sd).abs().nan_to_num(0.0, 0.0)  # (*shape) eps times this is the rounding of f, in z
        column = (-1,) + (1,) * (mean.dim() + 1)
        rule = [mean.new_tensor(values) for values in (_ABSCISSAE, _KRONROD, _GAUSS)]
        self.abscissae = torch.cat([-rule[0], rule[0][:-1].flip(0)]).view(column)  # increasing
        self.kronrod = torch.cat([rule[1], rule[1][:-1].flip(0)]).view(column)
        self.gauss = torch.cat([rule[2], rule[2][:-1].flip(0)]).view(column)
        self.num_evaluations = 0
        self.left, self.right = edges[:-1], edges[1:]  # (P, *shape)
        self.rows = self._evaluate(self.left, self.right)  # (6, P, *shape)

    def _append(self, left: Tensor, right: Tensor, rows: Tensor) -> None:
        self.left, self.right = torch.cat([self.left, left]), torch.cat([self.right, right])
        self.rows = torch.cat([self.rows, rows], dim=1)

    def _evaluate(self, left: Tensor, right: Tensor) -> Tensor:  # (6, P, *shape)
        """Integral, its absolute value's, error and rounding noise over exp(peak); log of hidden mass; peak."""
        half = (right - left) / 2
        z = (left + right) / 2 + half * self.abscissae  # (15, P, *shape)
        f = (self.mean + self.sd * z).flatten(0, 1)
        values = self.function(f).to(f).expand(f.shape).unflatten(0, z.shape[:2])
        self.num_evaluations += f.shape[0]
        exponent = -0.5 * z.square() - _LOG_SQRT_2PI
        if self.log_space:
            exponent = exponent + values
            peak = exponent.amax(0)
            terms = (exponent - torch.where(peak.isfinite(), peak, 0.0)).exp()
        else:
            density = exponent.exp()
            terms = torch.where(density > 0, density * values, 0.0)  # 0 * inf far in the tail is 0
            peak = torch.zeros_like(half)
        integral = (self.kronrod * terms).sum(0)
        magnitude = (self.kronrod * terms.abs()).sum(0)
        difference = (integral - (self.gauss * terms[1::2]).sum(0)).abs()
        spread = (self.kronrod * (terms - integral / 2).abs()).sum(0)
        scaled = spread * torch.where(spread > 0, (200 * difference / spread).pow(1.5).clamp(max=1), 0.0)
        # Rounding: of f, by eps |f|, and of the exponent, by eps times its parts. No bisection removes it.
        noise = terms.diff(dim=0).abs().sum(0) * (z.abs().amax(0) + self.rounding) / half
        if self.log_space:
            size = torch.where(terms > 0, values.abs() + 0.5 * z.square(), 0.0)
            noise = noise + (self.kronrod * terms * size).sum(0)
        noise = _EPSILON * noise
        error = torch.where(difference <= 4 * noise, difference, scaled)
        hidden = self._hidden(exponent) + half.log() if self.log_space else torch.full_like(half, -math.inf)
        rows = torch.cat([half * torch.stack([integral, magnitude, error, noise]), torch.stack([hidden, peak])])
        empty = rows.new_tensor([0.0, 0.0, 0.0, 0.0, -math.inf, -math.inf]).view((6,) + (1,) * half.dim())
        return torch.where(half > 0, rows, empty)

    @staticmethod
    def _hidden(exponent: Tensor) -> Tensor:  # (P, *shape)
        """Log of the mass, over the half-width, that may hide between a panel's outermost nodes and its edges.

        A panel far wider than a bump at its edge would report a tiny value and a tiny error. If the exponent, continued
        linearly from the two outermost nodes, climbs by more than 2 to the edge, the panel is hundreds of e-foldings
        long and unresolved; for a log-concave integrand the continuation bounds what is there.
        """
        gap = 1 - _ABSCISSAE[0]
        slope = gap / (_ABSCISSAE[0] - _ABSCISSAE[1])
        hidden = torch.full_like(exponent[0], -math.inf)
        for outer, inner in ((exponent[0], exponent[1]), (exponent[-1], exponent[-2])):
            climb = slope * (outer - inner)
            hidden = torch.where(climb > 2, torch.maximum(hidden, outer + climb), hidden)
        return hidden + math.log(gap)

    def common(self) -> tuple[Tensor, Tensor]:
        """The common exponent (*shape), 0 outside log space, and the first four rows over its exponential."""
        hidden, peak = self.rows[4], self.rows[5]
        if not self.log_space:
            return torch.zeros_like(self.mean), self.rows[:4]
        top = peak.amax(0)
        finite_top = torch.where(top.isfinite(), top, 0.0)
        integral, magnitude, error, noise = self.rows[:4] * (peak - finite_top).exp()
        # A continuation may overshoot by far; cut at the highest node it still marks the panel as the worst.
        half = (self.right - self.left) / 2
        error = error + torch.minimum((hidden - finite_top).exp(), half)
        return top, torch.stack([integral, magnitude, error, noise])

    def _end_masses(self, rows: Tensor) -> tuple[Tensor, Tensor]:  # (*shape) each
        """Mass of the leftmost and of the rightmost panel: what lies beyond the range is of that order."""
        mass = torch.where(self.right > self.left, rows[1] + rows[2], 0.0)
        below = torch.where(self.left <= self.left.amin(0), mass, 0.0).sum(0)
        above = torch.where(self.right >= self.right.amax(0), mass, 0.0).sum(0)
        return below, above

    def totals(self, rows: Tensor, relative: float, absolute: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Integral, its error, its rounding noise, and the allowed error, (*shape) each."""
        integral, magnitude, error, noise = rows.sum(1)
        below, above = self._end_masses(rows)
        allowed = torch.maximum((relative * magnitude).clamp(min=absolute), 2 * noise)
        return integral, error + below + above, noise, allowed

    def refine(self, relative: float, absolute: float) -> bool:
        """Bisect the worst panels and extend the range where it cuts mass; False if there is nothing left to do."""
        _, rows = self.common()
        _, total_error, _, allowed = self.totals(rows, relative, absolute)
        active = (total_error > allowed) & total_error.isfinite()
        if not bool(active.any()):
            return False
        error = rows[2]
        below, above = self._end_masses(rows)
        lower, upper = self.left.amin(0), self.right.amax(0)
        num_splits = min(int(((error > allowed / error.shape[0]) & active).sum(0).max()), _MAX_SPLITS)
        if num_splits > 0:
            worst = error.topk(num_splits, dim=0).indices  # (B, *shape)
            left, right = self.left.gather(0, worst), self.right.gather(0, worst)
            middle = (left + right) / 2
            halves = self._evaluate(torch.cat([left, middle]), torch.cat([middle, right]))
            self.right = self.right.scatter(0, worst, middle)
            self.rows = self.rows.scatter(1, worst.expand(6, *worst.shape), halves[:, :num_splits])
            self._append(middle, right, halves[:, num_splits:])
        grow_below, grow_above = (active & (mass > 0.1 * allowed) for mass in (below, above))
        if bool((grow_below | grow_above).any()):
            span = upper - lower
            left = torch.stack([torch.where(grow_below, lower - span, lower), upper])
            right = torch.stack([lower, torch.where(grow_above, upper + span, upper)])
            self._append(left, right, self._evaluate(left, right))
        return True

    def freeze(self, rows: Tensor, relative: float, allowed: Tensor) -> tuple[Tensor, Tensor]:  # (Q, *shape) each
        """Nodes z and weights of the panels that matter, equally many for all data."""
        num_panels = self.left.shape[0]
        weight = rows[1] + rows[2]
        keep = weight > 1e-3 * allowed / num_panels
        if not self.log_space:
            # A function may vanish where its derivative does not: keep what matters to the Gaussian as well.
            nearest = torch.maximum(self.left, -self.right).clamp(min=0)
            bound = (self.right - self.left) * (-0.5 * nearest.square()).exp()
            keep = keep | (bound > 1e-3 * relative / num_panels)
        keep = keep & (self.right > self.left)
        weight = torch.where(keep, weight.nan_to_num(nan=math.inf), -1.0)
        num_kept = max(int(keep.sum(0).max()), 1) if keep.numel() > 0 else 1
        order = weight.topk(num_kept, dim=0).indices
        chosen = keep.gather(0, order)
        # Padding repeats the best panel with zero weight: an empty panel could sit on a kink, where autograd gives nan.
        order = torch.where(chosen, order, order[:1])
        left, right = self.left.gather(0, order), self.right.gather(0, order)
        half = (right - left) / 2
        z = (left + right) / 2 + half * self.abscissae
        return z.flatten(0, 1), (self.kronrod * torch.where(chosen, half, 0.0)).flatten(0, 1)


def _with_gradient(
    function: Function, mean: Tensor, variance: Tensor, z: Tensor, widths: Tensor, value: Tensor, log_space: bool
) -> Tensor:
    """The frozen rule as a function of mean, variance and the function's own tensors.

    The nodes f are constants; z moves with mean and variance. It is written so that its value is exactly the frozen z.
    """
    alive = variance > 0
    sd = torch.where(alive, variance, 1.0).sqrt()
    frozen_mean, frozen_sd = mean.detach(), sd.detach()
    live_z = z * (frozen_sd / sd) - torch.where(alive, mean - frozen_mean, 0.0) / sd
    log_weights = widths.log() - 0.5 * live_z.square() - _LOG_SQRT_2PI - (sd / frozen_sd).log()
    # Without width the derivative in the mean is the function's own.
    f = torch.where(alive, frozen_mean + frozen_sd * z, mean)  # (Q, *shape)
    values = function(f).to(f).expand(f.shape)
    if log_space:
        result = torch.logsumexp(log_weights + values, 0)
    else:
        # Sum of weights = 1, so a constant may be taken out: less rounding in the derivatives of a narrow Gaussian.
        constant = torch.where(value.isfinite(), value, 0.0)
        weights = log_weights.exp()
        result = constant + (weights * torch.where(weights > 0, values - constant, 0.0)).sum(0)
    if variance.requires_grad and not bool(alive.all()):
        result = result + torch.where(alive, 0.0, variance * _heat(function, frozen_mean, log_space))
    return result


def _heat(function: Function, mean: Tensor, log_space: bool) -> Tensor:  # (*shape)
    """d/dv at v = 0: E[g] obeys the heat equation d/dv = g''/2; in log space (l'' + l'^2) / 2."""
    f = mean.clone().requires_grad_()
    value = function(f.unsqueeze(0)).to(f).sum()
    first = second = torch.zeros_like(f)
    if value.requires_grad:
        (first,) = torch.autograd.grad(value, f, create_graph=True, allow_unused=True, materialize_grads=True)
    if first.requires_grad:
        (second,) = torch.autograd.grad(first.sum(), f, allow_unused=True, materialize_grads=True)
    return (second + first.square() if log_space else second).detach() / 2
