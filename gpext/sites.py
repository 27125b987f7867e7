r"""Gaussian sites: the hinge between a likelihood and a posterior.

Every deterministic inference rule replaces the likelihood factor of a datum by

    t(f) = exp(shift * f - precision * f^2 / 2)

with `shift` = nu and `precision` = tau of the papers. This is the only convention in the package. The precision may be
negative (EP, Laplace); nothing is stored as mean and variance, and nothing is clamped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["BlockSites", "CoupledSites", "GaussianSites", "block_times"]


class _Factors:
    """Tensors whose last dimension is that of the data."""

    def detach(self) -> Self:
        """Return the same sites outside the autograd graph."""
        return self._each(Tensor.detach)

    def to(self, dtype: torch.dtype) -> Self:
        """Return the sites in another dtype."""
        return self._each(lambda t: t.to(dtype))

    def take(self, index: Tensor) -> Self:
        """Return the sites of the data at `index` (n,)."""
        return self._each(lambda t: t[..., index])

    def among(self, index: Tensor, num_data: int) -> Self:
        """Return sites of N data, of which those at `index` (n,) have these and the others none."""
        return self._each(lambda t: t.new_zeros(*t.shape[:-1], num_data).index_copy(-1, index, t))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        mine: Any = self  # a dataclass
        return replace(mine, **{field.name: change(getattr(self, field.name)) for field in fields(mine)})


@dataclass(frozen=True)
class GaussianSites(_Factors):
    """One unnormalised Gaussian factor per datum.

    Args:
        shift: nu, (..., N).
        precision: tau, (..., N), of any sign.

    Raises:
        ValueError: the two differ in shape, dtype or device.

    Example:
        >>> import torch
        >>> sites = GaussianSites(shift=torch.tensor([2.0]), precision=torch.tensor([4.0]))
        >>> sites.shift / sites.precision  # where the factor is largest
        tensor([0.5000])
    """

    shift: Tensor  # (..., N)
    precision: Tensor  # (..., N)

    def __post_init__(self) -> None:
        if self.shift.shape != self.precision.shape:
            raise ValueError(
                f"shift and precision must have one shape; got {tuple(self.shift.shape)} and "
                f"{tuple(self.precision.shape)}."
            )
        if self.shift.dtype != self.precision.dtype or self.shift.device != self.precision.device:
            raise ValueError(
                f"shift and precision must share dtype and device; got {self.shift.dtype} on {self.shift.device} and "
                f"{self.precision.dtype} on {self.precision.device}."
            )

    def times(self, f: Tensor) -> Tensor:
        """Return tau f (..., N)."""
        return self.precision * f

    def expected_log(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return E[log t(f)] under N(mean, variance), (..., N)."""
        return self.shift * mean - 0.5 * self.precision * (mean.square() + variance)

    def lerp(self, other: GaussianSites, rate: float | Tensor) -> GaussianSites:
        """Return the sites a fraction `rate` of the way to `other`, in natural parameters: a damped update."""
        return GaussianSites(
            torch.lerp(self.shift, other.shift, rate), torch.lerp(self.precision, other.precision, rate)
        )

    def choose(self, other: GaussianSites, which: Tensor) -> GaussianSites:
        """Return the other sites where `which` holds, broadcastable with (..., N), and these elsewhere."""
        return GaussianSites(
            torch.where(which, other.shift, self.shift), torch.where(which, other.precision, self.precision)
        )

    def motion_to(self, other: GaussianSites, mean: Tensor, variance: Tensor) -> Tensor:
        """Return how far other sites would move the marginals N(mean, variance) if each alone was replaced (..., N).

        The larger of the mean's motion in standard deviations and the relative motion of the variance.
        """
        precision = other.precision - self.precision
        shift = other.shift - self.shift - precision * mean
        return torch.maximum(shift.abs() * variance.sqrt(), precision.abs() * variance)


@dataclass(frozen=True)
class CoupledSites(_Factors):
    """One unnormalised Gaussian factor of the D latent values of each datum, its precision diagonal plus rank one.

        t(f) = exp(shift' f - f' (diag(precision) + coupling w w') f / 2),    w = direction

    Args:
        shift: nu (..., D, N).
        precision: gamma (..., D, N), of any sign.
        coupling: a (..., N), of any sign.
        direction: w (..., D, N).

    Raises:
        ValueError: the shapes do not match.

    Example:
        >>> import torch
        >>> one = torch.ones(2, 3)  # two latents of three data
        >>> CoupledSites(one, one, torch.ones(3), one).precision.shape
        torch.Size([2, 3])
    """

    shift: Tensor  # (..., D, N)
    precision: Tensor  # (..., D, N)
    coupling: Tensor  # (..., N)
    direction: Tensor  # (..., D, N)

    def __post_init__(self) -> None:
        shape = self.shift.shape
        if self.precision.shape != shape or self.direction.shape != shape or self.coupling.shape != _over(shape):
            raise ValueError(
                "expected shift, precision and direction of one shape (..., D, N), and coupling (..., N); got "
                f"{tuple(shape)}, {tuple(self.precision.shape)}, {tuple(self.direction.shape)} and "
                f"{tuple(self.coupling.shape)}."
            )

    @property
    def diagonal(self) -> GaussianSites:
        """The factors without the coupling, of D independent latents."""
        return GaussianSites(self.shift, self.precision)

    def times(self, f: Tensor) -> Tensor:
        """Return (diag(gamma) + a w w') f, datum by datum (..., D, N)."""
        along = self.coupling * (self.direction * f).sum(-2)
        return self.precision * f + along.unsqueeze(-2) * self.direction

    def expected_log(self, mean: Tensor, blocks: Tensor) -> Tensor:
        """Return E[log t(f)] (..., N) under means (..., D, N) and covariances of each datum (..., D, D, N)."""
        variances = blocks.diagonal(dim1=-3, dim2=-2).movedim(-1, -2)
        w = self.direction
        along = ((blocks * w.unsqueeze(-3)).sum(-2) * w).sum(-2)
        spread = (self.precision * variances).sum(-2) + self.coupling * along
        return (self.shift * mean).sum(-2) - 0.5 * ((mean * self.times(mean)).sum(-2) + spread)

    def choose(self, other: CoupledSites, which: Tensor) -> CoupledSites:
        """Return the other sites in those of a batch where `which` (...) holds, and these elsewhere."""
        each = [
            torch.where(which.view(which.shape + (1,) * (new.dim() - which.dim())), new, old)
            for new, old in (
                (other.shift, self.shift),
                (other.precision, self.precision),
                (other.coupling, self.coupling),
                (other.direction, self.direction),
            )
        ]
        return CoupledSites(*each)


