"""Figures: the artists contain the data given."""

import subprocess
import sys

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from gpext import plots
from gpext.plots.calibration import wilson_interval


@pytest.mark.slow
def test_importing_gpext_does_not_import_matplotlib():
    code = "import sys, gpext.plots; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False).returncode == 0


def test_every_function_makes_its_own_axes_and_returns_them():
    u = np.linspace(0.01, 0.99, 20)
    made = [
        plots.predictive_band(u, u, u - 1, u + 1),
        plots.observations(u, u),
        plots.outliers(u, u),
        plots.log_density_trace({"a": (u, u)}),
        plots.reliability(u > 0.5, u),
        plots.pit_histogram(u),
        plots.coverage(u),
        plots.class_probabilities(u, u),
        plots.surface_map(plane(), plane().sum(-1)),
        plots.class_map(plane(), torch.full((25,), 0.3)),
        plots.hyperparameter_draws({"noise": torch.rand(2, 9)})[0, 0],
    ]
    assert len({id(axes.figure) for axes in made}) == len(made)


def test_band_is_drawn_in_the_order_of_x(ax):
    x = torch.tensor([2.0, 0.0, 1.0], requires_grad=True)
    assert plots.predictive_band(x, 10 * x, 10 * x - 1, 10 * x + 2, ax=ax) is ax
    np.testing.assert_array_equal(ax.lines[0].get_xydata(), [[0, 0], [1, 10], [2, 20]])
    vertices = ax.collections[0].get_paths()[0].vertices
    assert vertices[:, 1].min() == -1
    assert vertices[:, 1].max() == 22


def test_outliers_are_apart_and_counted(ax, labels):
    x = torch.arange(5.0)
    plots.observations(x, x**2, outliers=x > 2.5, ax=ax)
    ordinary, flagged = ax.lines
    np.testing.assert_array_equal(ordinary.get_xdata(), [0, 1, 2])
    np.testing.assert_array_equal(flagged.get_ydata(), [9, 16])
    assert labels(ax) == ["observations", "flagged as outlier (2)"]


def test_without_outliers_there_is_no_legend_entry(ax, labels):
    plots.observations(np.arange(3), np.arange(3), outliers=np.zeros(3, bool), ax=ax)
    assert labels(ax) == ["observations"]


@pytest.mark.parametrize("extra", [{}, {"x": torch.arange(5.0)}])
def test_axes_and_what_is_drawn_have_names(labels, extra):
    u = np.linspace(0.01, 0.99, 5)
    made = [
        plots.predictive_band(u, u, u - 1, u + 1),
        plots.observations(u, u),
        plots.outliers(-u, u, **extra),
        plots.angle_band(u, u, u),
        plots.class_probabilities(u, u),
        plots.class_map(plane(), np.full(25, 0.3)),
    ]
    for axes in made:
        assert axes.get_xlabel()
        assert axes.get_ylabel()
        assert [text.get_text() for text in axes.get_legend().get_texts()] == labels(axes) != []
    assert made[2].get_xlabel() == ("x" if extra else "datum")


def test_names_given_before_are_kept(ax):
    ax.set(xlabel="hours", ylabel="metres")
    plots.observations(np.arange(3), np.arange(3), ax=ax)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("hours", "metres")


def plane(num=5):
    line = torch.linspace(0, 1, num)
    return torch.cartesian_prod(line, 2 * line)


def luminance(colors):
    return colors[:, :3] @ np.array([0.2126, 0.7152, 0.0722])


def test_the_less_a_datum_contributes_the_darker_it_is(ax):
    precision = torch.tensor([1.5, 1.0, 0.6, 0.3, 0.05, 0.0, -0.1, -0.3])
    plots.outliers(-torch.arange(8.0), precision, ax=ax)
    shades = np.concatenate([luminance(drawn.to_rgba(drawn.get_array())) for drawn in ax.collections])
    assert (np.diff(shades) <= 0).all()
    assert shades[0] - shades[-1] > 0.7
    assert shades[-1] == shades.min()


