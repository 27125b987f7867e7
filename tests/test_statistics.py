"""The criteria of random tests: chance alone breaks them as rarely as promised, and errors do break them."""

import pytest
import torch
from scipy import stats

from tests import statistics
from tests.statistics import block_means, misfit, misfit_between, t_threshold, z_threshold

F64 = torch.float64


def test_one_statistic_of_known_variance_is_below_four_and_a_half():
    assert z_threshold() == pytest.approx(4.5)
    assert t_threshold(10**7) == pytest.approx(4.5, abs=1e-4)
    assert t_threshold(4) > 30
    assert stats.t.sf(t_threshold(4), 4) == pytest.approx(stats.norm.sf(4.5))
    assert z_threshold(1000) == pytest.approx(stats.norm.isf(stats.norm.sf(4.5) / 1000))


@pytest.mark.parametrize("estimated", [True, False])
@pytest.mark.parametrize("comparisons", [1, 20])
def test_false_alarms_are_as_many_as_promised(monkeypatch, estimated, comparisons):
    """At one in ten, where it can be counted: with five draws a threshold for a known variance gives many more."""
    monkeypatch.setattr(statistics, "FALSE_ALARM", 0.1)
    trials = torch.randn(2000, 5, comparisons, dtype=F64, generator=torch.Generator().manual_seed(0))
    variance = None if estimated else torch.ones(comparisons, dtype=F64)
    alarms = torch.tensor([float(misfit(draws, 0.0, variance=variance) > 1) for draws in trials], dtype=F64)
    monkeypatch.undo()
    rate = 1 - (1 - 0.1 / comparisons) ** comparisons
    assert misfit(alarms, rate, variance=torch.tensor(rate * (1 - rate))) < 1
    if estimated:
        z = trials.mean(1) / (trials.std(1) / 5**0.5)
        assert float((z.abs().amax(-1) > stats.norm.isf(0.05 / comparisons)).double().mean()) > 1.5 * rate


def test_a_wrong_mean_is_seen_and_so_are_numbers_that_are_none():
    draws = torch.randn(400, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    assert misfit(draws, 0.0) < 1 < misfit(draws, torch.tensor([0.0, 0.0, 0.5]))
    assert misfit_between(draws[:200], draws[200:]) < 1 < misfit_between(draws[:200], draws[200:] + 0.9)
    assert not misfit(draws * torch.nan, 0.0) < 1
    assert misfit(torch.ones(5, 1), 1.0, rounding=1e-12) == 0


def test_means_of_blocks():
    chains = torch.arange(14.0).view(2, 7)
    assert block_means(chains, 3).tolist() == [0.5, 2.5, 4.5, 7.5, 9.5, 11.5]
    walk = torch.randn(2, 20_000, dtype=F64, generator=torch.Generator().manual_seed(0))
    for t in range(1, walk.size(1)):  # an AR(1) whose mean has three times the standard error of independent draws
        walk[:, t] += 0.8 * walk[:, t - 1]
    assert misfit(block_means(walk, 50), 0.0) < 1
