"""Non-Gaussian and large Gaussian processes in PyTorch and GPyTorch.

Two chains share their linear algebra:

    y, f -> likelihood -> (augmentation | bound | derivatives) -> SITES -> posterior -> prediction
    x, theta -> kernel -> bound and its gradient -> training -> prediction

`likelihoods` define p(y | f), `augmentations` and `bounds` turn it into one Gaussian `sites` factor per datum,
`inference` finds the sites, `posteriors` condition the prior on them; `variational`, `models` and `mlls` are the
gpytorch shells around that, `fit` trains, and `fit_grid` trains at each of several values of one hyperparameter.
`operators`, `kernels.keops` and `solvers` work with large matrices that are not stored; `samplers` draw latent values
and hyperparameters; `parallel` lets several processes work on one problem, `ppl` is for Pyro programs, and `plots`
makes figures. `estimators` are for scikit-learn, `survival` is for times until an event, `point_process` for places of
events.
"""

import importlib
from types import ModuleType

from gpext import (
    augmentations,
    bounds,
    datasets,
    designs,
    distributions,
    inference,
    kernels,
    likelihoods,
    mlls,
    models,
    operators,
    optim,
    parallel,
    point_process,
    posteriors,
    priors,
    quadrature,
    samplers,
    sites,
    solvers,
    survival,
    variational,
)
from gpext._version import __version__
from gpext.saving import load, save
from gpext.training import FitResult, FitStatus, GridFit, fit, fit_grid

__all__ = [
    "FitResult",
    "FitStatus",
    "GridFit",
    "__version__",
    "augmentations",
    "bounds",
    "datasets",
    "designs",
    "distributions",
    "estimators",
    "fit",
    "fit_grid",
    "inference",
    "kernels",
    "likelihoods",
    "load",
    "mlls",
    "models",
    "operators",
    "optim",
    "parallel",
    "plots",
    "point_process",
    "posteriors",
    "ppl",
    "priors",
    "quadrature",
    "samplers",
    "save",
    "sites",
    "solvers",
    "survival",
    "variational",
]


def __getattr__(name: str) -> ModuleType:
    """Import these when they are first used: the libraries they need import slowly."""
    if name in ("botorch", "estimators", "plots", "ppl"):
        return importlib.import_module(f"gpext.{name}")
    raise AttributeError(f"module 'gpext' has no attribute {name!r}")
