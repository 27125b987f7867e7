"""The panels of an adaptive one-dimensional rule, for all data at once: where they start, their errors, refinement.

A panel is integrated by Gauss-Kronrod 7-15, in the standardised coordinate z = (f - m) / sqrt(v).
"""

from __future__ import annotations

import math
from collections.abc import Callable

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
FINEST = 1e-9  # smallest initial panel at a knot, in sd
_GRADING = 8.0  # ratio of neighbouring panels next to a knot
_MAX_LADDER = (
    24  # panels on one side of a knot; a knot that is very far away gets a steeper ladder instead of a longer one
)
_EPSILON = torch.finfo(torch.float64).eps
_MAX_SPLITS = 16  # panels bisected per datum and round
LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)

Function = Callable[[Tensor], Tensor]


def initial_edges(
    centres: Tensor, mean: Tensor, log_space: bool, finest: float
) -> Tensor:  # (E, *shape), increasing along dim 0
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
    length = min(math.ceil(math.log(widest / finest, _GRADING)), _MAX_LADDER)
    fraction = torch.arange(length, dtype=mean.dtype, device=mean.device).view(column) / length
    ladder = finest * (span / finest) ** fraction  # (L, *shape)
    edges = [core, centres, lower.unsqueeze(0), upper.unsqueeze(0)]
    for centre in centres:
        edges += [centre - ladder, centre + ladder]
    far = math.ceil(math.log(widest / (2 * _REACH), _GRADING))
    if far > 0:  # a bump may lie anywhere between the mean and a distant knot
        fraction = torch.arange(1, min(far, _MAX_LADDER) + 1, dtype=mean.dtype, device=mean.device).view(column)
        ladder = _REACH * (span / _REACH) ** (fraction / (fraction.shape[0] + 1))
        edges += [-ladder, ladder]
    return torch.cat(edges).clamp(lower, upper).sort(0).values


class Panels:
    """The panels of all data, in z, with the values of the rule for each, as multiples of the panel's own exp(peak)."""

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
        exponent = -0.5 * z.square() - LOG_SQRT_2PI
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
        """Integral, its error, its rounding noise, and the allowed error, (*shape) each.

        Noise excuses the error of what was evaluated, not that the mass may be elsewhere: ends that hold more than a
        tenth of it count in full.
        """
        integral, magnitude, error, noise = rows.sum(1)
        below, above = self._end_masses(rows)
        ends = below + above
        asked = (relative * magnitude).clamp(min=absolute)
        allowed = torch.maximum(asked, 2 * noise)
        cut_off = ends > torch.maximum(asked, 0.1 * magnitude)
        return integral, error + ends, noise, torch.where(cut_off, asked, allowed)

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
