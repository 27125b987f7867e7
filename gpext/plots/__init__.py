"""Figures: predictive bands with outliers flagged, log density against time, calibration, angles, the simplex.

Every function takes plain tensors or arrays and an optional matplotlib `Axes`, draws on it and returns it, so figures
can be combined; nothing here knows a model. matplotlib is imported when a figure is drawn, not with the package.
"""

from gpext.plots.calibration import coverage, pit_histogram, reliability
from gpext.plots.circle import angle_band, compass, headings
from gpext.plots.comparison import log_density_trace
from gpext.plots.regression import observations, outliers, predictive_band
from gpext.plots.simplex import simplex_grid, ternary_frame, ternary_points, ternary_region
from gpext.plots.style import BLUE, COLORS, GREEN, GREY, MARKERS, ORANGE, RED

__all__ = [
    "BLUE",
    "COLORS",
    "GREEN",
    "GREY",
    "MARKERS",
    "ORANGE",
    "RED",
    "angle_band",
    "compass",
    "coverage",
    "headings",
    "log_density_trace",
    "observations",
    "outliers",
    "pit_histogram",
    "predictive_band",
    "reliability",
    "simplex_grid",
    "ternary_frame",
    "ternary_points",
    "ternary_region",
]
