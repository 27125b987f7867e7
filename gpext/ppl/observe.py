"""A likelihood p(y | f) as a factor of a Pyro program."""

from __future__ import annotations

from dataclasses import dataclass

import pyro
import torch
from gpytorch.likelihoods import Likelihood
from pyro import distributions as dist
from torch import Tensor

from gpext.likelihoods import LatentLikelihood


@dataclass(frozen=True)
class Observation:
    """The observation of a site, for kernels that use more of it than its density."""

    likelihood: Likelihood
    latent: Tensor  # the argument of the likelihood: f (..., N), or (..., D, N)
    targets: Tensor


class _Factor(dist.Unit):
    """One factor of all the data, which a plate would count as often as it is wide."""

    def expand(self, batch_shape: torch.Size, _instance: _Factor | None = None) -> _Factor:
        if torch.Size(batch_shape).numel() > self.batch_shape.numel():
            raise ValueError(
                "ppl.observe is one factor of all the data, and a plate around it would count it "
                f"{torch.Size(batch_shape).numel() // max(self.batch_shape.numel(), 1)} times: call it outside of "
                "plates. To observe inside, or minibatches, write pyro.sample(name, likelihood(f), obs=targets)."
            )
        return super().expand(batch_shape, _instance)


def observe(name: str, likelihood: Likelihood, f: Tensor, targets: Tensor) -> None:
    """Multiply a Pyro program by p(targets | f), as one factor.

    With gpext's likelihoods its value is `likelihood.log_prob(targets, f)`, summed over the data; otherwise that of the
    distribution `likelihood(f)`. Where the targets may also be sampled, write
    `pyro.sample(name, likelihood(f), obs=targets)` in plates instead.

    Args:
        name: of the factor.
        likelihood: of gpext or of gpytorch.
        f: the latent values, as the likelihood takes them: (..., N), or (..., D, N) for gpext's of D latents.
        targets: as the likelihood takes them; their shape is that of the data of f.

    Raises:
        TypeError: no likelihood; targets in half precision.
        ValueError: targets of another shape than f, or outside the support; inside a plate that would repeat it.

    Example:
        >>> import pyro, torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> from gpext.likelihoods import PoissonLikelihood
        >>> from gpext.ppl import latent_gp
        >>> prior = MultivariateNormal(torch.zeros(3).double(), torch.eye(3).double())
        >>> def program():
        ...     observe("y", PoissonLikelihood(), latent_gp("f", prior), torch.tensor([0.0, 1.0, 2.0]).double())
        >>> "y" in pyro.poutine.trace(program).get_trace().nodes
        True
    """
    if not isinstance(likelihood, Likelihood):
        raise TypeError(f"expected a likelihood of gpext or gpytorch; got {type(likelihood).__qualname__}.")
    log_prob, size = (_of_latent if isinstance(likelihood, LatentLikelihood) else _of_stock)(likelihood, f, targets)
    factor = _Factor(log_prob.sum(list(range(-size, 0))) if size else log_prob)
    seen = {"is_auxiliary": True, "observation": Observation(likelihood, f, targets)}
    pyro.sample(name, factor, obs=factor.sample(), infer=seen)


def _of_latent(likelihood: LatentLikelihood, f: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """Return log p(y | f), and how many of its last dimensions are the data's."""
    data = likelihood.datum_shape(targets)
    latents = likelihood.num_latents
    if latents is not None and (f.dim() < 2 or f.size(-2) != latents):
        raise ValueError(
            f"{type(likelihood).__name__} needs {latents} latent functions: f of shape (..., {latents}, N); got "
            f"{tuple(f.shape)}."
        )
    _check_shape(targets, data, f, f.shape if latents is None else f.shape[:-2] + f.shape[-1:])
    return likelihood.log_prob(targets, f), len(data)


def _of_stock(likelihood: Likelihood, f: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    conditional = likelihood(f)
    _check_shape(targets, targets.shape, f, conditional.batch_shape + conditional.event_shape)
    return conditional.log_prob(targets), targets.dim() - len(conditional.event_shape)


def _check_shape(targets: Tensor, data: torch.Size, f: Tensor, expected: torch.Size) -> None:
    if not data or expected[-len(data) :] != data:
        raise ValueError(
            f"targets must have the shape of the data of f; got targets of shape {tuple(targets.shape)} and f of shape "
            f"{tuple(f.shape)}. Expand the targets for a batch."
        )
