r"""Products with a kernel matrix that is never stored, and their derivatives, tile by tile.

    K_ij = s prod_f p_f(c_f |x_fi - y_fj|^2),       c |x - y|^2 = [x, c |x|^2, 1] . [-2 c y, 1, c |y|^2]

One product of matrices gives the argument of p for a tile that stays in cache, p is evaluated in place, and another
product applies it. A square matrix is symmetric, so that each tile serves as K_ij and K_ji. For the derivatives of
u' K v, with A = u v' and B = A * dK/dt,

    d/dx_i = 2 c sum_j B_ij (x_i - y_j),   d/dy_j = -2 c sum_i B_ij (x_i - y_j)

which are products of [y, 1]' with B' and of [x, 1]' with B. Tiles are divided among threads, each with a separate
result; threads inside an operation would only compete with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from gpext.operators.profiles import FACTORS, value, value_and_slopes
from gpext.threads import use_one_thread

_ROWS = 512  # of a tile
_COLUMNS = 1024  # of a tile in products: larger ones exceed the cache, smaller ones make threads wait for each other
_COLUMNS_OF_DERIVATIVES = 512  # of a tile in derivatives, which keep more
_FEW = 2**18  # entries below which threads do not pay
_NEAR = {torch.float64: 1e-8, torch.float32: 1e-2}  # t of matern12 below which its root would lose digits
_ERROR = {torch.float64: 1e-10, torch.float32: 1e-5}  # of t by squares, above which it is computed from differences

Result = TypeVar("Result")
Part = tuple[int, int]  # its index, and the number of parts
WHOLE: Part = (0, 1)


@dataclass(frozen=True)
class Factor:
    """One radial kernel between n and m inputs in units of its length scales; y is None for a square, x itself."""

    profile: str
    x: Tensor  # (n, d)
    y: Tensor | None  # (m, d)
    alpha: Tensor | None  # (), of rq

    @property
    def columns(self) -> Tensor:
        """The inputs of the columns (m, d)."""
        return self.x if self.y is None else self.y


@dataclass(frozen=True)
class _Ready:
    """A factor whose arguments of p are one product per tile, or from differences where squares lose their digits."""

    factor: Factor
    left: Tensor | None  # (n, d + 2)
    right: Tensor | None  # (m, d + 2)

    @classmethod
    def of(cls, factor: Factor) -> _Ready:
        c, x, y = FACTORS[factor.profile], factor.x, factor.columns
        centre = x.mean(0)
        x, y = x - centre, y - centre
        depth, height = x.square().sum(-1, keepdim=True), y.square().sum(-1, keepdim=True)
        largest = max(float(depth.max()), float(height.max()))
        if not largest * torch.finfo(x.dtype).eps < _ERROR[x.dtype]:
            return cls(factor, None, None)
        left = torch.cat([x, c * depth, torch.ones_like(depth)], -1)
        right = torch.cat([-2 * c * y, torch.ones_like(height), c * height], -1)
        return cls(factor, left, right)

    def argument(self, rows: slice, columns: slice, out: Tensor) -> Tensor:
        """Return t of a tile, in `out` if possible."""
        x, y = self.factor.x[rows], self.factor.columns[columns]
        if self.left is None or self.right is None:
            distance = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")
            return distance.square_().mul_(FACTORS[self.factor.profile])
        t = torch.mm(self.left[rows], self.right[columns].mT, out=out)
        if self.factor.profile == "matern12":
            i, j = (t < _NEAR[t.dtype]).nonzero(as_tuple=True)
            t[i, j] = (x[i] - y[j]).square().sum(-1)
        return t


def product(factors: Sequence[Factor], v: Tensor, part: Part = WHOLE) -> Tensor:
    """Return K v (n, R) without s, for v (m, R), from a part of the tiles."""
    ready = [_Ready.of(factor) for factor in factors]
    square = factors[0].y is None
    n, m = len(factors[0].x), len(factors[0].columns)
    w = v.mT.contiguous()  # products of matrices with few rows are quicker than those with few columns

    def rows_of(starts: Sequence[int]) -> Tensor:
        out, scratch = v.new_zeros(v.size(-1), n), v.new_empty(3, _ROWS * _COLUMNS)
        for start in starts:
            rows = slice(start, min(start + _ROWS, n))
            for columns in _columns(rows, m, square):
                K = _tile(ready, rows, columns, scratch)
                out[:, rows].addmm_(w[:, columns], K.mT)
                if square and columns.start != rows.start:
                    out[:, columns].addmm_(w[:, rows], K)
        return out

    parts = shared_out(rows_of, share(range(0, n, _ROWS), part), n * m, v.device)
    return (torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]).mT


def matrix(factors: Sequence[Factor], dtype: torch.dtype | None = None) -> Tensor:
    """Return K (n, m) without s, in `dtype`, to which arguments are rounded; by default that of the factors."""
    ready = [_Ready.of(factor) for factor in factors]
    square = factors[0].y is None
    n, m = len(factors[0].x), len(factors[0].columns)
    out = factors[0].x.new_empty(n, m, dtype=dtype)

    def rows_of(starts: Sequence[int]) -> None:
        scratch = factors[0].x.new_empty(3, _ROWS * _COLUMNS)
        for start in starts:
            rows = slice(start, min(start + _ROWS, n))
            for columns in _columns(rows, m, square):
                K = _tile(ready, rows, columns, scratch, out.dtype)
                out[rows, columns] = K
                if square and columns.start != rows.start:
                    out[columns, rows] = K.mT

    shared_out(rows_of, range(0, n, _ROWS), n * m, out.device)
    return out


@dataclass(frozen=True)
class Derivatives:
    """The value u' K v and its derivatives, summed over columns of u and v, with s = 1."""

    value: Tensor  # u' K v ()
    x: list[Tensor]  # by factor (n, d); for a square matrix in its inputs as rows and columns
    y: list[Tensor | None]  # (m, d)
    alpha: list[Tensor | None]  # ()


