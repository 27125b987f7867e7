r"""Draws of the Jacobi variables J(b, c) behind the Polya-Gamma ones, exact for counts b below 64.

    E e^{-s X} = (cosh c / cosh sqrt(c^2 + 2 s))^b,    PG(b, 2c) = J(b, c) / 4    [Polson, Scott & Windle 2013]

J(b, c) is the sum of independent J(1, c) and, for the fraction of b, one J(b <= 1, c). Expanding 1 / cosh^b in powers
of exp(-2 sqrt .) gives the density as an alternating series of inverse Gaussian ones,

    p(x) = (1 + e^{-2c})^b IG(x | b / c, b^2) R(x)
    R(x) = sum_n (-1)^n C(n + b - 1, n) (1 + 2n / b) exp(-2 n (n + b) / x),    0 < R <= 1,

so a draw from IG(b / c, b^2) accepted with probability R is exact; one of (1 + e^{-2c})^b <= 2^b is accepted. For b = 1
and c < 6, where that is slower, the density is covered by strips (see `jacobi_strips`) for the next lower tilt of a
grid, and what they give is accepted with the probability e^{-d x}, d half the difference of the squared tilts.

From b = 64 on the law is so nearly normal that the fourth-order Cornish-Fisher expansion errs by 1.2e-7 at most in the
cdf, at any tilt; by 2e-8 at b = 128 and 1e-10 at 1000.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gpext.distributions.mixing.cornish_fisher import cornish_fisher
from gpext.distributions.mixing.inverse_gaussian import inverse_gaussian_draws
from gpext.distributions.mixing.jacobi_strips import LARGEST_TILT, NUM_STRIPS, TILTS_PER_UNIT, Strips, density, strips
from gpext.distributions.mixing.sech_cumulants import sech_cumulants

MANY = 64  # counts from which on the Cornish-Fisher expansion is used; its error in the cdf is at most 1.2e-7 there
_CHUNK = 16384  # draws whose intermediate results stay in the cache of a CPU
_MANY = 2**22  # draws at a time elsewhere, where each operation costs a launch: some 0.5 GB of intermediate results
_FEW = 4096  # draws in which calls cost more than numbers
_TRIES = 3  # for each of them at once
_FAR = 40.0  # R is below 1e-17 from here on


def jacobi_draws(count: Tensor, tilt: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One draw of J(count, tilt) for each element of float64 vectors, 0 where count = 0 or tilt = inf."""
    if bool((count == 1).all()) and bool((tilt < math.inf).all()):
        return unit_draws(tilt, generator)
    draws = torch.zeros_like(tilt)
    live = (count > 0) & (tilt < math.inf)
    many = (live & (count >= MANY)).nonzero().squeeze(-1)
    if many.numel():
        draws.index_copy_(0, many, _large_count_draws(count[many], tilt[many], generator))
    for few in (live & (count < MANY)).nonzero().squeeze(-1).split(_at_a_time(tilt)):
        draws.index_copy_(0, few, _sums(count.index_select(0, few), tilt.index_select(0, few), generator))
    return draws


def _at_a_time(like: Tensor) -> int:
    return _CHUNK if like.device.type == "cpu" else _MANY


def _large_count_draws(count: Tensor, tilt: Tensor, generator: torch.Generator | None) -> Tensor:
    cumulants = [2.0**k * count * cumulant for k, cumulant in enumerate(sech_cumulants(tilt.square(), 6), start=1)]
    return cornish_fisher(torch.empty_like(tilt).normal_(generator=generator), cumulants)


def _sums(count: Tensor, tilt: Tensor, generator: torch.Generator | None) -> Tensor:
    """J(b, c) as the sum of independent J(1, c) and a J(b - floor(b), c)."""
    whole = count.floor()
    part = count - whole
    units = torch.repeat_interleave(whole.long())
    draws = torch.zeros_like(tilt).index_add_(0, units, unit_draws(tilt.index_select(0, units), generator))
    rest = part.nonzero().squeeze(-1)
    return draws.index_add_(0, rest, _by_series(part.index_select(0, rest), tilt.index_select(0, rest), generator))


