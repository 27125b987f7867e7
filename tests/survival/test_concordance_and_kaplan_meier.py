"""The concordance index and the Kaplan-Meier estimate by their definitions, pair by pair and time by time."""

import math

import pytest
import torch

import gpext.survival.concordance as concordance
from gpext.survival import concordance_index, kaplan_meier
from tests.survival.cases import generated


@pytest.mark.parametrize("seed", range(3))
def test_concordance_is_the_share_of_pairs(seed, monkeypatch):
    monkeypatch.setattr(concordance, "_PAIRS", 500)  # several blocks
    time, event, x, _ = generated(number=50, seed=seed)
    risk = x[:, 0].round(decimals=1)  # some equal
    counts = {1: 0, -1: 0, 0: 0}
    for i in range(50):
        for j in range(50):
            if event[i] and (time[i] < time[j] or (time[i] == time[j] and not event[j])):
                counts[int(torch.sign(risk[i] - risk[j]))] += 1
    found = concordance_index(time, event, risk)
    assert (found.num_concordant, found.num_discordant, found.num_tied) == (counts[1], counts[-1], counts[0])
    assert min(counts.values()) > 0
    assert found.index == pytest.approx((counts[1] + counts[0] / 2) / sum(counts.values()))
    assert concordance_index(time, event, -risk).index == pytest.approx(1 - found.index)
    assert concordance_index(time, event, torch.zeros(50)).index == 0.5
    assert concordance_index(time, torch.ones(50), -time).num_discordant == 0


def test_concordance_needs_pairs():
    with pytest.raises(ValueError, match="no pair is comparable"):
        concordance_index(torch.tensor([1.0, 2.0]), torch.tensor([0, 1]), torch.zeros(2))
    with pytest.raises(ValueError, match="expected a risk of each of 2 subjects"):
        concordance_index(torch.tensor([1.0, 2.0]), torch.tensor([0, 1]), torch.zeros(3))
    with pytest.raises(ValueError, match="risk must be finite; got nan at index 1"):
        concordance_index(torch.tensor([1.0, 2.0]), torch.tensor([1, 1]), torch.tensor([0.0, torch.nan]))


@pytest.mark.parametrize("late", [False, True])
def test_kaplan_meier_multiplies_over_the_times_of_events(late):
    time, event, _, entry = generated(number=40, late=late, seed=5)
    entry = entry * 0.2
    found = kaplan_meier(time, event, entry=entry if late else None, level=0.95)
    for t, s, low, high in zip(found.times, found.survival, found.lower, found.upper, strict=True):
        product, greenwood = 1.0, 0.0
        for each in time[event == 1].unique():
            if each <= t:
                n = int(((entry < each) & (time >= each)).sum()) if late else int((time >= each).sum())
                d = int(((time == each) & (event == 1)).sum())
                product *= 1 - d / n
                greenwood += d / (n * (n - d)) if n > d else math.inf
        assert float(s) == pytest.approx(product, abs=1e-12)
        if 0 < product < 1:
            half = 1.959963984540054 * math.sqrt(greenwood) / abs(math.log(product))
            assert float(low) == pytest.approx(product ** math.exp(half))
            assert float(high) == pytest.approx(product ** math.exp(-half))
    table = torch.stack([time, event, entry], -1)  # its columns are not contiguous
    assert torch.equal(kaplan_meier(*table[:, :2].unbind(-1), level=0.95).survival, kaplan_meier(time, event).survival)
    assert found.times[0] == 0
    assert found.survival[0] == found.lower[0] == found.upper[0] == 1
    assert found.times[-1] == time.max()


def test_without_censoring_kaplan_meier_is_the_empirical_survival_function():
    time = torch.tensor([3.0, 1.0, 2.0, 2.0])
    found = kaplan_meier(time, torch.ones(4))
    assert found.times.tolist() == [0, 1, 2, 3]
    torch.testing.assert_close(found.survival, torch.tensor([1.0, 0.75, 0.25, 0.0]))
    assert found.num_at_risk.tolist() == [4, 4, 3, 1]
    assert found.lower[-1].isnan()
    with pytest.raises(ValueError, match="level must be between 0 and 1"):
        kaplan_meier(time, torch.ones(4), level=1)
