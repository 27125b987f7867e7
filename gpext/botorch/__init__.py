"""BoTorch: a base class of models for Bayesian optimisation, and posteriors of observations that are not Gaussian.

BoTorch is an optional dependency of gpext: `pip install botorch`.
"""

try:
    import botorch as _botorch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("gpext.botorch needs BoTorch: pip install botorch.", name=error.name) from error

from gpext.botorch.model import BotorchGP
from gpext.botorch.posterior import ObservationPosterior

__all__ = ["BotorchGP", "ObservationPosterior"]
