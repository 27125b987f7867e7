"""Non-Gaussian and large Gaussian processes in PyTorch and GPyTorch.

Two chains share their linear algebra:

    y, f -> likelihood -> (augmentation | bound | derivatives) -> SITES -> posterior -> prediction
    x, theta -> kernel -> bound and its gradient -> training -> prediction

`likelihoods` say what p(y | f) is, `augmentations` and `bounds` turn it into a Gaussian `sites` factor a datum,
`inference` finds the sites, `posteriors` condition the prior on them; `variational`, `models` and `mlls` are the
gpytorch shells around that, and `fit` trains.
"""

from gpext import (
    augmentations,
    bounds,
    distributions,
    inference,
    likelihoods,
    mlls,
    models,
    optim,
    posteriors,
    quadrature,
    sites,
    variational,
)
from gpext._version import __version__
from gpext.training import FitResult, FitStatus, fit

__all__ = [
    "FitResult",
    "FitStatus",
    "__version__",
    "augmentations",
    "bounds",
    "distributions",
    "fit",
    "inference",
    "likelihoods",
    "mlls",
    "models",
    "optim",
    "posteriors",
    "quadrature",
    "sites",
    "variational",
]
