r"""Inputs of data that depend on linear functions of f, for variational strategies.

With h = A f, f the values at P inputs X, the prior of a batch of rows of A is

    cov(u, h) = K_zx A',     var(h_i) = a_i' K a_i,     E[h] = A mu

A batch evaluates the kernel between Z and those inputs alone that its rows have, each once, and in the block E x E of
each row: O(B E M + B E^2) for B rows of E entries. The Nystrom term a_i' (K - Q) a_i follows as for a single input.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from gpext.designs import Design
from gpext.kernels import dense_covariance
from gpext.variational.prior_blocks import CrossBlocks


@dataclass(frozen=True)
class DesignInputs:
    """P inputs and the design by which N data depend on the values there.

    Raises:
        TypeError: something else than a design.
        ValueError: it has another number of columns than there are inputs.

    Example:
        >>> import torch
        >>> from gpext.designs import pairs
        >>> number_of(DesignInputs(torch.zeros(3, 1), pairs(torch.tensor([[0, 1], [1, 2]]), num_inputs=3)))
        2
    """

    x: Tensor  # (..., P, d)
    design: Design  # (N, P)

    def __post_init__(self) -> None:
        if not isinstance(self.design, Design):
            name = type(self.design).__qualname__
            raise TypeError(f"expected a gpext.designs.Design; got {name}. See designs.rows_of.")
        if self.x.dim() < 2 or self.x.size(-2) != self.design.shape[1]:
            raise ValueError(
                f"expected inputs (..., P, d) for a design of {self.design.shape[1]} columns, one for each; got "
                f"{tuple(self.x.shape)}."
            )
        if self.design.rows.device != self.x.device:
            object.__setattr__(self, "design", copy.deepcopy(self.design).to(self.x.device))

    def take(self, index: Tensor | slice) -> DesignInputs:
        """Return those of the data at `index`, with the inputs that these depend on."""
        columns, design = self.design.take(index).occupied()
        return DesignInputs(self.x[..., columns, :], design)

    def combine(self, cross: CrossBlocks, variance: Tensor, jitter: float) -> CrossBlocks:
        """Return the blocks of h from those of f at the inputs and the prior variances of h.

        Args:
            cross: K_zx and mu at the inputs.
            variance: a_i' K a_i (..., N).
            jitter: variance added to each f.
        """
        covariance = self.design.times_matrix(cross.covariance.mT).mT
        added = jitter * self.design.squared_norms().to(variance)
        return CrossBlocks(covariance, variance + added, self.design.times(cross.mean))


Inputs = Tensor | DesignInputs
"""One input for each datum (..., N, d), or those of a design."""


def number_of(x: Inputs) -> int:
    """Return N.

    Example:
        >>> import torch
        >>> number_of(torch.zeros(5, 2))
        5
    """
    return x.design.num_data if isinstance(x, DesignInputs) else x.size(-2)


def take_inputs(x: Inputs, index: Tensor | slice) -> Inputs:
    """Return the inputs of the data at `index`.

    Example:
        >>> import torch
        >>> take_inputs(torch.arange(4.0).unsqueeze(-1), torch.tensor([2, 0]))
        tensor([[2.],
                [0.]])
    """
    return x.take(index) if isinstance(x, DesignInputs) else x[..., index, :]


def places(x: Inputs) -> Tensor:
    """Return the inputs at which f is evaluated (..., P, d).

    Example:
        >>> import torch
        >>> places(torch.zeros(5, 2)).shape
        torch.Size([5, 2])
    """
    return x.x if isinstance(x, DesignInputs) else x


def row_variances(prior: Callable[[Tensor], MultivariateNormal], x: Tensor, design: Design) -> Tensor:
    """Return a_i' K a_i (..., N), from the prior at the inputs of one row each, in the autograd graph.

    Args:
        prior: distribution of f at any inputs.
        x: (..., P, d), with a dimension for every batch dimension of the prior.
        design: A (N, P).
    """
    index, weights = design.padded()
    blocks = prior(x[..., index, :].movedim(-3, 0)).lazy_covariance_matrix
    dense = dense_covariance(blocks)  # (N, ..., E, E)
    weights = weights.to(dense)
    return torch.einsum("ne,n...ef,nf->...n", weights, dense, weights)