@dataclass(frozen=True)
class _Sums:
    """Sums over a share of the tiles, stored by rows, for which products of matrices are fastest."""

    value: Tensor  # ()
    x: list[Tensor]  # by factor sum_j B_ij [y_j, 1] (d + 1, n)
    y: list[Tensor]  # sum_i B_ij [x_i, 1] (d + 1, m); for a square the same tensors as x
    alpha: list[Tensor]  # (), zero except for rq


def derivatives(factors: Sequence[Factor], u: Tensor, v: Tensor, part: Part = WHOLE) -> Derivatives:
    """Return u' K v and its derivatives in inputs and alpha, for u (n, R) and v (m, R), from a part of the tiles."""
    ready = [_Ready.of(factor) for factor in factors]
    square = factors[0].y is None
    n, m = len(factors[0].x), len(factors[0].columns)
    # in a square matrix, tile (i, j) also stands for (j, i)
    outer_left = torch.cat([u, v], -1) if square else u
    outer_right = torch.cat([v, u], -1) if square else v
    centres = [f.x.mean(0) for f in factors]
    x_one = [_with_one(f.x - c) for f, c in zip(factors, centres, strict=True)]
    y_one = x_one if square else [_with_one(f.columns - c) for f, c in zip(factors, centres, strict=True)]

    def rows_of(starts: Sequence[int]) -> _Sums:
        by_x = [torch.zeros_like(t) for t in x_one]
        by_y = by_x if square else [torch.zeros_like(t) for t in y_one]
        by_alpha = [u.new_zeros(()) for _ in factors]
        total, scratch = u.new_zeros(()), u.new_empty(1 + len(factors), _ROWS * _COLUMNS_OF_DERIVATIVES)
        for start in starts:
            rows = slice(start, min(start + _ROWS, n))
            for columns in _columns(rows, m, square, _COLUMNS_OF_DERIVATIVES):
                shape = rows.stop - rows.start, columns.stop - columns.start
                A, *buffers = scratch[:, : shape[0] * shape[1]].view(-1, *shape)
                torch.mm(outer_left[rows], outer_right[columns].mT, out=A)
                if square and columns.start == rows.start:  # this tile contains both (i, j) and (j, i)
                    A.mul_(0.5)
                arguments = [r.argument(rows, columns, out) for r, out in zip(ready, buffers, strict=True)]
                values, slopes, by_own = zip(
                    *(value_and_slopes(f.profile, t, f.alpha) for f, t in zip(factors, arguments, strict=True)),
                    strict=True,
                )
                total += _inner(A, _product(values))
                for f in range(len(factors)):
                    others = A if len(factors) == 1 else A * _product([p for g, p in enumerate(values) if g != f])
                    if by_own[f] is not None:
                        by_alpha[f] += _inner(others, by_own[f])
                    B = others.mul_(slopes[f])
                    by_x[f][:, rows].addmm_(y_one[f][:, columns], B.mT)
                    by_y[f][:, columns].addmm_(x_one[f][:, rows], B)
        return _Sums(total, by_x, by_y, by_alpha)

    parts = shared_out(rows_of, share(range(0, n, _ROWS), part), n * m, u.device)
    by_x, by_y, by_alpha = (
        [torch.stack(each).sum(0) for each in zip(*shares, strict=True)]
        for shares in ([p.x for p in parts], [p.y for p in parts], [p.alpha for p in parts])
    )
    return Derivatives(
        torch.stack([p.value for p in parts]).sum(),
        [_differences(*own) for own in zip(factors, x_one, by_x, strict=True)],
        [None if square else _differences(*own) for own in zip(factors, y_one, by_y, strict=True)],
        [None if f.alpha is None else own for f, own in zip(factors, by_alpha, strict=True)],
    )