def test_impossible_data_and_those_without_a_prediction_are_named_in_the_figure(ax, labels):
    log_loo = torch.tensor([-1.0, -torch.inf, torch.nan, -3.0, -torch.inf])
    plots.outliers(log_loo, torch.ones(5), num_named=3, ax=ax)
    assert labels(ax) == ["narrows the posterior (2)", "log density $-\\infty$ (2)", "no prediction, not drawn (1)"]
    x, y = ax.lines[0].get_data()
    np.testing.assert_array_equal(x, [1, 4])
    assert (y < -3).all()
    assert (y >= ax.get_ylim()[0]).all()
    assert [text.get_text() for text in ax.texts] == ["1", "4", "3"]
    plots.outliers(log_loo, torch.ones(5), num_named=1, ax=ax)  # all of these are named, even if fewer are requested
    assert [text.get_text() for text in ax.texts[3:]] == ["1", "4"]


def test_names_do_not_cover_each_other():
    x = torch.tensor([0.0, 0.01, 0.02, 0.015, 0.005, 1.0])
    axes = plots.outliers(torch.tensor([-9.0, -9.02, -9.01, -9.03, -8.99, 0.0]), torch.ones(6), x=x, num_named=5)
    axes.figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 5
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_the_order_of_a_report_decides_which_are_named(ax):
    plots.outliers(torch.tensor([-1.0, -7.0, -3.0]), torch.ones(3), order=torch.tensor([2, 0, 1]), num_named=2, ax=ax)
    assert [text.get_text() for text in ax.texts] == ["2", "0"]


def test_data_that_widen_the_posterior_are_crosses_and_the_worst_are_named(ax, labels):
    log_loo = torch.tensor([-1.0, -7.0, torch.nan, -3.0, 0.5])
    plots.outliers(log_loo, torch.tensor([1.0, -0.1, -0.2, 0.02, 2.0]), x=torch.arange(5.0) / 10, num_named=2, ax=ax)
    narrowing, widening = ax.collections
    np.testing.assert_allclose(narrowing.get_offsets(), [[0, -1], [0.3, -3], [0.4, 0.5]], rtol=1e-6)
    np.testing.assert_allclose(widening.get_offsets(), [[0.1, -7]], rtol=1e-6)
    assert labels(ax)[:2] == ["narrows the posterior (3)", "widens the posterior (1)"]
    assert [text.get_text() for text in ax.texts] == ["1", "3"]
    np.testing.assert_array_equal(narrowing.to_rgba([1.0])[0], narrowing.to_rgba([2.0])[0])


def test_outliers_are_drawn_over_their_index_by_default(ax):
    plots.outliers(np.array([-1.0, -2.0]), np.array([0.5, 0.6]), ax=ax)
    (drawn,) = ax.collections
    np.testing.assert_array_equal(drawn.get_offsets(), [[0, -1], [1, -2]])


def test_trace_leaves_out_time_zero_and_shades_the_best(ax, labels):
    plots.log_density_trace({"a": ([0.0, 1.0, 2.0], [-3.0, -2.0, -1.0]), "b": ([1.0], [-1.5])}, tolerance=0.25, ax=ax)
    assert ax.get_xscale() == "log"
    np.testing.assert_array_equal(ax.lines[0].get_xdata(), [1, 2])
    shade = ax.patches[0].get_bbox()
    assert (shade.y0, shade.y1) == (-1.25, -1.0)
    assert labels(ax) == ["a", "b", "within 0.25 of best"]


def test_reliability_of_known_bins(ax):
    probabilities = torch.tensor([0.9, 0.1, 0.8, 0.2])
    plots.reliability(torch.tensor([1, 0, 0, 0]), probabilities, num_bins=2, ax=ax)
    points = ax.containers[0].lines[0].get_xydata()
    np.testing.assert_allclose(points, [[0.15, 0.0], [0.85, 0.5]], atol=1e-6)


def test_wilson_interval_agrees_with_scipy():
    from scipy.stats import binomtest

    low, high = wilson_interval(np.array([0.3]), np.array([20]), z=1.6448536269514722)
    expected = binomtest(6, 20).proportion_ci(0.9, method="wilson")
    np.testing.assert_allclose([low[0], high[0]], [expected.low, expected.high])


