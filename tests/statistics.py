"""Criteria of random tests. A correct package fails one test in 150,000, at any seed.

    (mean - mu) / (s / sqrt n)    of n independent draws:  normal where s is known, Student's t with n - 1 degrees of
                                  freedom where s is their own standard deviation

FALSE_ALARM is the chance of a standard normal beyond 4.5 on either side. A test of the largest of m
statistics divides it among them [Bonferroni]. The tails of t are far wider if its degrees of freedom are few: the
threshold is 5.2 at 39 of them, 9.3 at 9 and 31 at 4. A test should have many.
"""

import numpy as np
import torch
from scipy import stats

FALSE_ALARM = 2 * stats.norm.sf(4.5)  # 6.8e-6


def z_threshold(comparisons=1):
    """The size that the largest of this many standard normal variables exceeds once in 150,000 times."""
    return float(stats.norm.isf(FALSE_ALARM / 2 / comparisons))


def t_threshold(degrees_of_freedom, comparisons=1):
    """The size that the largest of this many Student t variables exceeds once in 150,000 times."""
    return float(stats.t.isf(FALSE_ALARM / 2 / comparisons, degrees_of_freedom))


def misfit(draws, expected, *, variance=None, rounding=0.0):
    """The largest |mean - expected| of independent draws (n, ...) in units of what chance may cause: below 1.

    Args:
        draws: independent along their first dimension. Of chains or of processes in time, see `block_means`.
        expected: broadcasts with (...).
        variance: of one draw if it is known; otherwise estimated, with Student's law.
        rounding: the error of a mean apart from chance, in the units of the draws.
    """
    number, draws = len(draws), draws.double()
    law = t_threshold(number - 1, draws[0].numel()) if variance is None else z_threshold(draws[0].numel())
    spread = draws.var(0) if variance is None else variance
    return float(((draws.mean(0) - expected).abs() / (law * (spread / number).sqrt() + rounding)).max())


def misfit_between(first, second):
    """The misfit of the difference of two sets' means, with the fewer degrees of freedom of both."""
    error = (first.var(0) / len(first) + second.var(0) / len(second)).sqrt()
    law = t_threshold(min(len(first), len(second)) - 1, first[0].numel())
    return float(((first.mean(0) - second.mean(0)).abs() / (law * error)).max())


def block_means(chains, blocks):
    """Means (chains * blocks, ...) of successive blocks of chains (chains, draws, ...), all but independent if long.

    Blocks must be long beside the autocorrelation time: of a block of b draws the variance is too small by about the
    time over b.
    """
    length = chains.size(1) // blocks
    return chains[:, : length * blocks].unflatten(1, (blocks, length)).mean(2).flatten(0, 1)


def misfit_of_gaussians(draws, mean, covariance):
    """The misfit of draws (n, N) to N(mean, covariance), by laws that hold for any number of draws.

    Every coordinate and every sum of neighbours is a Gaussian with known moments: n means of it are normal, and its
    squares sum to a chi-square of n degrees of freedom.
    """
    number, size = draws.shape
    unit = torch.eye(size, dtype=covariance.dtype)
    seen = torch.cat([unit, unit[1:] + unit[:-1]])
    z = ((draws - mean) @ seen.mT) / (seen @ covariance * seen).sum(-1).sqrt()
    squares = z.square().sum(0).double().numpy()
    tail = stats.chi2(number)
    chance = torch.from_numpy(2 * np.minimum(tail.cdf(squares), tail.sf(squares)))
    as_normal = torch.from_numpy(stats.norm.isf(chance / 2))
    found = torch.cat([z.mean(0) * number**0.5, as_normal.to(z)])
    return float(found.abs().max()) / z_threshold(len(found))


def frequency_is(probability, count, number):
    """Return whether an event of this probability may have happened `count` times in `number` independent trials."""
    return stats.binomtest(int(count), number, float(probability)).pvalue > FALSE_ALARM