def _differences(factor: Factor, x_one: Tensor, sums: Tensor) -> Tensor:
    """Return 2 c sum_j B_ij (x_i - y_j) (n, d), for [x, 1]' and sum_j B_ij [y_j, 1]', both (d + 1, n)."""
    return 2 * FACTORS[factor.profile] * (x_one[:-1] * sums[-1:] - sums[:-1]).mT


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a.reshape(-1), b.reshape(-1))


def _tile(
    ready: Sequence[_Ready], rows: slice, columns: slice, scratch: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """Return K of a tile without s; arguments, and K unless rounded, are in the reused buffer `scratch` (3, ...)."""
    shape = rows.stop - rows.start, columns.stop - columns.start
    out, second, spare = scratch[:, : shape[0] * shape[1]].view(3, *shape)
    dtype = scratch.dtype if dtype is None else dtype
    spare = spare if dtype == scratch.dtype else torch.empty_like(spare, dtype=dtype)
    first, *others = ready
    K = value(first.factor.profile, first.argument(rows, columns, out).to(dtype), first.factor.alpha, spare)
    for other in others:
        t = other.argument(rows, columns, second).to(dtype)
        K.mul_(value(other.factor.profile, t, other.factor.alpha, spare))
    return K


def _columns(rows: slice, m: int, square: bool, width: int = _COLUMNS) -> list[slice]:
    """Return the columns to visit for these rows: in a square matrix, the diagonal tile and those to its right."""
    first = [rows] if square else []
    start = rows.stop if square else 0
    return first + [slice(c, min(c + width, m)) for c in range(start, m, width)]


def share(starts: Sequence[int], part: Part) -> Sequence[int]:
    """Return a part of the row blocks that costs as much as any other, although the first blocks are the longest."""
    k, number = part
    if number == 1:
        return starts
    return [*starts[k :: 2 * number], *starts[2 * number - 1 - k :: 2 * number]]


def num_threads(most: int, entries: int, device: torch.device) -> int:
    """Return the number of threads for this many entries: at most `most`, and at most torch's threads."""
    return 1 if entries < _FEW or device.type != "cpu" else max(1, min(torch.get_num_threads(), most))


def shared_out(
    work: Callable[[Sequence[int]], Result], starts: Sequence[int], entries: int, device: torch.device
) -> list[Result]:
    """Return each of torch's threads' result for its share of the row blocks, the first of which are the longest."""
    threads = num_threads(len(starts), entries, device)
    if threads == 1:
        return [work(starts)]
    shares = [share(starts, (k, threads)) for k in range(threads)]
    with ThreadPoolExecutor(threads, initializer=use_one_thread) as pool:
        return list(pool.map(torch.no_grad()(work), shares))


def _product(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0]
    for other in tensors[1:]:
        total = total * other
    return total


def _with_one(x: Tensor) -> Tensor:
    return torch.cat([x.mT, torch.ones_like(x[:, 0]).unsqueeze(0)])
