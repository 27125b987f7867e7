r"""One thread for operations too small to gain from more, and for those of NumPy between torch's.

A parallel region ends when its last thread has ended. Where another process occupies that thread's core, this takes a
turn of the scheduler, some milliseconds; and MKL starts threads from matrices of five rows on. Measured on two cores,
one Cholesky factor, its inverse and three small products, two threads against one:

    n                        25      50      75     100     128     160     200
    cores free (quickest)   0.9     1.0     1.2     1.3     1.3     1.5     1.5     times as fast
    cores busy (mean)    0.0009   0.015     0.1    0.15    0.22    0.05    0.02     times as fast
    32 matrices, free       1.1     1.4 (n = 50)    1.4 (n = 75)    1.1 (n = 100)

The limit of 10^6 flops is n = 144 for one matrix. There one thread can lose a third of the matrix algebra's time, some
0.1 ms, beside a Python overhead of the same order.

The wheels of NumPy and SciPy bring OpenBLAS libraries with threads of their own, which spin for a while after each
call, on the cores where torch's threads have work. On two free cores SciPy's L-BFGS with an objective of torch trains
`GPClassifier` on 500 rows in 1.0 s with them and in 0.4 without, `GPRegressor` on 2000 in 2.1 and 1.4.

`torch.set_num_threads` is not called here, not even to restore a number: it turns off MKL's choice of its threads for
the whole process, and then LU factors of a batch of matrices of 151 rows or more are wrong, without an error from
`torch.linalg.slogdet` (PyTorch issues 141358 and 142815, up to version 2.13 at least); and threads of Python that start
later begin with the number that was set last. OpenMP and MKL have settings of one Python thread alone.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

SMALL = 1e6  # flops
_WHEELS = ("numpy.libs", "scipy.libs", "numpy/.dylibs", "scipy/.dylibs")  # folders of the libraries that they bring


def factor_flops(size: int, *, rows: int | None = None, number: int = 1) -> float:
    """Return the flops of Cholesky factors: number * size^3 / 3, or of a low-rank one, number * rows * size^2 / 3.

    Args:
        size: of the matrix, or the rank.
        rows: of the low-rank matrix.
        number: of matrices.
    """
    return number * (size if rows is None else rows) * size**2 / 3


@contextmanager
def threads_for(flops: float) -> Iterator[None]:
    """Run a block on one thread if its largest operation is small, and otherwise on as many as torch has.

    The number of threads is restored at the end, exactly, also after an exception; blocks may be nested. Entering and
    leaving takes some two microseconds. Other Python threads keep their numbers.

    Args:
        flops: of the largest operation, see :func:`factor_flops`.
    """
    before = torch.get_num_threads()
    if before == 1 or flops > SMALL:
        yield
        return
    of_mkl = _set_number(1, 1)
    try:
        yield
    finally:
        _set_number(before, of_mkl)


def use_one_thread() -> None:
    """Run all of torch's operations of this Python thread on one thread from now on."""
    torch.get_num_threads()  # before its first parallel operation torch sets a thread's number itself
    _set_number(1, 1)


def _set_number(number: int, of_mkl: int) -> int:
    """Set the numbers of this Python thread, MKL's zero for its default; return the one that MKL had."""
    if (set_number := _of_torch("omp_set_num_threads")) is not None:
        set_number(number)
    set_of_mkl = _of_torch("MKL_Set_Num_Threads_Local")
    return 0 if set_of_mkl is None else int(set_of_mkl(of_mkl))


@functools.cache
def _of_torch(name: str) -> Any:
    """Return a function of the OpenMP or MKL that torch runs on; None where it has none, or keeps it to itself."""
    for path in Path(torch.__file__).parent.glob("lib/libtorch_cpu.*"):
        try:
            return getattr(ctypes.CDLL(str(path)), name)  # which looks into the libraries it depends on, too
        except (OSError, AttributeError):
            continue
    return None


@contextmanager
def one_thread_of_numpy() -> Iterator[None]:
    """Run a block that alternates between torch and NumPy or SciPy with one thread of the OpenBLAS in their wheels.

    The number, one for the process, is restored at the end; of several Python threads the first one sets it. An
    OpenBLAS, or MKL, that torch shares is left as it is.
    """
    with _blas_of_wheels().limit(limits=1):
        yield


@functools.lru_cache(maxsize=1)
def _blas_of_wheels() -> Any:
    """Return a threadpoolctl controller of the OpenBLAS libraries of NumPy's and SciPy's wheels."""
    import scipy.linalg  # noqa: F401  # which loads its own, imported late: it takes a tenth of a second
    from threadpoolctl import ThreadpoolController

    found = ThreadpoolController()
    own = [each.filepath for each in found.lib_controllers if any(part in _folder(each.filepath) for part in _WHEELS)]
    return found.select(filepath=own)


def _folder(path: str) -> str:
    return Path(path).parent.as_posix()
