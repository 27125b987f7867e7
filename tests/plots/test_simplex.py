"""Figures of the simplex: the artists contain the data given."""

import numpy as np
import pytest
import torch

from gpext import plots


def test_corners_and_centre_are_where_they_belong():
    ax = plots.ternary_frame(("sand", "silt", "clay"))
    assert [text.get_text() for text in ax.texts] == ["sand", "silt", "clay"]
    plots.ternary_points(torch.cat([torch.eye(3), torch.full((1, 3), 1 / 3)]), ax=ax, label="data")
    height = 3**0.5 / 2
    (drawn,) = ax.collections
    np.testing.assert_allclose(drawn.get_offsets(), [[0, 0], [1, 0], [0.5, height], [0.5, height / 3]], atol=1e-6)
    corners = ax.patches[0].get_xy()[:3]
    np.testing.assert_allclose(corners, drawn.get_offsets()[:3], atol=1e-6)
    assert len(ax.patches) == 1  # no second frame
    assert ax.get_legend_handles_labels()[1] == ["data"]
    for line in ax.lines:  # at a fifth, along a side
        (x0, y0), (x1, y1) = line.get_xydata()
        assert np.hypot(x1 - x0, y1 - y0) * 5 == pytest.approx(round(np.hypot(x1 - x0, y1 - y0) * 5))


def test_a_region_is_where_the_function_is_positive():
    grid = plots.simplex_grid(60)
    ax = plots.ternary_region(grid, grid[:, 2] - 0.4, label="much of 3")
    edge = ax.collections[-1].get_paths()[0].vertices
    np.testing.assert_allclose(edge[:, 1], 0.4 * 3**0.5 / 2, atol=1e-9)
    assert ax.get_legend_handles_labels()[1] == ["much of 3"]
    before = len(ax.collections)
    plots.ternary_region(grid, -torch.ones(len(grid)), ax=ax)  # nowhere
    assert len(ax.collections) == before


def test_the_grid_is_inside_and_regular():
    grid = plots.simplex_grid(5)
    assert grid.dtype == torch.float64
    assert len(grid) == 6
    torch.testing.assert_close(grid.sum(-1), torch.ones(6, dtype=torch.float64))
    assert float(grid.min()) == pytest.approx(0.2)
    assert len(torch.unique(grid, dim=0)) == 6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plots.ternary_frame(("a", "b")), "three labels; got 2"),
        (lambda: plots.ternary_points([[0.5, 0.5]]), r"shape \(N, 3\); got \(1, 2\)"),
        (lambda: plots.ternary_points([[1, 0, 0], [0.5, 0.5, 0.5]]), "sum to 1; got 1.5"),
        (lambda: plots.ternary_region([[1, 0, 0]], [1.0, 2.0]), "one value a point; got 2 and 1"),
        (lambda: plots.simplex_grid(2), "at least 3; got 2"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
