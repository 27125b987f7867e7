"""Draws by a generator of the user's, where torch's own distributions know only the global ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gpext.checks import whole_number

_ROUNDING = 1e-4  # of eigenvalues below zero, in squared logarithms


@contextmanager
def drawn_from(generator: torch.Generator | None) -> Iterator[None]:
    """Let torch's global generators begin at a seed that `generator` draws, and leave them as they were.

    Without one they draw as they stand.
    """
    if generator is None:
        yield
        return
    seed = torch.randint(2**31, (), generator=generator, device=generator.device)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        torch.manual_seed(int(seed))
        yield


def draws_of_logs(
    mean: Tensor, covariance: Tensor, num_draws: int, *, generator: torch.Generator | None = None
) -> Tensor:
    """Return joint draws (num_draws, ..., N) of logarithms of positive numbers, from N(mean, covariance).

    Eigenvalues of the covariance that rounding has made negative count as zero, down to -1e-4: a standard deviation of
    one per cent of the numbers themselves, which float32 may bring about.

    Args:
        mean: (..., N).
        covariance: (..., N, N).
        num_draws: how many.
        generator: of the draws; torch's global one by default.

    Raises:
        TypeError, ValueError: not a positive whole number of draws, or a covariance that is not positive semidefinite.
    """
    count = whole_number("num_draws", num_draws, 1)
    root, info = torch.linalg.cholesky_ex(covariance.double())
    if bool(info.any()):
        values, vectors = torch.linalg.eigh(covariance.double())
        if bool((values < -_ROUNDING).any()):
            raise ValueError(
                f"the covariance must be positive semidefinite; got eigenvalues from {float(values.min()):.3g} to "
                f"{float(values.max()):.3g}. In float32 rounding may do this: convert the model by .double()."
            )
        root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    with drawn_from(generator):
        z = torch.randn(count, *mean.shape, dtype=torch.float64, device=mean.device)
    return (mean + torch.einsum("...ij,k...j->k...i", root, z)).to(mean.dtype)
