"""Figures of angles: the artists contain the data given."""

import math

import numpy as np
import pytest
import torch

from gpext import plots


def test_a_band_goes_on_at_the_bottom_where_it_leaves_at_the_top(ax, labels):
    x = torch.linspace(0, 4, 9)
    wrapped = torch.remainder(x + math.pi, 2 * math.pi) - math.pi
    assert plots.angle_band(x.flip(0), wrapped.flip(0), torch.full((9,), 0.5), ax=ax) is ax
    first, second = ax.lines
    np.testing.assert_allclose(first.get_xydata(), np.stack([x, x], -1), rtol=1e-6)
    np.testing.assert_allclose(second.get_ydata(), x - 2 * math.pi, rtol=1e-5)
    low, high = (ax.collections[1].get_paths()[0].vertices[:, 1] + 2 * math.pi)[[1, -2]]
    assert {round(float(low), 4), round(float(high), 4)} <= {-0.5, 0.5, 3.5, 4.5}
    assert ax.get_ylim() == (-math.pi, math.pi)
    assert labels(ax) == ["95 % of new angles", "predicted direction"]


def test_a_band_that_stays_is_drawn_once(ax):
    plots.angle_band([0, 1], [0.1, 0.2], [0.3, 0.3], ax=ax)
    assert len(ax.lines) == len(ax.collections) == 1


def test_a_compass_has_an_arrow_an_arc_and_a_dot_a_prediction(ax, labels):
    plots.compass(torch.tensor([0.0, 2.0]), [0.5, 1.0], [1.0, 0.5], observed=[0.2, 2.0], colors=["r", "b"], ax=ax)
    _, arc, dot, wider, _ = ax.lines
    x, y = arc.get_data()
    angles = np.arctan2(y, x)
    assert (angles.min(), angles.max()) == pytest.approx((-0.5, 0.5))
    assert np.hypot(*wider.get_data()).min() > np.hypot(x, y).max() > 1
    assert math.atan2(*dot.get_xydata()[0][::-1]) == pytest.approx(0.2)
    tips = [patch.get_xy() for patch in ax.patches]
    assert tips[0][:, 0].max() == pytest.approx(1.0)
    assert np.hypot(*tips[1].T).max() == pytest.approx(0.5)
    assert labels(ax) == ["95 % of new angles", "observed"]


def test_headings_are_arrows_through_their_places(ax, labels):
    position = np.array([[0.0, 0.0], [4.0, 2.0], [1.0, 1.0], [2.0, 0.0]])
    angle = torch.tensor([0.0, math.pi / 2, math.pi, 1.0])
    plots.headings(position, angle, torch.tensor([1.0, 0.5, 1.0, 0.0]), ax=ax, label="here")
    (arrows,) = ax.collections
    np.testing.assert_array_equal(arrows.get_offsets(), position)
    np.testing.assert_allclose(arrows.U, [2.0, 0, -2, 0], atol=1e-6)  # extent 4, four arrows
    np.testing.assert_allclose(arrows.V, [0, 1.0, 0, 0], atol=1e-6)
    plots.headings(position[:1], [0.3], ax=ax, size=7.0)
    assert np.hypot(ax.collections[1].U, ax.collections[1].V) == pytest.approx([7.0])
    assert labels(ax) == ["here"]


def test_every_function_makes_its_own_axes():
    one = [0.5]
    made = [plots.angle_band(one, one, one), plots.compass(one, one, one), plots.headings([[0, 1]], one)]
    assert len({id(axes.figure) for axes in made}) == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plots.angle_band([0, 1], [0, 1], [0]), r"half_width \(1,\)"),
        (lambda: plots.compass([0], [1], [1.5]), r"length must lie in \[0, 1\]; got 1.5"),
        (lambda: plots.compass([0], [1], [1], observed=[1, 2]), r"observed \(2,\)"),
        (lambda: plots.headings([0, 1], [0, 1]), r"shape \(N, 2\); got \(2,\)"),
        (lambda: plots.headings([[0, 1]], [0, 1]), r"angle \(2,\)"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
