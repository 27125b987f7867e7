"""Figures of predictions, data and draws; of plain numbers, or of a fitted model directly.

`fitted(model)`, `fitted_noise(model)` and `fitted_outliers(model)` take a fitted model, `map(model, inputs)` a model or
a distribution. Every other function takes plain tensors or arrays and knows no model. All take an optional matplotlib
`Axes`, draw on it and return it, so that figures can be combined; but `hyperparameter_draws` makes a figure of its own,
and `map` takes and returns one `Axes` for each of its panels. Axes have names, and what needs one a
legend; both may be replaced. matplotlib is imported when a figure is drawn, not with the package.
"""

from gpext.plots.calibration import coverage, pit_histogram, reliability
from gpext.plots.circle import angle_band, compass, headings
from gpext.plots.classes import class_probabilities
from gpext.plots.comparison import log_density_trace
from gpext.plots.draws import hyperparameter_draws
from gpext.plots.fitted import fitted, fitted_noise, fitted_outliers
from gpext.plots.intensity import intensity
from gpext.plots.maps import class_map, surface_map
from gpext.plots.outliers import outliers
from gpext.plots.prediction_map import map
from gpext.plots.preference import preference_ladder
from gpext.plots.regression import observations, predictive_band
from gpext.plots.simplex import simplex_grid, ternary_frame, ternary_points, ternary_region
from gpext.plots.style import BLUE, COLORS, GREEN, GREY, MARKERS, ORANGE, RED
from gpext.plots.survival import hazard, survival_curves

__all__ = [
    "BLUE",
    "COLORS",
    "GREEN",
    "GREY",
    "MARKERS",
    "ORANGE",
    "RED",
    "angle_band",
    "class_map",
    "class_probabilities",
    "compass",
    "coverage",
    "fitted",
    "fitted_noise",
    "fitted_outliers",
    "hazard",
    "headings",
    "hyperparameter_draws",
    "intensity",
    "log_density_trace",
    "map",
    "observations",
    "outliers",
    "pit_histogram",
    "predictive_band",
    "preference_ladder",
    "reliability",
    "simplex_grid",
    "surface_map",
    "survival_curves",
    "ternary_frame",
    "ternary_points",
    "ternary_region",
]