@dataclass(frozen=True)
class BlockSites(_Factors):
    """One unnormalised Gaussian factor of the D latent values of each datum, its precision any symmetric matrix.

        t(f) = exp(shift' f - f' precision f / 2)

    Args:
        shift: nu (..., D, N).
        precision: U (..., D, D, N), symmetric, of any signs.

    Raises:
        ValueError: the shapes do not match.

    Example:
        >>> import torch
        >>> BlockSites(torch.ones(2, 3), torch.eye(2).unsqueeze(-1).expand(2, 2, 3)).shift.shape
        torch.Size([2, 3])
    """

    shift: Tensor  # (..., D, N)
    precision: Tensor  # (..., D, D, N)

    def __post_init__(self) -> None:
        *batch, latents, size = self.shift.shape
        if self.precision.shape != (*batch, latents, latents, size):
            raise ValueError(
                f"expected shift (..., D, N) and precision (..., D, D, N); got {tuple(self.shift.shape)} and "
                f"{tuple(self.precision.shape)}."
            )

    def times(self, f: Tensor) -> Tensor:
        """Return U f, datum by datum (..., D, N)."""
        return block_times(self.precision, f)

    def coupled(self, scale: Tensor) -> CoupledSites:
        """Return the same sites of two latents as diagonal plus rank one: with U_12 = -w_1 w_2 and a coupling of -1.

        w_1^2 and w_2^2 are in the ratio of |U_11| + 1 / scale_1 and |U_22| + 1 / scale_2, so that neither is large
        beside what it is added to.

        Args:
            scale: a typical variance of each latent (..., 2, N).
        """
        diagonal, cross = self.precision.diagonal(dim1=-3, dim2=-2).mT, self.precision[..., 0, 1, :]
        sizes = diagonal.abs() + 1 / scale
        ratio = (sizes[..., 0, :] / sizes[..., 1, :]).sqrt()
        w = torch.stack([(cross.abs() * ratio).sqrt(), -cross.sign() * (cross.abs() / ratio).sqrt()], -2)
        return CoupledSites(self.shift, diagonal + w.square(), torch.full_like(cross, -1.0), w)

    def expected_log(self, mean: Tensor, blocks: Tensor) -> Tensor:
        """Return E[log t(f)] (..., N) under means (..., D, N) and covariances of each datum (..., D, D, N)."""
        quadratic = (mean * self.times(mean)).sum(-2) + (self.precision * blocks).sum((-3, -2))
        return (self.shift * mean).sum(-2) - 0.5 * quadratic

    def lerp(self, other: BlockSites, rate: float | Tensor) -> BlockSites:
        """Return the sites a fraction `rate`, (..., 1) or a number, of the way to `other`, in natural parameters."""
        rate = torch.as_tensor(rate, dtype=self.shift.dtype, device=self.shift.device).unsqueeze(-1)
        return BlockSites(
            torch.lerp(self.shift, other.shift, rate),
            torch.lerp(self.precision, other.precision, rate.unsqueeze(-1)),
        )

    def motion_to(self, other: BlockSites, mean: Tensor, blocks: Tensor) -> Tensor:
        """Return how far other sites would move the marginals N(mean, blocks) if each alone was replaced (..., N).

        The largest entry of L' dnu and L' dU L, with L the Cholesky factor of a block: motions in its own units.
        """
        precision = other.precision - self.precision
        shift = (other.shift - self.shift - block_times(precision, mean)).mT.unsqueeze(-1)
        L = torch.linalg.cholesky_ex(blocks.movedim(-1, -3))[0]
        by_shift = (L.mT @ shift).abs().amax((-2, -1))
        return torch.maximum(by_shift, (L.mT @ precision.movedim(-1, -3) @ L).abs().amax((-2, -1)))

    def choose(self, other: BlockSites, which: Tensor) -> BlockSites:
        """Return the other sites in those of a batch where `which` (...) holds, and these elsewhere."""
        which = which.unsqueeze(-1).unsqueeze(-1)
        return BlockSites(
            torch.where(which, other.shift, self.shift),
            torch.where(which.unsqueeze(-1), other.precision, self.precision),
        )


def block_times(blocks: Tensor, f: Tensor) -> Tensor:
    """Return U f (..., D, N), datum by datum, for U (..., D, D, N).

    Example:
        >>> import torch
        >>> block_times(2 * torch.eye(2).unsqueeze(-1), torch.tensor([[1.0], [3.0]]))
        tensor([[2.],
                [6.]])
    """
    return (blocks * f.unsqueeze(-3)).sum(-2)


JointSites = CoupledSites | BlockSites
"""Sites of the latents of a datum together."""


def _over(shape: torch.Size) -> torch.Size:
    """Return the shape without its second-to-last dimension."""
    return shape[:-2] + shape[-1:]
