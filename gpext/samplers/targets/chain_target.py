"""The interface of a density that is sampled, as the chain engine needs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor


class ChainTarget(ABC):
    """A density of hyperparameters, in P coordinates without bounds, and of latent values.

    Attributes:
        model: whose products may be shared out among ranks; None where there is none.
        latent_shape: of f in one chain (..., N); (0,) where f is integrated out.
        dtype: that in which draws of f are kept.
        jitter: the largest that was added to the prior covariance.
    """

    model: Any = None
    latent_shape: torch.Size = torch.Size((0,))
    dtype: torch.dtype = torch.float64
    jitter: float = 0.0

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of the values of chains."""

    @property
    @abstractmethod
    def size(self) -> int:
        """P."""

    @property
    @abstractmethod
    def flops(self) -> float:
        """Those of the factors that a step of one chain needs."""

    @property
    @abstractmethod
    def origin(self) -> dict[str, Any]:
        """The identity of the target, by name: words, lists of them, and floats that are fingerprints of data."""

    @property
    @abstractmethod
    def data(self) -> list[Tensor]:
        """Inputs and what was observed, float64."""

    @property
    @abstractmethod
    def fixed(self) -> list[Tensor]:
        """The parameters and buffers that are not moved, float64."""

    @abstractmethod
    def constrained(self, raw: Tensor) -> dict[str, Tensor]:
        """Return hyperparameters (..., *shape) by parameter name for coordinates (..., P)."""
