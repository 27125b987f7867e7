r"""Point processes on a grid: log-Gaussian Cox processes as Poisson counts with areas as exposures.

:class:`Grid` counts points in the cells of a window, which may be a polygon or a mask; a `LatentGP` with
`Offset(PoissonLikelihood(), grid.exposure.log())` at `grid.inputs` is then a log-Gaussian Cox process, and
:func:`intensity` returns the posterior of its intensity: means, quantiles, exceedance probabilities, and the expected
number of points in a region.
"""

from gpext.point_process.grid import Grid
from gpext.point_process.intensity import ExpectedCount, Intensity, intensity
from gpext.point_process.polygons import polygon_fractions

__all__ = ["ExpectedCount", "Grid", "Intensity", "intensity", "polygon_fractions"]
