r"""The complete Cholesky factor of A = K + D in single precision, as a preconditioner of A in double precision.

    P = S^-1 U'U S^-1,     U'U near S A S in float32,     S = diag(A)^{-1/2}

The factor takes half the time and half the memory, and only its rounding is left for a few steps of conjugate gradients
to remove [cf. Carson & Higham 2018, Higham & Mary 2022 Sec. 8]. It is stored in float32 and applied in float64: P^-1 is
then one symmetric positive definite matrix, to rounding in double precision, as conjugate gradients and the determinant
require. With S A S, whose diagonal is one, neither the scale of K nor noise that differs by many powers of
ten leaves the range of float32.

U, n^2 / 2 numbers of four bytes, is computed a panel of rows at a time, each from the panels above it and from entries
of A that are never stored:

    U_ss' U_ss = B_ss,   U_st = N B_st,   N = U_ss'^-1,   B = S A S - (panels above)' (panels above)

Nearly all of the time is spent on the products of matrices in B.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.solvers.neighbour_roots import check_noise
from gpext.solvers.partial_cholesky import cost_of_step

Block = Callable[[slice, slice, Tensor], Tensor]  # rows, columns, the diagonal of S (n,) -> those entries of S K S

_HEIGHT = 256  # of a panel
_WIDTH = 512  # columns that each thread converts at a time: they stay in cache
_NOTHING = 1e-14  # beside a diagonal of one; products of smaller numbers are denormal, and many times as slow
_FEWEST = 1500  # data: for fewer a low rank takes negligible time, whatever they are
MOST_STORED = 3 * 2**27  # numbers of U, 1.5 GiB: 28377 data, whose matrices are not stored otherwise
# Costs in floating-point operations of a product of matrices in double precision, as in `partial_cholesky`: ratios of
# rates, measured on one core with AVX-512, of which a choice needs no more than the first digit.
_OPERATION = 0.5  # an operation in single precision
_MADE = 300.0  # an entry of A: rounding, scaling and removing denormal numbers
_APPLIED = 64.0  # an entry of U each time that it is read, for a few right-hand sides
_ROUNDED = 0.1  # of the largest eigenvalue's rounding: the error of the factor, inferred from the steps it leaves


@dataclass(frozen=True)
class SinglePrecisionPreconditioner:
    """S^-1 U'U S^-1; call it for P^-1 r.

    Example:
        >>> import torch
        >>> K = torch.tensor([[1.0, 0.5], [0.5, 1.0]]).double()
        >>> noise = torch.full((2,), 0.1).double()
        >>> def block(rows, columns, scale):
        ...     return (scale[rows, None] * K[rows, columns] * scale[columns]).float()
        >>> P = SinglePrecisionPreconditioner.of(block, K.diagonal(), noise)
        >>> ((K + noise.diag()) @ P(torch.ones(2, 1).double())).round(decimals=4)
        tensor([[1.],
                [1.]], dtype=torch.float64)
    """

    panels: tuple[Tensor, ...]  # rows of U right of their diagonal block (h, n - stop), float32
    inverses: tuple[Tensor, ...]  # N of each (h, h), lower triangles, float64
    scale: Tensor  # the diagonal of S (n,), float64

    @classmethod
    def of(cls, block: Block, diagonal: Tensor, noise: Tensor) -> SinglePrecisionPreconditioner | None:
        """Return the preconditioner; None where A is not positive definite in single precision.

        Args:
            block: of K, in float32.
            diagonal: of K (n,).
            noise: the diagonal of D (n,), positive.

        Raises:
            ValueError: the noise is not positive.
        """
        check_noise(noise)
        n = len(noise)
        scale = (diagonal.double() + noise.double()).rsqrt()
        panels: list[Tensor] = []
        inverses: list[Tensor] = []
        for start in range(0, n, _HEIGHT):
            h = min(_HEIGHT, n - start)
            rows = slice(start, start + h)
            B = block(rows, slice(start, n), scale)
            torch.hardshrink(B, _NOTHING, out=B)
            B.diagonal().fill_(1.0)
            for above in panels:
                own = above[:, start - n :]
                B.addmm_(own[:, :h].mT, own, alpha=-1)
            chol, info = torch.linalg.cholesky_ex(B[:, :h].double())
            if bool(info > 0) or not bool(chol.isfinite().all()):
                return None
            N = torch.linalg.solve_triangular(chol, torch.eye(h, dtype=chol.dtype, device=chol.device), upper=False)
            panel = torch.linalg.solve_triangular(chol.mT.float(), B[:, h:].mT, upper=True, left=False).mT
            panels.append(torch.hardshrink(panel, _NOTHING, out=panel))
            inverses.append(N)
        return cls(tuple(panels), tuple(inverses), scale)

    def __call__(self, r: Tensor) -> Tensor:
        """Return P^-1 r (..., n, R)."""
        scaled = self.scale.unsqueeze(-1) * r.double()
        return (self.scale.unsqueeze(-1) * self._up(self._down(scaled))).to(r.dtype)

    def whitened(self, matvec: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return v -> R A R' v, where R P R' = I, as for :class:`LowRankPreconditioner`: R = U'^-1 S.

        Args:
            matvec: v -> A v for (n, R).
        """
        scale = self.scale.unsqueeze(-1)
        return lambda v: self._down(scale * matvec((scale * self._up(v.double())).to(v.dtype)).double()).to(v.dtype)

    @property
    def rank(self) -> int:
        """The number of rows of U: all, n."""
        return len(self.scale)

    @property
    def log_det(self) -> Tensor:
        """log|P| ()."""
        by_panel = torch.stack([N.diagonal().log().sum() for N in self.inverses])
        return -2 * (by_panel.sum() + self.scale.log().sum())

    def _down(self, v: Tensor) -> Tensor:
        """Return U'^-1 v (..., n, R)."""
        rows = v.mT.reshape(-1, self.rank).clone()  # (*, n), the layout for which these products are fastest
        room = self._room
        for N, panel, start in zip(self.inverses, self.panels, range(0, self.rank, _HEIGHT), strict=True):
            stop = start + len(N)
            found = rows[:, start:stop] @ N.mT
            rows[:, start:stop] = found
            for own, part in zip(rows[:, stop:].split(room.size(-1), -1), _converted(panel, room), strict=True):
                own.addmm_(found, part, alpha=-1)
        return rows.view(v.mT.shape).mT

    def _up(self, v: Tensor) -> Tensor:
        """Return U^-1 v (..., n, R)."""
        columns = v.movedim(-2, 0).reshape(self.rank, -1).clone()  # (n, *), likewise
        room = self._room
        for index in reversed(range(len(self.inverses))):
            N, start = self.inverses[index], index * _HEIGHT
            stop = start + len(N)
            left = columns[start:stop].clone()
            parts = _converted(self.panels[index], room)
            for own, part in zip(columns[stop:].split(room.size(-1)), parts, strict=True):
                left.addmm_(part, own, alpha=-1)
            columns[start:stop] = N.mT @ left
        return columns.view(v.movedim(-2, 0).shape).movedim(0, -2)

    @property
    def _room(self) -> Tensor:
        """The buffer in which a part of a panel is converted (h, width): on a CPU it stays in each thread's cache."""
        on_cpu = self.scale.device.type == "cpu"
        width = _WIDTH * torch.get_num_threads() if on_cpu else self.rank
        return self.scale.new_empty(min(_HEIGHT, self.rank), min(width, self.rank))


def cost_of_single_precision(n: int, largest: float, smallest: float, tolerance: float) -> float:
    """Return the cost of a solve and its preconditioner; infinite for too few or many data, or too ill a condition.

    Steps reduce the error about as Chebyshev's do if all eigenvalues of P^-1 A are 1 up to the error of the factor.

    Args:
        n: the number of data.
        largest: eigenvalue of S A S.
        smallest: likewise.
        tolerance: of the solve.
    """
    rounding = torch.finfo(torch.float32).eps * largest
    if not (n >= _FEWEST and n * (n + 1) // 2 <= MOST_STORED and rounding < smallest):
        return math.inf
    steps = math.ceil(math.log(2 / tolerance) / math.log(2 * smallest / (_ROUNDED * rounding)))
    made = _OPERATION * n**3 / 3 + 0.5 * _MADE * n * n
    return made + steps * (cost_of_step(n, 0) + _APPLIED * n * n)


def _converted(panel: Tensor, room: Tensor) -> Iterator[Tensor]:
    """Yield the columns of a panel (h, m) in float64, as many at a time as fit in `room`, which the next overwrite."""
    for part in panel.split(room.size(-1), -1):
        yield room.view(-1)[: part.numel()].view_as(part).copy_(part)
