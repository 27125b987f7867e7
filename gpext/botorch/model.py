"""A LatentGP that BoTorch's acquisition functions accept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.models.gpytorch import GPyTorchModel
from botorch.models.model import FantasizeMixin
from botorch.posteriors import GPyTorchPosterior, Posterior
from botorch.sampling.base import MCSampler
from gpytorch.likelihoods import Likelihood
from torch import Tensor

from gpext.botorch.posterior import ObservationPosterior
from gpext.designs import Design
from gpext.inference import Rule
from gpext.likelihoods import LatentLikelihood
from gpext.models import LatentGP


class BotorchGP(LatentGP, GPyTorchModel, FantasizeMixin):
    """A LatentGP of one output for Bayesian optimisation: subclass it and write `forward`.

    Train it by `gpext.fit` or `botorch.fit_gpytorch_mll`, and give it to any acquisition function. `posterior(X)` is
    that of f, Gaussian; `posterior(X, observation_noise=True)` that of observations, under the likelihood as it is.
    `fantasize` conditions on drawn observations by a new inference for each, which has no derivative in the inputs
    of these: :class:`~botorch.acquisition.knowledge_gradient.qKnowledgeGradient` and similar ones are optimised without
    gradients, `optimize_acqf(..., options={"with_grad": False})`.

    Args:
        train_inputs: X (N, d), best in the unit cube.
        train_targets: y (N,), or (N, 1) as BoTorch has them; best standardised.
        likelihood: of one latent.
        inference: a rule of `gpext.inference`; KL() by default.
        inducing_inputs, design: as for :class:`gpext.models.LatentGP`.

    Raises:
        TypeError, ValueError: as :class:`gpext.models.LatentGP`.
        ValueError: a likelihood of several latents.

    Example:
        >>> import gpytorch, torch
        >>> from gpext.botorch import BotorchGP
        >>> class Model(BotorchGP):
        ...     def __init__(self, x, y, likelihood):
        ...         super().__init__(x, y, likelihood)
        ...         self.mean_module = gpytorch.means.ConstantMean()
        ...         self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel())
        ...         self.to(x)
        ...
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
    """

    _num_outputs = 1

    def __init__(
        self,
        train_inputs: Tensor | Sequence[Tensor],
        train_targets: Tensor,
        likelihood: Likelihood,
        inference: Rule | None = None,
        *,
        inducing_inputs: Tensor | None = None,
        design: Design | None = None,
    ) -> None:
        if isinstance(likelihood, LatentLikelihood) and likelihood.num_latents is not None:
            raise ValueError(
                f"{type(likelihood).__qualname__} has num_latents = {likelihood.num_latents}; a BotorchGP has one "
                "output, the latent function. Model each by itself, in a botorch.models.ModelListGP."
            )
        if isinstance(train_targets, Tensor) and train_targets.dim() > 1 and train_targets.size(-1) == 1:
            train_targets = train_targets.squeeze(-1)
        super().__init__(
            train_inputs, train_targets, likelihood, inference, inducing_inputs=inducing_inputs, design=design
        )

    def posterior(
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: PosteriorTransform | None = None,
    ) -> Posterior:
        """Return the joint posterior at q inputs, of f, or of observations.

        Args:
            X: (..., q, d).
            output_indices: None or [0]: there is one output.
            observation_noise: whether to return the posterior of observations.
            posterior_transform: applied to what is returned.

        Raises:
            TypeError: a tensor of noise variances: the noise is that of the likelihood.
            ValueError: another output.
        """
        if output_indices not in (None, [0]):
            raise ValueError(f"there is one output, 0; got output_indices={output_indices}.")
        if isinstance(observation_noise, Tensor):
            raise TypeError(
                "observation_noise must be True or False: the noise is that of the likelihood, which a tensor of "
                "variances cannot replace."
            )
        if not observation_noise:
            return super().posterior(X, posterior_transform=posterior_transform)
        latent = super().posterior(X)
        if not isinstance(latent, GPyTorchPosterior):
            raise TypeError(
                f"observations need the posterior of f itself; got a {type(latent).__name__}. Transform the targets "
                "before the model is made, and leave the outcome_transform out."
            )
        posterior = ObservationPosterior(latent, self.likelihood)
        return posterior if posterior_transform is None else posterior_transform(posterior, X=X)

    def fantasize(self, X: Tensor, sampler: MCSampler, observation_noise: Tensor | None = None, **kwargs: Any) -> Any:
        """Return a batch of models, each with drawn observations at X among its data.

        Args:
            X: (..., q, d).
            sampler: draws them; the batch is its sample shape.
            observation_noise: None: the noise is that of the likelihood.
            **kwargs: as BoTorch passes them on, ignored.

        Raises:
            NotImplementedError: X requires a gradient, which the inference does not propagate.
            TypeError: a tensor of noise variances.
        """
        if X.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                "fantasies of a LatentGP have no derivative in the inputs where they are observed: each is a new "
                "inference. Optimise the acquisition function without gradients, "
                'optimize_acqf(..., options={"with_grad": False}), or call it under torch.no_grad().'
            )
        return super().fantasize(X, sampler, observation_noise=observation_noise)
