"""Choices of inducing points: k-means centres, or greedily where the prior is least explained."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from gpext.callers import warn_caller
from gpext.checks import check_finite, check_tensor, whole_number

Inputs = Tensor | Iterable[Tensor | tuple[Tensor, ...] | list[Tensor]]


def kmeans_inducing_points(
    inputs: Inputs, num_inducing: int, *, num_iterations: int = 20, max_points: int = 20_000, seed: int = 0
) -> Tensor:
    """Return the k-means centres (M, d) of the inputs, from a k-means++ start [Arthur & Vassilvitskii 2007].

    Args:
        inputs: (N, d), or a loader that yields inputs or (inputs, targets, ...) batches.
        num_inducing: M.
        num_iterations: Lloyd iterations; 0 keeps the k-means++ seeds, which are inputs.
        max_points: a uniform sample of at most this many inputs is used.
        seed: of the sample and of k-means++.

    Raises:
        ValueError: fewer than M distinct inputs, or inputs that are not finite.

    Example:
        >>> import torch
        >>> x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
        >>> kmeans_inducing_points(x, 10).shape
        torch.Size([10, 2])
    """
    from sklearn.cluster import KMeans, kmeans_plusplus  # three quarters of the time that importing gpext would take

    points = _distinct_sample(inputs, num_inducing, max_points, seed)
    array = points.double().cpu().numpy()
    if num_iterations == 0:
        centres, _ = kmeans_plusplus(array, num_inducing, random_state=seed)
    else:
        model = KMeans(num_inducing, init="k-means++", n_init=1, max_iter=num_iterations, random_state=seed)
        centres = model.fit(array).cluster_centers_
    return torch.from_numpy(np.ascontiguousarray(centres)).to(points)


@torch.no_grad()
def greedy_inducing_points(
    inputs: Inputs, num_inducing: int, kernel: Kernel, *, max_points: int = 20_000, seed: int = 0
) -> Tensor:
    """Return M inputs (M, d), each where the prior variance given the ones before is largest [Burt et al. 2020].

    A pivoted Cholesky factorisation of the kernel matrix, O(N M^2) time and O(N M) memory, without forming it.

    Args:
        inputs: (N, d), or a loader.
        num_inducing: M.
        kernel: the prior's kernel at the hyperparameters to choose for; no batch shape.
        max_points: a uniform sample of at most this many inputs is searched.
        seed: of the sample.

    Returns:
        M points; fewer, with a warning, once no input has any variance left.

    Raises:
        ValueError: fewer than M distinct inputs, or inputs that are not finite.

    Example:
        >>> import gpytorch, torch
        >>> x = torch.tensor([[0.0], [0.01], [1.0]])
        >>> greedy_inducing_points(x, 2, gpytorch.kernels.RBFKernel()).shape
        torch.Size([2, 1])
    """
    points = _distinct_sample(inputs, num_inducing, max_points, seed)
    remaining = kernel(points, diag=True).double()
    rounding = torch.finfo(points.dtype).eps * remaining.max() * num_inducing
    factor = remaining.new_zeros(num_inducing, len(points))
    chosen: list[int] = []
    for step in range(num_inducing):
        pivot = int(remaining.argmax())
        if remaining[pivot] <= rounding:
            warn_caller(
                f"{step} of {num_inducing} inducing points already explain the prior to rounding; returning those.",
                UserWarning,
            )
            break
        chosen.append(pivot)
        column = kernel(points[pivot : pivot + 1], points).to_dense().squeeze(0).double()
        factor[step] = (column - factor[:step, pivot] @ factor[:step]) / remaining[pivot].sqrt()
        remaining = remaining - factor[step].square()
        remaining[pivot] = 0
    return points[torch.tensor(chosen, device=points.device)].clone()


def _distinct_sample(inputs: Inputs, num_inducing: int, max_points: int, seed: int) -> Tensor:
    whole_number("num_inducing", num_inducing, 1)
    whole_number("max_points", max_points, 1)
    generator = torch.Generator().manual_seed(seed)
    if not isinstance(inputs, Tensor):
        inputs = _reservoir(inputs, max_points, generator)
    points = inputs.detach()
    points = points.unsqueeze(-1) if points.dim() == 1 else points
    if points.dim() != 2:
        raise ValueError(f"expected inputs of shape (N, d); got {tuple(points.shape)}.")
    check_finite("inputs", points)
    if len(points) > max_points:
        order = torch.randperm(len(points), generator=generator, device="cpu")
        points = points[order[:max_points].to(points.device)]
    points = torch.unique(points, dim=0)
    if len(points) < num_inducing:
        raise ValueError(
            f"{num_inducing} inducing points need as many distinct inputs; got {len(points)}. Use num_inducing="
            f"{len(points)} or fewer."
        )
    return points


def _reservoir(loader: Iterable, size: int, generator: torch.Generator) -> Tensor:
    """Return a uniform sample of at most `size` inputs in one pass [Vitter 1985, algorithm R, a batch at a time]."""
    kept, seen = None, 0
    for batch in loader:
        x = batch[0] if isinstance(batch, tuple | list) and batch else batch
        check_tensor("inputs", x)
        x = x.unsqueeze(-1) if x.dim() == 1 else x
        fill = 0
        if kept is None or len(kept) < size:
            fill = min(size - (0 if kept is None else len(kept)), len(x))
            kept = x[:fill].clone() if kept is None else torch.cat([kept, x[:fill]])
        rest = x[fill:]
        order = torch.arange(seen + fill, seen + len(x), device="cpu")
        slots = (torch.rand(len(rest), generator=generator, dtype=torch.float64, device="cpu") * (order + 1)).long()
        for slot, row in zip(slots[slots < size].tolist(), rest[(slots < size).to(rest.device)], strict=True):
            kept[slot] = row
        seen += len(x)
    if kept is None:
        raise ValueError("the loader yielded no batch.")
    return kept
