"""The inference inside the objective of a LatentGP while L-BFGS trains it, and its status at the end of training."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import torch
from gpytorch.mlls import MarginalLogLikelihood
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

from gpext.inference import CAVI, EP, KL, InferenceWarning, Laplace, Status
from gpext.likelihoods.checks import HyperparameterError
from gpext.models import LatentGP
from gpext.sites import GaussianSites, JointSites
from gpext.training.result import FitStatus

MOST_STEPS = 20  # of a rule that maximises a bound, or finds a mode, in one evaluation after the first
_MODE = 1e-6  # tolerance of Laplace there
ROUGHEST = 1e-3  # tolerance of CAVI and, as a root mean square, of EP there
ROUGHEST_RMS = 3e-3  # of KL, whose errors all have one sign
_SAFETY = 10  # of their squared tolerance, in the error of the evidence a datum
_SAFETY_RMS = 100  # likewise, of a root mean square
_FOUND = (Status.CONVERGED, Status.REDUCED_POWER)
_NONE = (Status.NOT_POSITIVE_DEFINITE, Status.NOT_FINITE)


class LatentInference:
    """The rules of all LatentGPs of an objective, and their sites at the best parameters so far."""

    def __init__(self, mll: MarginalLogLikelihood) -> None:
        self.mll = mll
        self.models = [module for module in mll.modules() if isinstance(module, LatentGP)]
        self._rules = [model.inference for model in self.models]
        self._best: list[GaussianSites | JointSites | None] = [None for _ in self.models]

    def begin(self, tolerance: float) -> None:
        """Infer from now on no more exactly than training needs.

        Variational bounds and the evidence of EP are stationary in the sites, so that their error is of the order of
        the square of a rule's tolerance; that of Laplace is of the order of its tolerance.

        Args:
            tolerance: of the objective a datum, at which training ends.
        """
        rough = min(math.sqrt(tolerance / _SAFETY), ROUGHEST)
        for model in self.models:
            rule = model.inference
            if isinstance(rule, KL | EP):
                roughest = ROUGHEST_RMS if isinstance(rule, KL) else ROUGHEST
                rough_rms = min(math.sqrt(tolerance / _SAFETY_RMS), roughest)
                if rule.tolerance <= rough_rms:
                    model.inference = replace(rule, tolerance=rough_rms, norm="rms")
            if isinstance(rule, CAVI) and rule.tolerance < rough:
                model.inference = replace(rule, tolerance=rough)
            if isinstance(rule, Laplace) and rule.tolerance < _MODE:
                model.inference = replace(rule, tolerance=_MODE)

    def keep(self) -> None:
        """Remember the current sites as those of the best parameters, and bound the work at the parameters to come.

        A bound on log p(y) holds at any sites, so a rule that maximises it may continue at the next evaluation. A mode
        that is many steps away belongs to parameters from which a line search steps back.
        """
        self._best = [model.variational_strategy.sites for model in self.models]
        for model in self.models:
            rule = model.inference
            if isinstance(rule, KL | CAVI | Laplace) and rule.max_steps > MOST_STEPS:
                model.inference = replace(rule, max_steps=MOST_STEPS)

    def start(self) -> None:
        """Let the next inference start from the sites of the best parameters, not from those of a bad step."""
        for model, sites in zip(self.models, self._best, strict=True):
            if sites is not None:
                model.variational_strategy.start_from(sites)

    def choose_neighbours(self) -> bool:
        """Choose the neighbours of nearest-neighbour priors by the current lengthscales; return whether any changed."""
        changed = [model.variational_strategy.choose_neighbours() for model in self.models]
        return any(changed)

    def restore(self) -> None:
        """Restore the rules, and the sites of the best parameters."""
        for model, rule in zip(self.models, self._rules, strict=True):
            if model.inference is not rule:
                model.inference = rule
        self.start()

    def ending(self, x: Tensor, y: Tensor, status: FitStatus) -> tuple[FitStatus, float, str]:
        """Return the final status of training, the objective there, and the warnings of its inference.

        Args:
            x: training inputs.
            y: training targets.
            status: that of the optimiser; kept if every inference has found its posterior.
        """
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always")
            try:
                found = [model.result.status for model in self.models]
                value = float(self.mll(self.mll.model(x), y).sum())
            except (NotPSDError, NanError, HyperparameterError, torch.linalg.LinAlgError) as error:
                return FitStatus.NO_POSTERIOR, float("nan"), str(error).rstrip(".")
        told: list[str] = []
        for warning in caught:
            message = str(warning.message)
            if warning.category is InferenceWarning and message.rstrip(".") in told:
                continue
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
            if warning.category is InferenceWarning:
                told.append(message.rstrip("."))
        if any(each in _NONE for each in found):
            status = FitStatus.NO_POSTERIOR
        elif status in (FitStatus.CONVERGED, FitStatus.STALLED) and any(each not in _FOUND for each in found):
            status = FitStatus.INFERENCE_UNFINISHED
        return status, value, "; ".join(told)
