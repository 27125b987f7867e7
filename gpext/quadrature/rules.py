"""Fixed Gauss rules, computed in float64."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor


@lru_cache(maxsize=64)
def _hermite(num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
    return nodes, weights / weights.sum()


@lru_cache(maxsize=64)
def _legendre(num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.legendre.leggauss(num_nodes)


def gauss_hermite(
    num_nodes: int, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """Nodes and weights, each (num_nodes,), with sum_q w_q g(x_q) = E[g(x)] for x ~ N(0, 1).

    Exact for polynomials of degree < 2 num_nodes, computed in float64; the weights sum to 1.

    Example:
        >>> nodes, weights = gauss_hermite(3)
        >>> weights.sum()
        tensor(1., dtype=torch.float64)
    """
    if num_nodes < 1:
        raise ValueError(f"num_nodes must be at least 1; got {num_nodes}.")
    # Only the arrays are cached: a tensor made inside inference_mode could not be used for training later.
    nodes, weights = _hermite(num_nodes)
    return torch.tensor(nodes, dtype=dtype, device=device), torch.tensor(weights, dtype=dtype, device=device)


def gauss_legendre(
    num_nodes: int, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """Nodes and weights, each (num_nodes,), with sum_q w_q g(x_q) = int_0^1 g(x) dx.

    Exact for polynomials of degree < 2 num_nodes, computed in float64.

    Example:
        >>> nodes, weights = gauss_legendre(3)
        >>> weights.sum()
        tensor(1.0000, dtype=torch.float64)
    """
    nodes, weights = _legendre(num_nodes)
    return (
        torch.tensor(0.5 * (nodes + 1), dtype=dtype, device=device),
        torch.tensor(0.5 * weights, dtype=dtype, device=device),
    )
