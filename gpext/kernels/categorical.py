r"""A kernel of columns whose numbers are names of categories [Roustant et al. 2020, Sec. 3: compound symmetry].

    k(a, b) = prod_j exp(-[a_j != b_j] / l_j)

Column by column two categories are correlated by e^{-1/l_j}, whichever they are: l_j near zero makes their functions
independent, a large one makes the column irrelevant. Each factor is (1 - rho) I + rho 1 1' between categories, positive
definite for 0 < rho < 1, and so is the product.
"""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.kernels import Kernel
from torch import Tensor


class CategoricalKernel(Kernel):
    """The exchangeable kernel of categorical columns: of variance one, correlated by exp(-1 / lengthscale) per column.

    Numbers are compared for equality, so that any code of the categories will do. A category that training has not
    seen is correlated with every other one as all are.

    Args:
        **kwargs: of gpytorch's Kernel: `ard_num_dims` for a lengthscale of each column, `batch_shape`, `active_dims`,
            `lengthscale_prior`, `lengthscale_constraint`.

    Example:
        >>> import torch
        >>> kernel = CategoricalKernel()
        >>> kernel.lengthscale = 1.0
        >>> kernel(torch.tensor([[0.0], [2.0]])).to_dense().detach()
        tensor([[1.0000, 0.3679],
                [0.3679, 1.0000]])
    """

    has_lengthscale = True

    def forward(
        self, x1: Tensor, x2: Tensor, diag: bool = False, last_dim_is_batch: bool = False, **params: Any
    ) -> Tensor:
        """Return the kernel between inputs (..., N, d) and (..., M, d); with `diag` that of pairs of rows (..., N).

        Raises:
            NotImplementedError: `last_dim_is_batch`.
        """
        if last_dim_is_batch:
            raise NotImplementedError("give CategoricalKernel one column by active_dims in place of last_dim_is_batch.")
        rate = self.lengthscale.reciprocal()  # (..., 1, d) or (..., 1, 1)
        if diag:
            return torch.exp(-((x1 != x2) * rate).sum(-1))
        total = torch.zeros((), dtype=x1.dtype, device=x1.device)
        for j in range(x1.size(-1)):  # a matrix at a time
            differ = (x1[..., :, None, j] != x2[..., None, :, j]).to(x1.dtype)
            total = total + differ * rate[..., min(j, rate.size(-1) - 1), None]
        return total.neg().exp()
