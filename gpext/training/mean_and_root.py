r"""q(u) by its mean and a root of its covariance, for optimisers that need derivatives in these.

On backward() a `NaturalVariationalDistribution` stores derivatives g and G in its expectation parameters m and
m m' + S, for gpytorch's NGD. From these,

    dF/dm = g + 2 G m,     dF/dL = 2 tril(G L),     S = L L'
"""

from __future__ import annotations

import torch
from gpytorch.variational import NaturalVariationalDistribution
from torch import Tensor


class MeanAndRoot:
    """The mean and the lower triangular root of one q(u), as leaves separate from its natural parameters."""

    def __init__(self, distribution: NaturalVariationalDistribution) -> None:
        self.distribution = distribution
        with torch.no_grad():
            q = distribution()
        self.mean: Tensor = q.mean.clone().requires_grad_()
        self.root: Tensor = q.lazy_covariance_matrix.cholesky().to_dense().clone().requires_grad_()

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that an optimiser moves."""
        return [self.mean, self.root]

    @torch.no_grad()
    def commit(self) -> None:
        """Give q(u) the natural parameters S^-1 m and -S^-1 / 2 of the leaves, and drop their `.grad`."""
        precision = torch.cholesky_inverse(self.root.double())
        q = self.distribution
        q.natural_vec.copy_((precision @ self.mean.double().unsqueeze(-1)).squeeze(-1))
        q.natural_mat.copy_(-0.5 * precision)
        q.natural_vec.grad = q.natural_mat.grad = None

    @torch.no_grad()
    def collect(self) -> None:
        """Convert the gradients that a backward pass left in the natural parameters to the leaves' `.grad`."""
        g, G = self.distribution.natural_vec.grad, self.distribution.natural_mat.grad
        self.mean.grad = g + 2 * (G @ self.mean.unsqueeze(-1)).squeeze(-1)
        self.root.grad = 2 * (G @ self.root).tril()
