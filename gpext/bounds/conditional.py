"""log p(y | f) of any gpytorch likelihood of one latent, as a function of plain tensors."""

from __future__ import annotations

from typing import Any

import gpytorch
import torch
from torch import Tensor

from gpext.bounds.contracts import HasLogProb, HasNumLatents
from gpext.special import log_ndtr


def num_latents(likelihood: Any) -> int | None:
    """Return how many latent functions a datum has, D, or None for one without an axis of its own.

    Example:
        >>> from gpext.likelihoods import PoissonLikelihood, VonMisesLikelihood
        >>> num_latents(VonMisesLikelihood()), num_latents(PoissonLikelihood())
        (2, None)
    """
    return likelihood.num_latents if isinstance(likelihood, HasNumLatents) else None


_DENSITY = ("forward", "log_prob", "unchecked_log_prob", "unchecked_augmentation")  # what p(y | f) is read from


def has_density_of(likelihood: Any, *kinds: type) -> bool:
    """Return whether p(y | f) is that of one of these classes: of it, or of a subclass that leaves it alone.

    Example:
        >>> from gpext.likelihoods import PoissonLikelihood
        >>> has_density_of(PoissonLikelihood(), PoissonLikelihood)
        True
    """
    own = [getattr(type(likelihood), name, None) for name in _DENSITY]
    return any(
        isinstance(likelihood, kind) and own == [getattr(kind, name, None) for name in _DENSITY] for kind in kinds
    )


def serves_density(likelihood: Any, method: str) -> bool:
    """Return whether a method of a likelihood is of its p(y | f): no subclass of the method's class has one of its own.

    Example:
        >>> from gpext.likelihoods import PoissonLikelihood
        >>> serves_density(PoissonLikelihood(), "strip")
        True
    """
    return has_density_of(likelihood, next(kind for kind in type(likelihood).__mro__ if method in vars(kind)))


def conditional_log_prob(likelihood: Any, targets: Tensor, f: Tensor) -> Tensor:
    """Return log p(targets | f), elementwise, twice differentiable in f.

    Args:
        likelihood: any gpytorch likelihood whose `forward(f)` is a distribution with `log_prob`. A gpext likelihood's
            own `log_prob(targets, f)` goes first. gpytorch's BernoulliLikelihood is evaluated as log Phi, because
            torch's Bernoulli clamps the probabilities in the tails.
        targets: (..., N).
        f: latent values, broadcastable with the targets.

    Raises:
        ValueError: the slope in f is wanted, and autograd cannot follow it.

    Example:
        >>> import torch
        >>> from gpext.likelihoods import PoissonLikelihood
        >>> conditional_log_prob(PoissonLikelihood(), torch.tensor([0.0]), torch.zeros(1))
        tensor([-1.])
    """
    value = _log_prob(likelihood, targets, f)
    if torch.is_grad_enabled() and f.requires_grad and not value.requires_grad:
        raise ValueError(
            f"autograd finds no dependence of log p(y | f) of {type(likelihood).__qualname__} on f: compute the "
            "distribution from f by torch functions that have a derivative (no detach(), numpy or comparison), or use "
            "gpext.inference.EP(), which needs none."
        )
    return value


def _log_prob(likelihood: Any, targets: Tensor, f: Tensor) -> Tensor:
    if isinstance(likelihood, HasLogProb):
        return likelihood.log_prob(targets, f)
    if has_density_of(likelihood, gpytorch.likelihoods.BernoulliLikelihood):
        return log_ndtr((2 * targets.to(f) - 1) * f)
    return likelihood.forward(f).log_prob(targets.expand(torch.broadcast_shapes(targets.shape, f.shape)))
