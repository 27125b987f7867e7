r"""The products, derivatives and entries of `tiles` in a small C++ program, compiled for this processor on first use.

    (K v)_i = sum_j prod_f p_f(t_fij) v_j,   t = c |x - y|^2,  see `profiles`

Torch passes over a tile once for each operation; here a few rows are combined with a stretch of columns that stays in
the first-level cache. Distances are computed from the differences themselves, so that none is lost to rounding, not
even in float32.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gpext.operators.profiles import FACTORS
from gpext.operators.tiles import WHOLE, Derivatives, Factor, Part, num_threads, share
from gpext.operators.tiles_program import program

_PROFILES = ("rbf", "matern12", "matern32", "matern52")  # in the order of the program
# factor k on the inputs, with which p falls as 2^-|k (x - y)|^2 (rbf) or 2^-|k (x - y)|
_UNITS = {
    profile: math.sqrt(0.5 / math.log(2)) if profile == "rbf" else math.sqrt(FACTORS[profile]) / math.log(2)
    for profile in _PROFILES
}
_SUFFIXES = {torch.float64: "float64", torch.float32: "float32"}
_BYTES = 2048  # of a stretch, as in the program
_FEWEST = 64  # columns for which the program is used


class _Factor(ctypes.Structure):
    """A factor in the memory layout of the program."""

    _fields_ = (
        ("profile", ctypes.c_int64),
        ("dimension", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
    )


class _Matrix(ctypes.Structure):
    """A kernel matrix in the memory layout of the program."""

    _fields_ = (
        ("factors", ctypes.c_void_p),
        ("number", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("m", ctypes.c_int64),
        ("square", ctypes.c_int64),
    )


class _Shares(ctypes.Structure):
    """The rows of tiles to visit and the number of threads, as a C structure."""

    _fields_ = (
        ("threads", ctypes.c_int64),
        ("number", ctypes.c_int64),
        ("starts", ctypes.c_void_p),
    )


def serves(factors: Sequence[Factor]) -> bool:
    """Return whether the program exists and supports these factors; warn once if it cannot be compiled.

    It is not used for few columns, which it would mostly pad with zeros.
    """
    x, columns = factors[0].x, factors[0].columns
    known = x.device.type == "cpu" and x.dtype in _SUFFIXES and all(f.profile in _PROFILES for f in factors)
    return known and columns.size(-2) >= _FEWEST and program() is not None


def product(factors: Sequence[Factor], v: Tensor, part: Part = WHOLE) -> Tensor:
    """Return K v (n, R) without s, for v (m, R), from a part of the tiles."""
    packed = _Packed(factors, part)
    w, columns = _stretches(v), v.size(-1)
    out = v.new_zeros(packed.threads, packed.num_rows, columns, w.size(-1))
    packed.call("product", ctypes.c_int64(columns), w, out)
    return _spread(out.sum(0), len(factors[0].x))


def block(factors: Sequence[Factor], left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return left_i K_ij right_j (n, m) without s, of a matrix that is not square, in float32 or their own dtype."""
    packed = _Packed(factors, by_columns=True)
    out = left.new_empty(len(left), len(right), dtype=dtype)
    packed.call("entries" if dtype == left.dtype else "rounded", left.contiguous(), right.contiguous(), out)
    return out


def derivatives(factors: Sequence[Factor], u: Tensor, v: Tensor, part: Part = WHOLE) -> Derivatives:
    """Return u' K v and its derivatives in the inputs of K, for u (n, R) and v (m, R), from a part of the tiles."""
    packed = _Packed(factors, part)
    left, right = _stretches(u), _stretches(v)
    value = torch.zeros(packed.threads, dtype=torch.float64)
    by_x = [t.new_zeros(packed.threads, packed.num_rows, *t.shape[1:]) for t in packed.columns]
    by_y = by_x if packed.square else [t.new_zeros(packed.threads, *t.shape) for t in packed.columns]
    sums = [(ctypes.c_void_p * len(each))(*(t.data_ptr() for t in each)) for each in (by_x, by_y)]
    packed.call("derivatives", ctypes.c_int64(u.size(-1)), left, right, value, *sums)
    return Derivatives(
        value.sum().to(u.dtype),
        [_derivative(f, own.sum(0), len(f.x)) for f, own in zip(factors, by_x, strict=True)],
        [None if f.y is None else _derivative(f, own.sum(0), len(f.y)) for f, own in zip(factors, by_y, strict=True)],
        [None] * len(factors),
    )


class _Packed:
    """Factors in the memory layout of the program, and the rows or columns of tiles to visit."""

    def __init__(self, factors: Sequence[Factor], part: Part = WHOLE, *, by_columns: bool = False) -> None:
        first = factors[0]
        n, m = len(first.x), len(first.columns)
        rows = [_padded(f.x * _UNITS[f.profile]) for f in factors]
        columns = rows if first.y is None else [_padded(f.columns * _UNITS[f.profile]) for f in factors]
        self.square = first.y is None
        self.columns = [t.mT.contiguous() for t in columns]
        self.num_rows = len(rows[0])
        starts = share(range(len(self.columns[0]) if by_columns else self.num_rows), part)
        self.threads = num_threads(len(starts), n * m, first.x.device)
        self._kept = rows, (ctypes.c_int64 * len(starts))(*starts)
        self._factors = (_Factor * len(factors))(
            *(
                _Factor(_PROFILES.index(f.profile), f.x.size(-1), x.data_ptr(), y.data_ptr())
                for f, x, y in zip(factors, rows, self.columns, strict=True)
            )
        )
        self._matrix = _Matrix(ctypes.addressof(self._factors), len(factors), n, m, self.square)
        self._shares = _Shares(self.threads, len(starts), ctypes.addressof(self._kept[1]))
        self._suffix = _SUFFIXES[first.x.dtype]

    def call(self, name: str, *arguments: Tensor | ctypes.c_int64 | ctypes.Array[ctypes.c_void_p]) -> None:
        """Call a function of the program, with Python's lock released."""
        passed = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments]
        function = getattr(program(), f"{name}_{self._suffix}")
        function(ctypes.byref(self._matrix), ctypes.byref(self._shares), *passed)


def _padded(t: Tensor) -> Tensor:
    """Return t (n, d) as (stretches, columns, d), padded with zeros."""
    width = _BYTES // t.element_size()
    number, columns = -(-len(t) // width), t.size(-1)
    return torch.cat([t, t.new_zeros(number * width - len(t), columns)]).view(number, width, columns)


def _stretches(t: Tensor) -> Tensor:
    """Return t (n, d) as (stretches, d, columns), padded with zeros."""
    return _padded(t).mT.contiguous()


def _spread(t: Tensor, n: int) -> Tensor:
    """Return (stretches, d, columns) as (n, d)."""
    return t.mT.flatten(0, 1)[:n]


def _derivative(factor: Factor, sums: Tensor, n: int) -> Tensor:
    """Return 2 c sum_j B_ij (x_i - y_j) (n, d) for sums of differences in the program's units."""
    return _spread(sums, n) * (2 * FACTORS[factor.profile] / _UNITS[factor.profile])
