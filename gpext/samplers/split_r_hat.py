r"""Whether chains agree: the split R-hat of all that was drawn [Gelman et al. 2013, Vehtari et al. 2021].

With W the mean variance within the halves of all chains, n long, and B the variance of their means,

    R-hat^2 = (n - 1) / n + B / W
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpext.samplers.storage import Chunks

_FEWEST_DRAWS = 4  # for halves of chains to have a variance


def largest_r_hat(chunks: Chunks) -> float:
    """Return the largest split R-hat of all that was drawn, in one pass; nan of too few draws, 1 if nothing moved."""
    if chunks.num_draws < _FEWEST_DRAWS:
        return float("nan")
    half = chunks.num_draws // 2
    found = []
    for name in ("latent", "raw"):
        sums, squares, start = [], [], 0
        origin = getattr(next(iter(chunks)), name).flatten(2)[:, :1].double()
        for chunk in chunks:
            draws = getattr(chunk, name).flatten(2)  # (C, S, columns)
            first, last = max(half - start, 0), max(chunks.num_draws - half - start, 0)
            parts = [draws[:, :first].double() - origin, draws[:, last:].double() - origin]
            sums.append(torch.stack([part.sum(1) for part in parts]))
            squares.append(torch.stack([part.square().sum(1) for part in parts]))
            start += chunk.size
        mean = torch.stack(sums).sum(0) / half  # (2, C, columns), from the origin
        within = (torch.stack(squares).sum(0) - half * mean.square()) / (half - 1)
        found.append(_r_hat(mean + origin.squeeze(1), within, half))
    moved = [r_hat for r_hat in found if r_hat is not None]
    return max(moved, default=1.0)


def split_r_hat(draws: Tensor) -> float:
    """Return the same of draws (C, S, P) at hand."""
    half = draws.size(1) // 2
    if draws.size(1) < _FEWEST_DRAWS:
        return float("nan")
    parts = torch.stack([draws[:, :half], draws[:, -half:]])  # (2, C, S / 2, P)
    r_hat = _r_hat(parts.mean(2), parts.var(2), half)
    return 1.0 if r_hat is None else r_hat


def _r_hat(mean: Tensor, within: Tensor, half: int) -> float | None:
    """Return the largest R-hat of means and variances (2, C, columns) of halves of chains; None if nothing moved."""
    mean, within = mean.flatten(0, 1), within.flatten(0, 1).mean(0)
    moved = within > 0
    if not bool(moved.any()):
        return None
    return float((1 - 1 / half + mean[:, moved].var(0) / within[moved]).sqrt().max())
