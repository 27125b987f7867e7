"""A natural-gradient step of q(u): its direction from a batch, and the longest rate that does not lower a bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpext.checks import is_finite
from gpext.inference import LikelihoodTerm, LocalTerms, augmented_sites, augmented_terms, exact_terms
from gpext.likelihoods import LatentLikelihood
from gpext.parallel import Ranks
from gpext.posteriors import InducingPosterior, condition_inducing, lower_blocks, project, symmetric_matrix
from gpext.variational.bound_gradients import gradients_apart
from gpext.variational.prior_blocks import Prepared

_MOST_HALVINGS = 30  # counts of a million want twenty


@dataclass(frozen=True)
class UpdateOptions:
    """The options of an update of q(u); see :meth:`SiteVariationalStrategy.update`.

    Raises:
        ValueError: a rate outside (0, 1].

    Example:
        >>> UpdateOptions("augmented", rate=0.5).rate
        0.5
    """

    bound: LikelihoodTerm  # whose sites
    rate: float = 1.0  # rho
    num_data: int | None = None  # N; the number of data in the batch if None
    share: int | None = None  # of how many of the N data the batch is a sample; of all if None

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate must be in (0, 1]; got {self.rate}.")


@dataclass(frozen=True)
class Batch:
    """The full step and the terms of the ELBO that a batch gives at the current q(u), scaled to all data."""

    posterior: InducingPosterior  # q(u)
    num_data: int  # N
    vector: Tensor  # s A (nu - tau mu)
    gram: Tensor  # s A diag(tau) A'
    total: Tensor | None  # s sum_i F_i of the bound whose value or derivatives were asked for
    gain: Tensor | None  # s sum_i E_i, if the sites are those of E
    gain_at: Callable[[InducingPosterior], Tensor]  # the same at another q(u)


Pull = Callable[[Tensor, InducingPosterior, LocalTerms, float], None]
"""Adds a multiple of the derivatives of sum_i F_i, of A and q(u), to `.grad`."""


@dataclass(frozen=True)
class Gradient:
    """The way by which a batch adds derivatives to the `.grad` of the parameters."""

    bound: LikelihoodTerm  # whose terms F_i are differentiated
    pull: Pull  # backpropagates from what depends on q(u) and the F_i


@torch.no_grad()
def evaluate_batch(
    posterior: InducingPosterior,
    data: Prepared,
    likelihood: LatentLikelihood,
    options: UpdateOptions,
    gradient: Gradient | None = None,
    value: LikelihoodTerm | None = None,
) -> Batch:
    """Return the step that data give at a q(u), and with a `gradient` add to the `.grad` of the parameters.

    The total is of the bound that the `gradient` differentiates, or else of the bound `value`.

    Raises:
        FloatingPointError: the step is not finite.
    """
    seen, y, augmentation = data.whitened, data.targets, data.augmentation
    size = seen.mean.size(-1)
    num_data = options.num_data or size
    scale = (num_data if options.share is None else options.share) / size
    mean, variance = posterior.marginals(seen.matrix, seen.mean, seen.conditional_variance)
    if augmentation is None:
        terms = exact_terms(likelihood, y, mean, variance)
        sites = terms.best_sites(mean)
    else:
        sites = augmented_sites(augmentation, mean, variance)
    vector, gram = project(seen.matrix, seen.mean, sites, weight=scale)
    if not is_finite(vector):
        raise FloatingPointError(
            "the update of q(u) is not finite: a parameter of the kernel, the mean or the likelihood is NaN or "
            "infinite, or a value overflowed; check them, rescale the data or work in float64."
        )
    local, term = None, value if gradient is None else gradient.bound
    if term == "augmented":
        local = augmented_terms(likelihood, y, mean, variance, sites)
    elif term == "exact":
        local = terms if augmentation is None else exact_terms(likelihood, y, mean, variance)
    if gradient is not None and local is not None:
        gradient.pull(seen.matrix, posterior, local, -scale / num_data)

    def gain_at(moved: InducingPosterior) -> Tensor:
        marginals = moved.marginals(seen.matrix, seen.mean, seen.conditional_variance)
        return scale * likelihood.expected_log_density(y, *marginals).double().sum(-1)

    return Batch(
        posterior,
        num_data,
        vector,
        gram,
        None if local is None else scale * local.total,
        scale * terms.total if options.bound == "exact" else None,
        gain_at,
    )


def evaluate_batches(
    of_rank: Callable[[], Batch],
    ranks: Ranks,
    vector: Tensor,
    gram: Tensor,
    total: Tensor,
    parameters: Sequence[Tensor],
    *,
    of: str,
) -> Batch:
    """Return the sum of the batches of all ranks, and add its derivatives to `.grad`.

    Args:
        of_rank: returns the batch of this rank, and adds its derivatives to the `.grad` of the parameters.
        ranks: processes with the same q(u) and parameters.
        vector: of the shape of a batch's.
        gram: of the shape of a batch's.
        total: of the shape of a batch's, and of its gain.
        parameters: whose `.grad` is made.
        of: what is summed, in words.
    """
    seen: list[Batch] = []

    def of_this_rank() -> list[Tensor]:
        batch = of_rank()
        seen.append(batch)
        slopes = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        totals = [torch.zeros_like(total) if own is None else own for own in (batch.total, batch.gain)]
        return [batch.vector, *totals, *slopes, *lower_blocks(batch.gram)]

    with gradients_apart(parameters) as slopes:
        like = [vector, total, total, *parameters, *lower_blocks(gram)]
        vector, total, gain, *sums = ranks.sum(of_this_rank, like, of=of)
        slopes += sums[: len(parameters)]
        gram = symmetric_matrix(sums[len(parameters) :])
    (batch,) = seen
    return replace(
        batch,
        vector=vector,
        gram=gram,
        total=None if batch.total is None else total,
        gain=None if batch.gain is None else gain,
    )


def total_divergence(posterior: InducingPosterior, likelihood: LatentLikelihood) -> Tensor:
    """Return KL(q(v) || N(0, I)) (...), summed over the latents of a datum."""
    divergence = posterior.divergence_from_prior
    return divergence if likelihood.num_latents is None else divergence.sum(-1)


@torch.no_grad()
def rising_rate(
    eta: Tensor,
    precision: Tensor,
    vector: Tensor,
    gram: Tensor,
    rate: float,
    here: Tensor,
    bound_at: Callable[[InducingPosterior], Tensor],
) -> float:
    """Return the first of rate, rate / 2, ... whose step does not take a bound below `here`, or 0.

    Args:
        eta: of q(v) before the step (..., M).
        precision: Lambda of q(v) before the step (..., M, M).
        vector: eta of the full step.
        gram: Lambda - I of the full step.
        rate: the longest step, in (0, 1].
        here: the bound before the step (...).
        bound_at: the bound at another q(v).
    """
    eta, precision = eta.double(), precision.double()
    target = gram.double().clone()
    target.diagonal(dim1=-2, dim2=-1).add_(1)
    rounding = 100 * torch.finfo(vector.dtype).eps * here.abs()
    for _ in range(_MOST_HALVINGS):
        try:
            moved = condition_inducing(torch.lerp(eta, vector.double(), rate), torch.lerp(precision, target, rate))
            if bool((bound_at(moved) >= here - rounding).all()):
                return rate
        except torch.linalg.LinAlgError:  # a negative precision too many: shorten the step
            pass
        rate /= 2
    return 0.0
