r"""A Gaussian process as a sample site of a Pyro program, in whitened coordinates.

    v ~ N(0, I),   f = mu + L v,   L L' = K + jitter I

Samplers and guides work on v. Its prior does not depend on the hyperparameters, so that they can move without tearing
f from its prior.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import pyro
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import Likelihood
from linear_operator import to_linear_operator
from pyro import distributions as dist
from torch import Tensor
from torch.distributions import Distribution

from gpext.linalg.products import times
from gpext.posteriors import DensePrior
from gpext.ppl.observe import observe

WHITENED = "_whitened"  # what the name of v adds to the name of f

Prior: TypeAlias = MultivariateNormal | tuple[Tensor, Tensor]  # or its mean and its covariance


@dataclass(frozen=True)
class WhitenedPrior:
    """N(mu, L L') over N latent values, in float64 and in the graph of what it was made from."""

    prior: DensePrior
    chol: Tensor  # L (..., N, N)
    dtype: torch.dtype  # of f

    @classmethod
    def of(cls, name: str, prior: Prior, jitter: float) -> WhitenedPrior:
        """Factorise a prior; `name` is what an error calls it.

        Raises:
            TypeError: the prior is no MultivariateNormal, or one of several tasks, and no pair of tensors.
            ValueError: the shapes of a pair do not belong together.
            torch.linalg.LinAlgError: K + jitter I is not positive definite.
        """
        prior = _gaussian(name, prior)
        if not isinstance(prior, MultivariateNormal) or isinstance(prior, MultitaskMultivariateNormal):
            raise TypeError(
                f"the prior of {name!r} must be a gpytorch MultivariateNormal, with a batch shape for several latent "
                f"functions, or a pair (mean, K) of tensors; got {type(prior).__qualname__}."
            )
        dense = DensePrior.of(prior.mean, prior.covariance_matrix, jitter)
        chol, info = torch.linalg.cholesky_ex(dense.covariance)
        if bool((info != 0).any()):  # Pyro's samplers know such an error by these words, and reject the proposal
            raise torch.linalg.LinAlgError(
                f"the prior covariance of {name!r}: input is not positive-definite, with jitter={jitter:g} on its "
                f"diagonal (leading minor {int(info.max())}). Pass a larger `jitter`, or check the kernel's parameters."
            )
        return cls(dense, chol, prior.mean.dtype)

    def color(self, whitened: Tensor) -> Tensor:
        """Return f = mu + L v (..., N), in float64."""
        return self.prior.mean + times(self.chol, whitened.double())

    def whiten(self, latent: Tensor) -> Tensor:
        """Return v = L^-1 (f - mu) (..., N)."""
        centred = (latent - self.prior.mean).unsqueeze(-1)
        return torch.linalg.solve_triangular(self.chol, centred, upper=False).squeeze(-1).to(self.dtype)

    def sample(self, name: str, event_dim: int | None = None) -> Tensor:
        """Sample v and return f, both as sites of the program; see :func:`latent_gp`."""
        shape = self.prior.mean.shape
        size = len(shape) if event_dim is None else event_dim
        zero = torch.zeros(shape, dtype=self.dtype, device=self.chol.device)
        standard = dist.Normal(zero, torch.ones_like(zero)).to_event(size)
        whitened = pyro.sample(name + WHITENED, standard, infer={"whitened_prior": self})
        if event_dim is None:
            _check_plates(name, shape, whitened.shape[: -len(shape)])
        return pyro.deterministic(name, self.color(whitened).to(self.dtype), event_dim=size)


def _gaussian(name: str, prior: Prior) -> MultivariateNormal:
    """Return the prior that a pair (mean, K) stands for, not factorised yet; anything else as it is.

    Raises:
        TypeError: a pair of other things than tensors.
        ValueError: their shapes do not belong together.
    """
    if not isinstance(prior, tuple):
        return prior
    if len(prior) != 2 or not all(isinstance(part, Tensor) for part in prior):
        kinds = ", ".join(type(part).__qualname__ for part in prior)
        raise TypeError(f"the prior of {name!r} as a pair must be tensors (mean, K); got ({kinds}).")
    mean, covariance = prior
    if mean.dim() < 1 or covariance.shape[-2:] != 2 * mean.shape[-1:]:
        raise ValueError(
            f"the prior of {name!r} must be a mean (..., N) and a covariance (..., N, N); got {tuple(mean.shape)} and "
            f"{tuple(covariance.shape)}."
        )
    return MultivariateNormal(mean, to_linear_operator(covariance))


def _check_plates(name: str, shape: torch.Size, plates: torch.Size) -> None:
    """Refuse a batch that may be the plates' own: repeated in each of them it would have as many functions too many."""
    batch = shape[:-1]
    if any(own == plate > 1 for own, plate in zip(reversed(batch), reversed(plates), strict=False)):
        raise ValueError(
            f"the prior of {name!r} has batch shape {tuple(batch)} inside plates of shape {tuple(plates)}: say "
            f"event_dim=1 if the plates index this batch, event_dim={len(shape)} if each of them has such a batch."
        )


def latent_gp(name: str, prior: Prior, *, jitter: float = 0.0, event_dim: int | None = None) -> Tensor:
    """Sample f ~ N(mu, K + jitter I) in a Pyro program, by way of whitened values.

    The sites are `name` + "_whitened", with prior N(0, I), and `name`, deterministic. Their whole shape is one event, a
    batch of latent functions included: they are independent, and need no plate. Inside a plate a prior without a batch
    is repeated, one function a plate index; one whose batch the plate indexes needs `event_dim=1`:

        with pyro.plate("groups", 3):
            lengthscale = pyro.sample("lengthscale", dist.LogNormal(0.0, 1.0))  # (3,)
            f = latent_gp("f", prior(lengthscale), event_dim=1)                 # (3, N)

    Args:
        name: of f.
        prior: a gpytorch MultivariateNormal, mean (..., N); or a pair of tensors, the mean and a dense K (..., N, N).
            A MultivariateNormal of a dense K is factorised by torch as it stands, before any jitter: give the pair.
        jitter: added to the diagonal of K.
        event_dim: how many last dimensions of f are one event, 1 for each function by itself; None for all.

    Returns:
        f (..., N), in the dtype of the prior.

    Raises:
        TypeError: the prior is no MultivariateNormal, or one of several tasks, and no pair of tensors.
        ValueError: the shapes of a pair do not belong together; without `event_dim`, a batch inside plates that may be
            theirs; one that is not 1, ..., dim of f.
        torch.linalg.LinAlgError: K + jitter I is not positive definite. Pyro's samplers reject such a proposal.

    Example:
        >>> import pyro, torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> prior = MultivariateNormal(torch.zeros(3).double(), torch.eye(3).double())
        >>> pyro.poutine.trace(lambda: latent_gp("f", prior)).get_trace().nodes["f"]["value"].shape
        torch.Size([3])
    """
    whitened = WhitenedPrior.of(name, prior, jitter)
    dims = whitened.prior.mean.dim()
    if event_dim is not None and not 1 <= event_dim <= dims:
        raise ValueError(f"event_dim must be 1, ..., {dims}, or None; got {event_dim!r}.")
    return whitened.sample(name, event_dim)


def latent_model(
    prior: Prior | Callable[[], Prior],
    likelihood: Likelihood,
    targets: Tensor,
    *,
    jitter: float = 0.0,
) -> Callable[[], None]:
    """Return the Pyro model f ~ prior, y ~ p(y | f), its sites "f_whitened", "f" and "y".

    Args:
        prior: the distribution of f, as :func:`latent_gp` takes it; or a function of no arguments that returns it,
            called inside the program, where it may sample hyperparameters: `lambda:
            gp.pyro_sample_from_prior().forward(x)` for those of a gpytorch model that have priors.
        likelihood: any likelihood of gpext or gpytorch; its parameters that have priors are sampled as well.
        targets: what was observed.
        jitter: added to the diagonal of K.

    Raises:
        TypeError, torch.linalg.LinAlgError: as :func:`latent_gp`, when the prior is known.

    Example:
        >>> from pyro.infer import NUTS  # doctest: +SKIP
        >>> draws = sample_posterior(NUTS(latent_model(prior, likelihood, y)), num_samples=500)  # doctest: +SKIP
        >>> draws.samples["f"].shape  # doctest: +SKIP
        torch.Size([1, 500, 20])
    """
    if not isinstance(prior, Distribution | tuple):  # Pyro's distributions are callable too
        return partial(_sampled_prior, prior, likelihood, targets, jitter)
    with torch.no_grad():  # factorised once
        whitened = WhitenedPrior.of("f", prior, jitter)
    return partial(_program, whitened, likelihood, targets)


def _sampled_prior(prior: Callable[[], Prior], likelihood: Likelihood, targets: Tensor, jitter: float) -> None:
    _program(WhitenedPrior.of("f", prior(), jitter), likelihood, targets)


def _program(whitened: WhitenedPrior, likelihood: Likelihood, targets: Tensor) -> None:
    if any(True for _ in likelihood.named_priors()):
        likelihood = likelihood.pyro_sample_from_prior()
    observe("y", likelihood, whitened.sample("f"), targets)
