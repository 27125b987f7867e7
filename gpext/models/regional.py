r"""Predictions of a nearest-neighbour model of a million data, one region of space at a time.

The posterior of a region is inferred from its own data and those within a margin around it:

    p(f_* | y)  near  p(f_* | y of the region and of its margin),

exact as the margin grows, for near data screen distant ones off. Time is linear in the number of data, and memory is
that of one region.
"""

from __future__ import annotations

import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from gpext.bounds import num_latents
from gpext.callers import warn_caller
from gpext.checks import whole_number
from gpext.distributions import LatentNormal
from gpext.inference import InferenceWarning, Status
from gpext.inference.result import without_inference_warnings
from gpext.linalg.regions import regions
from gpext.models.latent_gp import LatentGP, restricted_to
from gpext.progress import Progress


@torch.no_grad()
def predict_by_regions(
    model: LatentGP, x: Tensor, *, size: int = 10_000, margin: float = 10.0, progress: bool = True
) -> MultivariateNormal:
    """Return the marginal posteriors of f at new inputs, of a model whose data are too many for one inference.

    Args:
        model: a LatentGP with neighbours, of one latent, as trained. Its data and sites stay as they are.
        x: new inputs (S, d).
        size: the largest number of data of a region.
        margin: the width of the margin of a region, in the typical distance of its data. Twice as much that changes
            predictions means that it was too little.
        progress: show a bar on a terminal, or lines in the log "gpext".

    Returns:
        Independent normals, without covariances between new inputs; the likelihood takes it as it takes `model(x)`.

    Raises:
        TypeError: not a LatentGP with neighbours.
        ValueError: no set of inputs (S, d), or a size or margin that is not positive.
        NotImplementedError: a likelihood of several latents.

    Warns:
        InferenceWarning: inferences of some regions have not converged; the message says how many.

    Example:
        >>> import gpytorch, torch, gpext
        >>> class Model(gpext.models.LatentGP):
        ...     def __init__(self, x, y, likelihood):
        ...         super().__init__(x, y, likelihood, gpext.inference.Laplace(), neighbours=10)
        ...         self.mean_module = gpytorch.means.ConstantMean()
        ...         self.covar_module = gpytorch.kernels.MaternKernel(1.5)
        ...         self.covar_module.lengthscale = 0.1
        ...
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
        >>> x = torch.rand(200, 2, generator=torch.Generator().manual_seed(0)).double()
        >>> model = Model(x, (x[:, 0] > 0.5).double(), gpext.likelihoods.BernoulliLogitLikelihood()).double().eval()
        >>> f = predict_by_regions(model, x[:3], size=100, margin=5.0, progress=False)
        >>> bool((f.mean - model(x[:3]).mean).abs().max() < 0.1)
        True
    """
    if not isinstance(model, LatentGP) or model.variational_strategy.neighbours is None:
        raise TypeError(
            f"expected a LatentGP with neighbours; got {type(model).__qualname__}. Others predict as a whole."
        )
    if num_latents(model.likelihood) is not None:
        raise NotImplementedError("predictions by regions are of one latent; predict with model(x).")
    size = whole_number("size", size, 1)
    if not margin > 0:
        raise ValueError(f"margin must be positive; got {margin}.")
    (data,) = model.train_inputs
    if x.dim() != 2 or x.size(-1) != data.size(-1):
        raise ValueError(f"expected new inputs (S, {data.size(-1)}); got {tuple(x.shape)}.")
    choice = model.variational_strategy.neighbours
    choice.ensure_scale(model, data)
    scaled = choice.scaled(data)
    mean, variance = x.new_zeros(len(x)), x.new_ones(len(x))
    statuses, was_training = [], model.training
    model.eval()
    try:
        with Progress("regions", len(x), shown=progress) as bar:
            for region in regions(scaled, choice.scaled(x), size):
                if not len(region.others):
                    continue
                # what has not converged is counted below
                with restricted_to(model, region.with_margin(scaled, margin)), without_inference_warnings():
                    found = model(x[region.others])
                    mean[region.others], variance[region.others] = found.mean, found.variance
                    statuses.append(model.result.status)
                bar.update(len(region.others))
    finally:
        model.train(was_training)
    failed = [status for status in statuses if status is not Status.CONVERGED]
    if failed:
        warn_caller(
            f"inference has not converged in {len(failed)} of {len(statuses)} regions: {failed[0].value}",
            InferenceWarning,
        )
    return LatentNormal(mean, DiagLinearOperator(variance))


def compact_subset(x: Tensor, number: int, *, size: int = 2500, generator: torch.Generator | None = None) -> Tensor:
    """Return the indices (n,) of the data of some regions, on which to learn hyperparameters.

    Data at random from a million are too far apart to tell about short distances; those of a few whole regions are not.

    Args:
        x: inputs (N, d).
        number: of regions, at random and different.
        size: the largest number of data of a region.
        generator: source of the choice, on the CPU; seeded with 0 by default.

    Raises:
        ValueError: a number or a size that is not positive.

    Example:
        >>> import torch
        >>> x = torch.rand(10_000, 2)
        >>> index = compact_subset(x, 2, size=1000)
        >>> len(index) <= 2000
        True

    Then ``model = Model(x[index], y[index], ...)`` is trained by :func:`gpext.fit`, and its state dict loaded into a
    model of all data for :func:`predict_by_regions`.
    """
    number, size = whole_number("number", number, 1), whole_number("size", size, 1)
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    found = [region.points for region in regions(x.detach(), x[:0], size)]
    chosen = torch.randperm(len(found), generator=generator, device="cpu")[:number]
    return torch.cat([found[i] for i in chosen.tolist()])
