r"""Quantiles of finite mixtures of many normals, sum_k w_k N(m_k, s_k^2), of a batch of them at once.

Newton's method inside a bracket solves Phi^-1(P(u)) = Phi^-1(t) for u with y = c + s sinh(u), where t is the smaller
of the two tails at the quantile, P that tail of the mixture, c its mean and s a typical width. Both sides are nearly
linear in u about the centre, and hardly bent where the tails are those of a power of y.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpext.callers import warn_caller
from gpext.quadrature import QuadratureWarning

AT_ONCE = 2**18  # normals in one search
_MAX_STEPS = 200
_LAST = 1e-7  # of a normal score: the step from there squares it
_LONGEST = 3.0  # of a step in u, where Newton's method is not to be trusted


def normal_mixture_quantiles(
    q: Tensor,  # (L, B)
    weights: Tensor,  # (B, K)
    loc: Tensor,  # (B, K)
    rate: Tensor,  # (B, K)
    start: Tensor | None = None,  # (L, B)
) -> Tensor:
    """Return the quantiles (L, B) of mixtures of K normals, to about 1e-13 of the smaller tail.

    Args:
        q: probabilities strictly between 0 and 1.
        weights: of the normals, non-negative, of sum one.
        loc: their means.
        rate: the reciprocals of their standard deviations.
        start: near the quantiles; those of a normal by default.
    """
    centre = (weights * loc).sum(-1)
    spread = (weights * (loc - centre.unsqueeze(-1)).square()).sum(-1)
    scale = ((weights * rate).sum(-1).square().reciprocal() + spread).sqrt()
    sign = torch.where(q <= 0.5, 1.0, -1.0).to(q)
    target = torch.special.ndtri(torch.minimum(q, 1 - q))
    u = torch.asinh(sign * target if start is None else (start - centre) / scale)
    low, high = torch.full_like(u, -math.inf), torch.full_like(u, math.inf)
    normal_height = 1 / math.sqrt(2 * math.pi)
    half, heights = 0.5 * weights, normal_height * weights * rate
    for _ in range(_MAX_STEPS):
        z = ((centre + scale * u.sinh()).unsqueeze(-1) - loc).mul_(rate)  # (L, B, K)
        tail = torch.linalg.vecdot(torch.erfc(z * (-math.sqrt(0.5) * sign.unsqueeze(-1))), half)
        density = torch.linalg.vecdot(z.square_().mul_(-0.5).exp_(), heights)
        score = torch.special.ndtri(tail)
        excess = sign * (score - target)  # rises with u
        slope = density * scale * u.cosh() / (normal_height * torch.exp(-0.5 * score.square()))
        low, high = torch.where(excess <= 0, u, low), torch.where(excess >= 0, u, high)
        step = (excess / slope).clamp(-_LONGEST, _LONGEST)
        step = torch.where(step.isnan(), _LONGEST * excess.sign(), step)
        following, is_last = u - step, excess.abs() <= _LAST
        inside = is_last | (following >= low) & (following <= high)
        following = torch.where(inside, following, 0.5 * (low + high))
        settled = is_last | ((following - u).abs() <= torch.finfo(u.dtype).eps * u.abs())
        u = following
        if bool(settled.all()):
            return centre + scale * u.sinh()
    warn_caller(
        f"{int((~settled).sum())} of {settled.numel()} quantiles did not reach full precision in {_MAX_STEPS} steps; "
        f"worst error of a normal score {excess[~settled].abs().max().item():.1e}.",
        QuadratureWarning,
    )
    return centre + scale * u.sinh()