def test_a_calibrated_forecaster_stays_inside_the_bars(ax):
    rng = np.random.default_rng(0)
    p = rng.uniform(size=4000)
    plots.reliability(rng.uniform(size=4000) < p, p, num_bins=40, ax=ax)
    predicted, observed = ax.containers[0].lines[0].get_xydata().T
    low, high = wilson_interval(observed, np.full(40, 100))
    inside = ((low <= predicted) & (predicted <= high)).mean()
    assert 0.75 < inside < 0.99  # 90 % bars


def test_pit_histogram_has_unit_area_and_one_stripe(ax, labels):
    pit = torch.linspace(0, 1, 101) ** 2
    plots.pit_histogram(pit, ax=ax, label="first")
    plots.pit_histogram(pit, ax=ax, label="second")
    stairs = [patch for patch in ax.patches if hasattr(patch, "get_data")]
    assert [s.get_data().values.mean() for s in stairs] == pytest.approx([1, 1])
    assert labels(ax) == ["90 % of bins if calibrated", "first", "second"]


def test_coverage_of_known_values(ax):
    plots.coverage(torch.tensor([0.5, 0.25, 0.95]), ax=ax)  # inside from level 0, 0.5 and 0.9 on
    levels, shares = ax.lines[1].get_xydata().T
    np.testing.assert_allclose(levels, [0, 0, 0.5, 0.9, 1])
    np.testing.assert_allclose(shares, [0, 1 / 3, 2 / 3, 1, 1])


def test_the_diagonal_is_drawn_once(ax, labels):
    for _ in range(2):
        plots.coverage(np.array([0.2, 0.7]), ax=ax)
    assert labels(ax) == ["calibrated"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plots.predictive_band([0, 1], [0, 1], [0], [1, 2]), r"lower \(1,\)"),
        (lambda: plots.observations([0, 1], [0, 1], outliers=[True]), "shape of x"),
        (lambda: plots.outliers([0, 1], [0.0]), r"precision \(1,\)"),
        (lambda: plots.outliers([np.nan], [1.0]), "at least one finite"),
        (lambda: plots.outliers([-1.0, 0.0], [1.0, 1.0], order=[0, 0]), "each index of the 2 data once"),
        (lambda: plots.class_probabilities([0, 1], [[0.2, 0.2], [0.5, 0.5]]), "sum to 1"),
        (lambda: plots.class_probabilities([0, 1], [0.2, 0.4], labels=["a"]), "expected 2 labels"),
        (lambda: plots.surface_map([[0, 1]], [0, 1]), "one value a point"),
        (lambda: plots.surface_map([0, 1], [0, 1]), r"points must have shape \(N, 2\)"),
        (lambda: plots.class_map([[0, 1], [1, 0], [2, 2]], [0.1, 0.2, 0.3]), "must be a grid"),
        (lambda: plots.class_map(plane(), np.full(25, 0.3), targets=[0]), "belong together"),
        (lambda: plots.hyperparameter_draws({"noise": torch.rand(9)}), r"shape \(chains, draws"),
        (lambda: plots.hyperparameter_draws({"noise": torch.rand(2, 9, 13)}), "at most 12"),
        (lambda: plots.hyperparameter_draws({}), "at least one parameter"),
        (lambda: plots.log_density_trace({}), "at least one method"),
        (lambda: plots.reliability([0, 1], [0.2, 1.2]), r"\[0, 1\]; got 0.2 to 1.2"),
        (lambda: plots.pit_histogram([-0.1, 0.5]), r"in \[0, 1\]"),
        (lambda: plots.coverage([]), "at least one value"),
        (lambda: plots.coverage([np.nan]), r"in \[0, 1\]"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_axes_that_share_their_numbers_share_their_name():
    figure, axes = plt.subplots(2, 2, sharex=True, sharey=True)
    for ax in axes.flat:
        plots.observations([0.0, 1.0], [1.0, 2.0], ax=ax)
    assert [[bool(ax.get_xlabel()) for ax in row] for row in axes] == [[False, False], [True, True]]
    assert [[bool(ax.get_ylabel()) for ax in row] for row in axes] == [[True, False], [True, False]]
    plt.close(figure)
