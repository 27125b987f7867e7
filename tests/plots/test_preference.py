"""The ladder of utilities: order, intervals, names, and what is left out."""

import numpy as np
import pytest
import torch

from gpext import plots


def test_items_are_in_the_order_of_their_utility(ax, labels):
    mean, std = torch.tensor([1.0, 3.0, -1.0]), torch.tensor([0.5, 0.1, 0.2])
    assert plots.preference_ladder(mean, std, names=["a", "b", "c"], truth=mean + 7, width=2.0, ax=ax) is ax
    assert [text.get_text() for text in ax.get_yticklabels()] == ["c", "a", "b"]
    means, intervals = ax.containers[0].lines[0], ax.containers[0].lines[2][0].get_segments()
    np.testing.assert_allclose(means.get_xydata(), [[-2, 0], [0, 1], [2, 2]], atol=1e-7)
    np.testing.assert_allclose([each[:, 0] for each in intervals], [[-2.4, -1.6], [-1, 1], [1.8, 2.2]], atol=1e-6)
    crosses = next(line for line in ax.lines if line.get_label() == "truth")
    np.testing.assert_allclose(crosses.get_xdata(), [-2, 0, 2], atol=1e-6)  # a constant does not matter
    assert sorted(labels(ax)) == ["mean and 2 standard deviations", "truth"]


def test_of_many_items_the_first_and_the_last_are_drawn(ax):
    mean = np.arange(100.0)[::-1]
    plots.preference_ladder(mean, np.ones(100), max_items=5, ax=ax)
    assert [text.get_text() for text in ax.get_yticklabels()] == ["99", "98", "97", "1", "0"]
    assert ax.get_yticks().tolist() == [0, 1, 2, 4, 5]
    assert ax.containers[0].lines[0].get_xdata().tolist() == [-49.5, -48.5, -47.5, 48.5, 49.5]


def test_one_item_is_drawn_and_bad_numbers_are_refused(ax):
    plots.preference_ladder(np.ones(1), np.ones(1), max_items=2, ax=ax)
    with pytest.raises(ValueError, match="a name for each; got 2 and 1 names"):
        plots.preference_ladder(np.ones(2), np.ones(2), names=["a"])
    with pytest.raises(ValueError, match="at least one item"):
        plots.preference_ladder(np.ones(0), np.ones(0))
    with pytest.raises(ValueError, match="vectors of one length"):
        plots.preference_ladder(np.ones(2), np.ones(3))
    with pytest.raises(ValueError, match="vectors of one length"):
        plots.preference_ladder(np.ones(2), np.ones(2), truth=np.ones(3))
    with pytest.raises(ValueError, match="max_items must be at least 2; got 1"):
        plots.preference_ladder(np.ones(2), np.ones(2), max_items=1)
