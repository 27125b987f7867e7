"""The log evidence of a LatentGP, as ExactMarginalLogLikelihood is for an ExactGP."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch import settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.mlls import MarginalLogLikelihood
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor

from gpext.inference import Status
from gpext.likelihoods.checks import HyperparameterError
from gpext.models import LatentGP


class LatentMarginalLogLikelihood(MarginalLogLikelihood):
    """log p(y) by the model's rule, per datum: `-mll(model(train_x), train_y)` is a loss for any optimiser.

    Every evaluation runs the inference to convergence, from the sites of the last one; the derivative is the total one.
    Log densities of registered priors and added losses come in as with ExactMarginalLogLikelihood.

    Args:
        likelihood: that of the model.
        model: the LatentGP.

    Raises:
        TypeError: the model is no LatentGP.
        ValueError: the likelihood is another one than the model's.

    Example:
        >>> import gpytorch, torch, gpext
        >>> class Model(gpext.models.LatentGP):
        ...     def __init__(self, x, y):
        ...         super().__init__(x, y, gpext.likelihoods.BernoulliLogitLikelihood())
        ...         self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), gpytorch.kernels.RBFKernel()
        ...
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
        >>> x, y = torch.linspace(0, 1, 6).double(), torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 1.0]).double()
        >>> model = Model(x, y).double()
        >>> loss = -LatentMarginalLogLikelihood(model.likelihood, model)(model(x), y)
        >>> loss.backward()
        >>> bool(loss > 0), model.covar_module.raw_lengthscale.grad.shape
        (True, torch.Size([1, 1]))
    """

    def __init__(self, likelihood: Likelihood, model: LatentGP) -> None:
        if not isinstance(model, LatentGP):
            raise TypeError(
                f"LatentMarginalLogLikelihood needs a gpext.models.LatentGP; got {type(model).__qualname__}. Models "
                "with inducing points take gpext.mlls.AugmentedELBO or gpytorch.mlls.VariationalELBO."
            )
        if likelihood is not model.likelihood:
            raise ValueError("the likelihood must be the one the model was made with: pass model.likelihood.")
        super().__init__(likelihood, model)

    def forward(self, function_dist: MultivariateNormal, target: Tensor, *params: Any) -> Tensor:
        """Return the log evidence divided by N (...), differentiable once.

        Args:
            function_dist: the prior at the training inputs, `model(train_x)` in train mode.
            target: the training targets.
            *params: passed to added losses, as by gpytorch.

        Raises:
            ValueError: other targets than those from which the model predicts.
            NotPSDError, NanError: there is no posterior at these parameters; an optimiser may step back from them.
        """
        known = self.model.train_targets
        if settings.debug.on() and not (target.shape == known.shape and bool((target == known).all())):
            raise ValueError(
                f"targets must be the training targets, of shape {tuple(known.shape)}, by which the model predicts; "
                f"got others, of shape {tuple(target.shape)}. Call model.set_train_data() to train on them."
            )
        value = self.log_evidence(function_dist, target)
        for added_loss in self.model.added_loss_terms():
            value = value + added_loss.loss(*params)
        for _, module, prior, closure, _ in self.model.named_priors():
            term = prior.log_prob(closure(module))
            value = value + term.reshape(*term.shape[: value.dim()], -1).sum(-1)
        return value / function_dist.event_shape[-1]

    def log_evidence(self, function_dist: MultivariateNormal, target: Tensor) -> Tensor:
        """Return log p(y) (...) of the training targets by the model's rule; arguments and errors as of `forward`.

        Without gradients it is that of the model's result, inferred once while parameters stay as they are.
        """
        strategy = self.model.variational_strategy
        try:
            result = strategy.infer(function_dist, target) if torch.is_grad_enabled() else strategy.result()
        except HyperparameterError as error:  # where a line search has gone too far: a lengthscale of zero, say
            raise NanError(str(error)) from error
        if result.status is Status.NOT_POSITIVE_DEFINITE:
            raise NotPSDError(result.message)  # the evidence may be finite then, but means nothing
        if not bool(result.log_evidence.isfinite().all()):
            raise NanError(result.message)
        return result.log_evidence
