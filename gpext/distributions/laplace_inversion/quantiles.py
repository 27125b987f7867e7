r"""Quantiles of tilted mixing densities: solving cdf(w) = q for all data at once.

The unknown is x = log w and the equation score(cdf(e^x)) = score(q), score the quantile of the standard normal. It is
nearly linear, so a first guess from the saddle-point approximation and two of Halley's steps on one contour are enough
for most; the others get another contour, inside a bracket.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpext.distributions.laplace_inversion.inversion_contour import Contour
from gpext.distributions.laplace_inversion.radial_transform import RadialTransform
from gpext.distributions.laplace_inversion.saddle_model import SaddleModel

_NUM_NODES = 16
_MORE_NODES = {16: 24, 64: 96}
_MAX_ROUNDS = 50
_CLOSE = 1e-3  # in scores: a third-order step from there is exact to 1e-9
_ERROR = 1e-10  # of the cdf, at 16 nodes
_LARGEST_REMAINDER = 1e-6  # of the cdf; a rule that converges leaves 1e-12
_CHECKED_EVERY = 16  # a phi with a branch cut in the wrong place agrees with itself on one contour, not on another
_TOLERANCE = 1e-7  # of the cdf
_NEAR = 0.5  # in log w: how far a contour is moved
_TINY = 1e-300


def solve(
    transform: RadialTransform,
    r: Tensor,  # (*shape) float64, >= 0 and finite
    score: Tensor,  # (*shape) finite
    *,
    elementwise: bool,
    num_nodes: int = _NUM_NODES,
) -> tuple[Tensor, Tensor]:
    """Return the quantiles at the probabilities Phi(score) and, where the inversion did not converge, True.

    Args:
        transform: of the mixing density.
        r: squared tilts.
        score: of the probabilities.
        num_nodes: of a contour; 16, or 64 for laws too skew for these.
        elementwise: whether some of the elements may be evaluated without the others; shapes are (n,) then.
    """
    start = model = SaddleModel.reference(transform, r)
    every = slice(None, None, _CHECKED_EVERY) if elementwise else slice(None)
    checked, checked_score = r[every], score[every]
    x = model.log_quantile(score, r).expand(score.shape).clone()
    failed = torch.ones_like(score, dtype=torch.bool)
    low, high = torch.full_like(score, -math.inf), torch.full_like(score, math.inf)
    index = torch.arange(score.numel(), device=score.device) if elementwise else torch.ones(())
    result = x.clone()
    for _ in range(_MAX_ROUNDS):
        contour = Contour.through(transform, r, x.exp(), model, num_nodes)
        step, low, high, _ = _halley(contour, x, score, low, high)
        moved = torch.where(step.abs() < _NEAR, step, 0.0)
        contour, x = contour.moved((x + moved).exp()), x + moved
        step, low, high, settled = _halley(contour, x, score, low, high)
        settled &= contour.last_term() < _LARGEST_REMAINDER
        x = x + step
        if not elementwise:
            result, failed = torch.where(failed, x, result), failed & ~settled
            if not bool(failed.any()):
                break
            continue
        result[index[settled]], failed[index[settled]] = x[settled], False
        keep = (~settled).nonzero().squeeze(-1)
        if not keep.numel():
            break
        index, x, r, score, low, high = (t[keep] for t in (index, x, r, score, low, high))
        model = model.at_places(keep)
    w = result.exp()
    with_more_nodes = (
        Contour.through(transform, checked, w[every], start.at_places(every), _MORE_NODES[num_nodes]).laws().cdf
    )
    failed[every] |= ~((with_more_nodes - torch.special.ndtr(checked_score)).abs() < _TOLERANCE)
    return w, failed


def _halley(
    contour: Contour, x: Tensor, score: Tensor, low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A step in x, safeguarded by a bracket of x; the bracket; and whether the step is the last one needed."""
    laws = contour.laws()
    density = laws.density
    # The score of the smaller tail, which has the more digits.
    lower = laws.cdf < laws.survival
    tail = torch.where(lower, laws.cdf, laws.survival)
    inside = (tail > _TINY) & (density > 0)
    here = torch.special.ndtri(torch.where(inside, tail, 0.5))
    here = torch.where(lower, here, -here)
    gap = torch.where(inside, score - here, torch.where(lower, 1.0, -1.0))
    low, high = torch.where(gap > 0, x, low), torch.where(gap < 0, x, high)
    # first and second derivative of the score in x
    first = contour.w * density * math.sqrt(2 * math.pi) * torch.exp(0.5 * here.square())
    second = first * (1 + contour.w * laws.slope / density + here * first)
    newton = gap / first
    halley = newton / (1 + 0.5 * newton * second / first).clamp_min(0.5)
    middle = torch.where(low.isinf(), -2.0, torch.where(high.isinf(), 2.0, 0.5 * (low + high) - x))
    good = inside & (x + halley > low) & (x + halley < high) & (halley.abs() < 3) | (gap.abs() < 1e-9)
    # In a tail smaller than the error of the inversion, scores mean nothing.
    lost = (laws.cdf - torch.special.ndtr(score)).abs() < _ERROR
    step = torch.where(good, halley, torch.where(lost, 0.0, middle))
    return step, low, high, inside & (gap.abs() < _CLOSE) | lost
