"""Laws that random tests decide by. A correct package fails one test in 150,000, at whatever seed.

    (mean - mu) / (s / sqrt n)    of n independent draws:  normal where s is known, Student's t with n - 1 degrees of
                                  freedom where s is their own standard deviation

FALSE_ALARM is the chance of a standard normal beyond 4.5 on either side. A test that looks at the largest of m
statistics shares it among them [Bonferroni]. The tails of t are far wider if its degrees of freedom are few: the
threshold is 5.2 at 39 of them, 9.3 at 9 and 31 at 4. A test wants many.
"""

from scipy import stats

FALSE_ALARM = 2 * stats.norm.sf(4.5)  # 6.8e-6


def z_threshold(comparisons=1):
    """The size that the largest of so many standard normal variables exceeds once in 150,000 times."""
    return float(stats.norm.isf(FALSE_ALARM / 2 / comparisons))


def t_threshold(degrees_of_freedom, comparisons=1):
    """The size that the largest of so many Student t variables exceeds once in 150,000 times."""
    return float(stats.t.isf(FALSE_ALARM / 2 / comparisons, degrees_of_freedom))


def misfit(draws, expected, *, variance=None, rounding=0.0):
    """The largest |mean - expected| of independent draws (n, ...) in units of what chance may do: below 1.

    Args:
        draws: independent along their first dimension. Of chains or of processes in time, see `block_means`.
        expected: broadcasts with (...).
        variance: of one draw where it is known; else theirs, and Student's law.
        rounding: what a mean may be off without chance, in the units of the draws.
    """
    number, draws = len(draws), draws.double()
    law = t_threshold(number - 1, draws[0].numel()) if variance is None else z_threshold(draws[0].numel())
    spread = draws.var(0) if variance is None else variance
    return float(((draws.mean(0) - expected).abs() / (law * (spread / number).sqrt() + rounding)).max())


def misfit_between(first, second):
    """The same for the difference of the means of two sets of draws, with the fewer degrees of freedom of both."""
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
