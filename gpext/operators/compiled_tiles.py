r"""The products and derivatives of `tiles` by a small C++ program, compiled for this processor on first use.

    (K v)_i = sum_j prod_f p_f(t_fij) v_j,   t = |x - y|^2,  x and y in units of l / sqrt |c|, see `profiles`

Where torch goes over a tile once for each operation, here a few rows meet a stretch of columns that stays in the first
cache. Distances are those of the differences themselves, so that none is lost to rounding, in float32 either.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from gpext.operators.profiles import FACTORS
from gpext.operators.tiles import WHOLE, Derivatives, Factor, Part, share, shared_out

_PROFILES = ("rbf", "matern12", "matern32", "matern52")  # in the order of the program
_SUFFIXES = {torch.float64: "float64", torch.float32: "float32"}
_BYTES = 2048  # of a stretch, as in the program
_FEWEST = 64  # columns
_SOURCE = Path(__file__).with_name("tiles.cpp")
_FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
)


class NotCompiledWarning(UserWarning):
    """There is no compiler, or it failed; torch's tiles serve instead, more slowly."""


class _Factor(ctypes.Structure):
    """A factor as the program sees it."""

    _fields_ = (
        ("profile", ctypes.c_int64),
        ("dimension", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
    )


def serves(factors: Sequence[Factor]) -> bool:
    """Return whether the program is there and knows such factors; that it cannot be compiled is said once.

    Few columns it would mostly fill up with zeros.
    """
    x, columns = factors[0].x, factors[0].columns
    known = x.device.type == "cpu" and x.dtype in _SUFFIXES and all(f.profile in _PROFILES for f in factors)
    return known and columns.size(-2) >= _FEWEST and _program() is not None


def product(factors: Sequence[Factor], v: Tensor, part: Part = WHOLE) -> Tensor:
    """Return K v (n, R), s left out, for v (m, R): of a part of the tiles."""
    n, columns = len(factors[0].x), v.size(-1)
    packed = _Packed(factors)
    w = _stretches(v)

    def rows_of(starts: Sequence[int]) -> Tensor:
        out = v.new_zeros(packed.num_rows, columns, w.size(-1))
        for start in starts:
            packed.call("product", start, columns, w.data_ptr(), out.data_ptr())
        return out

    parts = shared_out(rows_of, share(range(packed.num_rows), part), packed.entries, v.device)
    return _spread(torch.stack(parts).sum(0) if len(parts) > 1 else parts[0], n)


def derivatives(factors: Sequence[Factor], u: Tensor, v: Tensor, part: Part = WHOLE) -> Derivatives:
    """Return u' K v and its derivatives in all that K is made of, for u (n, R) and v (m, R): of a part of the tiles."""
    packed = _Packed(factors)
    left, right = _stretches(u), _stretches(v)

    def rows_of(starts: Sequence[int]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        value = torch.zeros((), dtype=torch.float64)
        by_x = [t.new_zeros(packed.num_rows, *t.shape[1:]) for t in packed.columns]
        by_y = by_x if packed.square else [torch.zeros_like(t) for t in packed.columns]
        sums = [(ctypes.c_void_p * len(each))(*(t.data_ptr() for t in each)) for each in (by_x, by_y)]
        for start in starts:
            packed.call("derivatives", start, u.size(-1), left.data_ptr(), right.data_ptr(), value.data_ptr(), *sums)
        return value, by_x, by_y

    parts = shared_out(rows_of, share(range(packed.num_rows), part), packed.entries, u.device)
    value = torch.stack([own for own, _, _ in parts]).sum().to(u.dtype)
    by_x, by_y = (
        [torch.stack(each).sum(0) for each in zip(*shares, strict=True)]
        for shares in ([own for _, own, _ in parts], [own for _, _, own in parts])
    )
    return Derivatives(
        value,
        [_derivative(f, sums, len(f.x)) for f, sums in zip(factors, by_x, strict=True)],
        [None if f.y is None else _derivative(f, sums, len(f.y)) for f, sums in zip(factors, by_y, strict=True)],
        [None] * len(factors),
    )


class _Packed:
    """Factors laid out as the program wants them."""

    def __init__(self, factors: Sequence[Factor]) -> None:
        first = factors[0]
        self.square, self._n = first.y is None, len(first.x)
        self.entries = len(first.x) * len(first.columns)
        units = [math.sqrt(abs(FACTORS[f.profile])) for f in factors]
        rows = [_stretches(f.x * unit) for f, unit in zip(factors, units, strict=True)]
        self.columns = (
            rows if self.square else [_stretches(f.columns * unit) for f, unit in zip(factors, units, strict=True)]
        )
        self.num_rows = len(rows[0])
        self._rows = [t.mT.contiguous() for t in rows]
        self._suffix = _SUFFIXES[first.x.dtype]
        self._factors = (_Factor * len(factors))(
            *(
                _Factor(_PROFILES.index(f.profile), f.x.size(-1), x.data_ptr(), y.data_ptr())
                for f, x, y in zip(factors, self._rows, self.columns, strict=True)
            )
        )

    def call(self, name: str, start: int, columns: int, *arrays: int | ctypes.Array[ctypes.c_void_p]) -> None:
        """Let the program do a row of tiles, without Python's lock."""
        sizes = (len(self._factors), self._n, start, len(self.columns[0]), self.square, columns)
        pointers = [ctypes.c_void_p(a) if isinstance(a, int) else a for a in arrays]
        function = getattr(_program(), f"{name}_{self._suffix}")
        function(self._factors, *(ctypes.c_int64(size) for size in sizes), *pointers)


def _stretches(t: Tensor) -> Tensor:
    """Return t (n, d) as (stretches, d, columns), filled up with zeros."""
    width = _BYTES // t.element_size()
    number = -(-len(t) // width)
    padded = torch.nn.functional.pad(t, (0, 0, 0, number * width - len(t)))
    return padded.view(number, width, -1).mT.contiguous()


def _spread(t: Tensor, n: int) -> Tensor:
    """Return (stretches, d, columns) as (n, d)."""
    return t.mT.reshape(-1, t.size(-2))[:n]


def _derivative(factor: Factor, sums: Tensor, n: int) -> Tensor:
    """Return 2 c sum_j B_ij (x_i - y_j) (n, d) for sums of differences in the program's units."""
    c = FACTORS[factor.profile]
    return _spread(sums, n) * (2 * math.copysign(math.sqrt(abs(c)), c))


# ---- the program -----------------------------------------------------------------------------------------------------


@cache
def _program() -> ctypes.CDLL | None:
    """Return the program, compiled unless a cache has it; None, with a warning, where that cannot be."""
    named = os.environ.get("CXX")
    commands = [shlex.split(named)] if named else [["c++"], ["g++"], ["clang++"]]
    found = [command for command in commands if shutil.which(command[0])]
    reason = f"found no C++ compiler ({named or 'c++, g++ or clang++'}); install one or set CXX"
    if found:
        try:
            return ctypes.CDLL(str(_compiled(found[0])))
        except subprocess.CalledProcessError as error:
            reason = f"{' '.join(error.cmd)} failed: {error.stderr.strip()[:500]}"
        except OSError as error:
            reason = f"{error}; the program is kept in {_folder()}, which XDG_CACHE_HOME can move"
    warnings.warn(
        f"The tiles' program is not compiled, products go by torch, more slowly: {reason}.",
        NotCompiledWarning,
        stacklevel=2,
    )
    return None


def _compiled(compiler: Sequence[str]) -> Path:
    """Return the program's file, whose name tells source, compiler and processor apart."""
    macros = _run(*compiler, *_FLAGS, "-dM", "-E", "-x", "c++", os.devnull)
    parts = (_SOURCE.read_text(encoding="utf-8"), macros, *compiler, *_FLAGS, platform.machine())
    path = _folder() / f"tiles-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            draft = Path(folder) / path.name
            _run(*compiler, *_FLAGS, str(_SOURCE), "-o", str(draft))
            draft.replace(path)  # at once: other processes find it whole or not at all
    return path


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpext"
