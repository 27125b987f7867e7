"""Survival curves, hazards and maps of intensities: the artists contain the numbers given."""

import numpy as np
import pytest
import torch

from gpext import plots, survival
from gpext.point_process import Grid

TIMES = torch.linspace(0, 4, 9)
CURVES = torch.exp(-torch.tensor([[0.5], [1.0]]) * TIMES)


def test_curves_have_bands_and_names(ax, labels):
    plots.survival_curves(TIMES, CURVES, 0.9 * CURVES, CURVES.sqrt(), labels=["a", "b"], ax=ax)
    for line, curve in zip(ax.lines, CURVES, strict=True):
        np.testing.assert_allclose(line.get_ydata(), curve)
    top = ax.collections[1].get_paths()[0].vertices[:, 1]
    np.testing.assert_allclose([top.min(), top.max()], [0.9 * np.exp(-4), 1], rtol=1e-6)
    assert labels(ax) == ["a", "b"]
    assert ax.lines[0].get_color() != ax.lines[1].get_color()
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("time", "probability of no event")


def test_an_estimate_is_drawn_as_steps(ax):
    found = survival.kaplan_meier(torch.tensor([1.0, 2.0, 3.0]), torch.ones(3))
    plots.survival_curves(found.times, found.survival, found.lower, found.upper, step=True, ax=ax)
    assert ax.lines[0].get_drawstyle() == "steps-post"
    assert ax.get_legend() is None
    ax.figure.draw_without_rendering()  # the limits end with nan


def test_a_hazard_is_constant_in_each_interval(ax, labels):
    breaks, rates = torch.tensor([0.0, 1.0, 4.0]), torch.tensor([2.0, 0.5])
    plots.hazard(breaks, rates, 0.5 * rates, 2 * rates, labels=["h"], ax=ax)
    band, curve = ax.patches
    np.testing.assert_allclose(curve.get_data().values, rates)
    np.testing.assert_allclose(curve.get_data().edges, breaks)
    np.testing.assert_allclose(band.get_data().values, 2 * rates)
    np.testing.assert_allclose(band.get_data().baseline, 0.5 * rates)
    assert ax.get_yscale() == "log"
    assert labels(ax) == ["h"]


@pytest.mark.parametrize(("kind", "limits"), [("mean", (0, 5)), ("sd", (0, 5)), ("exceedance", (0, 1))])
def test_a_map_has_the_values_of_its_cells(ax, kind, limits):
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    grid = Grid.regular([(0, 2), (0, 3)], (2, 3), mask=mask)
    values = grid.place(torch.arange(1.0, 6.0))
    points = torch.tensor([[0.5, 0.5]])
    plots.intensity(grid.edges, values, kind=kind, points=points, outline=torch.tensor([[0, 0], [2, 0], [2, 3]]), ax=ax)
    mesh, dots = ax.collections
    shown = np.ma.filled(mesh.get_array(), np.nan).reshape(3, 2)
    np.testing.assert_allclose(shown, values.T.numpy())
    assert mesh.get_clim() == limits
    np.testing.assert_allclose(dots.get_offsets(), points)
    (bar,) = [axes for axes in ax.figure.axes if axes is not ax]
    assert bar.get_ylabel() != ""
    assert len(ax.lines[0].get_xdata()) == 4  # closed


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plots.survival_curves(TIMES, CURVES[:, :3]), r"expected 9 values a curve, \(9,\) or \(S, 9\)"),
        (lambda: plots.survival_curves(TIMES, CURVES, CURVES), "lower and upper belong together"),
        (lambda: plots.survival_curves(TIMES, CURVES, CURVES[0], CURVES[0]), r"expected limits \(2, 9\)"),
        (lambda: plots.survival_curves(TIMES, CURVES, labels=["a"]), "expected 2 labels"),
        (lambda: plots.hazard(TIMES, CURVES), "expected 8 values a curve"),
        (lambda: plots.intensity([TIMES], CURVES), "edges along two coordinates; got 1"),
        (lambda: plots.intensity([TIMES, TIMES], CURVES), r"expected a value of each cell, \(8, 8\)"),
        (lambda: plots.intensity([TIMES, TIMES], CURVES, kind="median"), "kind must be one of 'mean'"),
        (lambda: plots.intensity([TIMES, TIMES], torch.full((8, 8), torch.nan)), "expected a finite value"),
    ],
)
def test_bad_numbers_are_refused(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()
