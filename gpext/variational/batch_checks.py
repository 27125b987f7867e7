"""Checks of a batch by a variational strategy, before anything changes."""

from __future__ import annotations

import torch
from torch import Tensor

from gpext.augmentations import Augmentation
from gpext.checks import check_finite, check_tensor, whole_number
from gpext.inference import LikelihoodTerm, require_augmentation
from gpext.likelihoods import AugmentedLikelihood, LatentLikelihood
from gpext.variational.design_inputs import DesignInputs, Inputs, number_of, places


def check_data(
    x: Inputs,
    y: Tensor,
    likelihood: LatentLikelihood,
    inducing_points: Tensor,
    num_data: int | None,
    share: int | None,
) -> None:
    """Raise unless a model of such inputs and the likelihood can take the data.

    Raises:
        TypeError, ValueError: as :func:`check_batch`, and as :meth:`LatentLikelihood.check`.
    """
    check_tensor("targets", y)
    likelihood.check(y)
    check_tensor("inputs", places(x))
    check_batch(x, likelihood.datum_shape(y), num_data, share)
    check_dtype(places(x), inducing_points)
    check_columns(places(x), inducing_points)


def augmentation_for(bound: LikelihoodTerm, likelihood: LatentLikelihood, y: Tensor) -> Augmentation | None:
    """Return the augmentation of targets that have been checked, if its sites are asked for."""
    return require_augmentation(likelihood).unchecked_augmentation(y) if bound == "augmented" else None


def check_batch(x: Inputs, data: torch.Size, num_data: int | None = None, share: int | None = None) -> int:
    """Return B, the number of inputs x (..., B, d), or of rows of a design, that go with targets of `data` (..., B).

    Raises:
        TypeError: a number of data that is not whole.
        ValueError: there are none, the numbers differ, they are more than the `share` of all data that they are a
            sample of, or the inputs are not finite.

    Example:
        >>> import torch
        >>> check_batch(torch.zeros(5, 2), torch.Size([5]))
        5
    """
    if isinstance(x, DesignInputs):
        if data[-1:] != (number_of(x),):
            raise ValueError(f"expected a target for each of the {number_of(x)} rows of the design; got {tuple(data)}.")
    elif x.dim() < 2 or not data or x.size(-2) != data[-1]:
        raise ValueError(
            f"expected inputs (..., B, d) and targets (..., B); got {tuple(x.shape)} and {tuple(data)} targets."
        )
    if data[-1] == 0:
        raise ValueError("the batch is empty: at least one datum is needed.")
    if num_data is not None and whole_number("num_data", num_data, 0) < data[-1]:
        raise ValueError(f"num_data ({num_data}) is smaller than the batch ({data[-1]}).")
    if share is not None:
        most = data[-1] if num_data is None else num_data
        if not data[-1] <= whole_number("share", share, 0) <= most:
            raise ValueError(
                f"share must be the number of data that the batch is a sample of, from {data[-1]}, its own, to "
                f"{most}, all; got {share}."
            )
    check_finite("inputs", places(x))
    return data[-1]


def check_dtype(x: Tensor, parameters: Tensor) -> None:
    """Raise TypeError unless the inputs have the dtype of the model.

    Example:
        >>> import torch
        >>> check_dtype(torch.zeros(5, 2), torch.zeros(1))  # nothing is raised
    """
    if x.dtype != parameters.dtype:
        raise TypeError(
            f"the inputs are {x.dtype} and the model is {parameters.dtype}; convert the inputs with "
            f"x.to({parameters.dtype}) or the model and the likelihood with .to({x.dtype}) (float32 or float64)."
        )


def check_columns(x: Tensor, known: Tensor) -> None:
    """Raise ValueError unless the inputs (..., d) have as many columns as those the model has.

    Example:
        >>> import torch
        >>> check_columns(torch.zeros(5, 2), torch.zeros(3, 2))  # nothing is raised
    """
    if x.shape[-1:] != known.shape[-1:]:
        raise ValueError(
            f"expected inputs of {known.size(-1)} columns, (..., N, {known.size(-1)}); got {tuple(x.shape)}."
        )


def check_latents(likelihood: LatentLikelihood, distributions: torch.Size) -> None:
    """Raise ValueError unless there are as many q(u), of batch shape `distributions`, as latents a datum."""
    latents = likelihood.num_latents
    if latents is not None and distributions[-1:] != (latents,):
        raise ValueError(
            f"{type(likelihood).__qualname__} has num_latents = {latents}: expected a q(u) for each, inducing points "
            f"(..., {latents}, M, d); got q(u) of batch shape {tuple(distributions)}. Repeat the inducing points: "
            f"Z.repeat({latents}, 1, 1), and give mean and kernel batch_shape=torch.Size([{latents}])."
        )


def require_term(likelihood: LatentLikelihood, bound: LikelihoodTerm | None) -> LikelihoodTerm:
    """Return whose sites to take.

    Raises:
        TypeError: the likelihood has none of them.
        ValueError: no such bound.
    """
    if bound not in (None, "augmented", "exact"):
        raise ValueError(f"bound must be None, 'augmented' or 'exact'; got {bound!r}.")
    if bound == "augmented":
        require_augmentation(likelihood)
    if not isinstance(likelihood, LatentLikelihood):
        raise TypeError(
            f"sites need a likelihood of gpext; got {type(likelihood).__module__}.{type(likelihood).__qualname__}. "
            "Any other trains by gpytorch.mlls.VariationalELBO with gpytorch.optim.NGD."
        )
    return bound or ("augmented" if isinstance(likelihood, AugmentedLikelihood) else "exact")
