r"""A square root R of a prior covariance, K = R R': draws from the prior, and prediction from known latent values.

    f = mu + R v,  v ~ N(0, I);       E[f_* | f] = mu_* + (R^+ k_*)' (R^+ (f - mu)),   V_* = k_** - |R^+ k_*|^2

The Cholesky factor where there is one. A covariance of lower rank (duplicate inputs, smooth kernels) has its
eigenvectors' instead, without those whose eigenvalues are zero to rounding; no jitter in either case.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.linalg.products import times

_ROUNDING = 1e-5  # of the largest eigenvalue: those of a few thousand values in float32 reach as far below zero


@dataclass(frozen=True)
class SquareRoot:
    """R with K = R R'; float64.

    Example:
        >>> import torch
        >>> root = SquareRoot.of(torch.tensor([[4.0, 0.0], [0.0, 9.0]]).double())
        >>> root
        SquareRoot(matrix=tensor([[2., 0.],
                [0., 3.]], dtype=torch.float64), inverse_scale=None)
    """

    matrix: Tensor  # R (..., N, N)
    inverse_scale: Tensor | None  # one over R's singular values (..., N), zero where they are; None for a triangle

    @classmethod
    def of(cls, covariance: Tensor) -> SquareRoot:
        """Return the root of a covariance (..., N, N), or of each of a batch.

        Raises:
            ValueError: it is not positive semidefinite.
        """
        chol, info = torch.linalg.cholesky_ex(covariance)
        size, eps = covariance.size(-1), torch.finfo(covariance.dtype).eps
        scale = covariance.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True)
        # Whether a pivot that ought to be zero is a little above or below is chance.
        is_rounding = chol.diagonal(dim1=-2, dim2=-1).square() <= size * eps * scale
        if not bool(info.any() | is_rounding.any()):
            return cls(chol, None)
        values, vectors = torch.linalg.eigh(covariance)
        largest = values[..., -1:]
        if bool((values < -_ROUNDING * largest).any()):
            raise ValueError(
                "the prior covariance must be positive semidefinite; got a smallest eigenvalue of "
                f"{values.min().item():.3g}, the largest being {largest.max().item():.3g}. Check the kernel's "
                "parameters, or pass `jitter`."
            )
        is_zero = values <= size * eps * largest
        scale = torch.where(is_zero, 0.0, values).sqrt()
        return cls(vectors * scale.unsqueeze(-2), torch.where(is_zero, 0.0, 1 / torch.where(is_zero, 1.0, scale)))

    def times(self, vector: Tensor) -> Tensor:
        """Return R vector (..., N)."""
        return times(self.matrix, vector)

    def solve(self, right: Tensor) -> Tensor:
        """Return R^+ right, (..., N, S), the pseudo-inverse where R is singular."""
        if self.inverse_scale is None:
            return torch.linalg.solve_triangular(self.matrix, right, upper=False)
        return self.inverse_scale.square().unsqueeze(-1) * (self.matrix.mT @ right)
