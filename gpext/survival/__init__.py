r"""Survival analysis: times until an event, of which some are only known to be longer.

Two kinds of model give a Gaussian process to each subject's hazard:

    h(t | x) = e^{f(j, x)},  b_j < t <= b_{j+1}     piecewise constant, data of PoissonLikelihood after :func:`split`
    T ~ p(t | f(x))                                 one of the families of positive times, in `Censored`

:func:`piecewise_hazard` and :func:`parametric_hazard` return the hazard, the cumulative hazard, the survival function
and its quantiles at new covariates, each with credible limits. :func:`kaplan_meier` and :func:`concordance_index` are
the usual reference and the usual score; neither needs a model.
"""

from gpext.survival.bands import Band, Limits
from gpext.survival.concordance import Concordance, concordance_index
from gpext.survival.kaplan_meier import SurvivalEstimate, kaplan_meier
from gpext.survival.parametric import ParametricHazard, parametric_hazard
from gpext.survival.piecewise import PiecewiseHazard, piecewise_hazard
from gpext.survival.splitting import SplitTable, event_breaks, split

__all__ = [
    "Band",
    "Concordance",
    "Limits",
    "ParametricHazard",
    "PiecewiseHazard",
    "SplitTable",
    "SurvivalEstimate",
    "concordance_index",
    "event_breaks",
    "kaplan_meier",
    "parametric_hazard",
    "piecewise_hazard",
    "split",
]