def unit_draws(tilt: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One draw of J(1, tilt) for each element of a float64 vector of finite tilts >= 0."""
    gentle = tilt < LARGEST_TILT
    if bool(gentle.all()):
        return _by_strips(tilt, strips().to(tilt.device), generator)
    if not bool(gentle.any()):
        return _by_series(torch.ones_like(tilt), tilt, generator)
    draws = torch.empty_like(tilt)
    for part in (gentle, ~gentle):
        index = part.nonzero().squeeze(-1)
        draws.index_copy_(0, index, unit_draws(tilt.index_select(0, index), generator))
    return draws


def _until_accepted(propose: Callable[..., tuple[Tensor, Tensor]], *parameters: Tensor) -> Tensor:
    """Draws for each element of the parameters; `propose` returns draws and the places of those not accepted."""
    size = parameters[0].numel()
    if size == 0:
        return torch.empty_like(parameters[0])
    if size <= _FEW:
        return _at_once(propose, *parameters)
    chunk = _at_a_time(parameters[0])
    parts = zip(*(p.split(chunk) for p in parameters), strict=True)
    drawn, rejected = zip(*(propose(*part) for part in parts), strict=True)
    draws = torch.cat(drawn)
    waiting = torch.cat([index + chunk * k for k, index in enumerate(rejected)])
    if waiting.numel():
        again = _until_accepted(propose, *(p.index_select(0, waiting) for p in parameters))
        draws.index_copy_(0, waiting, again)
    return draws


def _at_once(propose: Callable[..., tuple[Tensor, Tensor]], *parameters: Tensor) -> Tensor:
    """The same for few draws: several tries for each, of which the first accepted one counts."""
    size = parameters[0].numel()
    draws, rejected = propose(*(p.repeat(_TRIES) for p in parameters))
    accepted = torch.ones_like(draws, dtype=torch.bool).index_fill_(0, rejected, False).view(_TRIES, size)
    *earlier, kept = draws.view(_TRIES, size)
    for is_good, tried in zip(accepted[:-1].flip(0), reversed(earlier), strict=True):
        kept = torch.where(is_good, tried, kept)
    draws, waiting = kept, (~accepted.any(0)).nonzero().squeeze(-1)
    if waiting.numel():
        draws.index_copy_(0, waiting, _at_once(propose, *(p.index_select(0, waiting) for p in parameters)))
    return draws


def _uniform(like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.empty_like(like).uniform_(generator=generator)


def _by_strips(tilt: Tensor, table: Strips, generator: torch.Generator | None) -> Tensor:
    """One draw of J(1, c) for each tilt in [0, 6)."""

    def propose(tilt: Tensor) -> tuple[Tensor, Tensor]:
        place = tilt * TILTS_PER_UNIT
        row = place.int()  # of the next lower tilt
        rest = place.square().sub_(row.square()).mul_(0.5 / TILTS_PER_UNIT**2)  # d
        along = _uniform(tilt, generator).mul_(NUM_STRIPS)
        strip = along.int()
        along.sub_(strip)
        entry = torch.add(strip, row, alpha=NUM_STRIPS)
        x = torch.addcmul(table.left.index_select(0, entry), along, table.width.index_select(0, entry))
        squeeze = table.squeeze.index_select(0, entry)
        sure = torch.addcmul(squeeze, squeeze, rest * x, value=-1)  # e^{-d x} >= 1 - d x
        level = _uniform(tilt, generator)
        doubtful = (level >= sure).nonzero().squeeze(-1)
        if not doubtful.numel():
            return x, doubtful
        decided, accepted = _decided(table, *(t.index_select(0, doubtful) for t in (x, level, along, rest, row, entry)))
        return x.index_copy_(0, doubtful, decided), doubtful[~accepted]

    return _until_accepted(propose, tilt)


def _decided(
    table: Strips, x: Tensor, level: Tensor, along: Tensor, rest: Tensor, row: Tensor, entry: Tensor
) -> tuple[Tensor, Tensor]:
    """The proposals, those in the tail drawn now, and which of them are accepted."""
    lower = (row / TILTS_PER_UNIT).square()
    rate = math.pi**2 / 8 + 0.5 * lower
    width, weight = table.width.index_select(0, entry), table.weight.index_select(0, entry)
    tail = width == 0
    x = torch.where(tail, x - torch.log1p(-along) / rate, x)
    growth = torch.where(tail, rate, 0.0) - 0.5 * lower - rest
    return x, level < weight * density(x) * torch.exp(growth * x)


def _by_series(count: Tensor, tilt: Tensor, generator: torch.Generator | None) -> Tensor:
    """One draw of J(count, tilt) for each element, by inverse Gaussian proposals."""

    def propose(count: Tensor, tilt: Tensor) -> tuple[Tensor, Tensor]:
        x = inverse_gaussian_draws(tilt / count, count.square(), generator)
        level = _uniform(tilt, generator)
        # R is at least 1 - (first term).
        first = torch.exp((count + 1).mul_(-2).div_(x)).mul_(count + 2)
        doubtful = (first.add_(level) >= 1).nonzero().squeeze(-1)
        if not doubtful.numel():
            return x, doubtful
        there, level, count = (t.index_select(0, doubtful) for t in (x, level, count))
        return x, doubtful[level >= series_ratio(there, count)]

    return _until_accepted(propose, count, tilt)


def series_ratio(x: Tensor, count: Tensor) -> Tensor:
    """R(x) for 0 < count <= 1, with an absolute error of about 1e-15."""
    far = x > _FAR
    near = torch.where(far, _FAR, x)
    if bool((count == 1).all()):
        # p(x | 0) / (2 IG(x | inf, 1)): p has a second series, for which four terms are enough
        total = density(near) * (0.5 * math.pi * near**3).sqrt() * torch.exp(0.5 / near)
    else:
        last = math.ceil(math.sqrt(20 * float(near.max())))
        n = torch.arange(1, last + 1, dtype=x.dtype, device=x.device).unsqueeze(-1)
        sizes = ((1 - n - count) / n).cumprod(0).mul_(1 + 2 * n / count)
        total = 1 + sizes.mul_(torch.exp(-2 * n * (n + count) / near)).sum(0)
    return torch.where(far, 0.0, total)
