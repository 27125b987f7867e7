r"""The products and derivatives of `tiles`, computed by KeOps: the route for CUDA devices.

    (K v)_i = sum_j prod_f p_f(c_f |x_fi - y_fj|^2) v_j

KeOps compiles a formula for each number of columns of v. So v is split and padded to a few fixed widths, and another
number of right-hand sides needs no new compilation. KeOps differentiates in the inputs of the rows; the derivatives in
those of the columns use the same formula with rows and columns exchanged, and a square matrix has both at once from
[u, v] and [v, u].
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from gpext.callers import warn_caller
from gpext.operators.tiles import WHOLE, Derivatives, Factor, Part

WIDTHS = (1, 4, 16)  # of blocks of right-hand sides

_DISTANCE = {"matern12": 1, "matern32": 3, "matern52": 5}  # c in r = sqrt(c q)
_OF_DISTANCE = {
    "matern12": "Exp(-{r})",
    "matern32": "((IntCst(1)+{r})*Exp(-{r}))",
    "matern52": "((IntCst(1)+{r}+Square({r})/IntCst(3))*Exp(-{r}))",
}


class KeOpsUnavailableWarning(UserWarning):
    """KeOps was requested but cannot be used; torch's tiles are used instead.

    Example:
        >>> issubclass(KeOpsUnavailableWarning, UserWarning)
        True
    """


@cache
def is_available(device_type: str = "cpu") -> bool:
    """Return whether KeOps can be imported and finds a compiler and, for CUDA, its toolkit; warn once if not."""
    usual = ["clang++", "g++"] if sys.platform == "darwin" else ["g++"]
    compilers = [os.environ["CXX"]] if "CXX" in os.environ else usual
    if not any(shutil.which(name) for name in compilers):
        return _missing(f"found no C++ compiler ({' or '.join(compilers)}); install one or set CXX")
    try:
        import pykeops.torch
    except ImportError as error:
        return _missing(f"{error}; pip install pykeops")
    if device_type == "cuda" and not pykeops.config.gpu_available:
        return _missing("pykeops has found no CUDA; install the CUDA toolkit and set CUDA_PATH to its folder")
    return True


def _missing(reason: str) -> bool:
    warn_caller(f"KeOps cannot be used, products go by torch's tiles: {reason}.", KeOpsUnavailableWarning)
    return False


def product(factors: Sequence[Factor], v: Tensor, part: Part = WHOLE) -> Tensor:
    """Return K v (n, R) without s, for v (m, R), for a part of the rows; the other rows are zero."""
    if part != WHOLE:
        rows = _rows(len(factors[0].x), part)
        out = v.new_zeros(len(factors[0].x), v.size(-1))
        out[rows] = product([_of_rows(f, rows) for f in factors], v)
        return out
    widths = _widths(v.size(-1))
    tensors = [t for f in factors for t in (f.x, f.columns, None if f.alpha is None else f.alpha.view(1))]
    tensors = [t.contiguous() for t in tensors if t is not None]
    padded = torch.nn.functional.pad(v, (0, sum(widths) - v.size(-1)))
    backend = "GPU" if v.is_cuda else "CPU"
    shape = tuple((f.profile, f.x.size(-1)) for f in factors)
    parts = [
        _compiled(shape, part.size(-1))(*tensors, part.contiguous(), backend=backend)
        for part in padded.split(widths, -1)
        if widths
    ]
    return torch.cat([v.new_zeros(len(factors[0].x), 0), *parts], -1)[:, : v.size(-1)]


def derivatives(factors: Sequence[Factor], u: Tensor, v: Tensor, part: Part = WHOLE) -> Derivatives:
    """Return u' K v and its derivatives in inputs and alpha, for u (n, R) and v (m, R), from a part of the rows."""
    if part != WHOLE:
        return _derivatives_of_rows(factors, u, v, _rows(len(factors[0].x), part))
    if factors[0].y is None:  # the pairs (i, j) and (j, i)
        value, by_x, by_alpha = _in_rows(factors, torch.cat([u, v], -1), torch.cat([v, u], -1))
        halves = [None if a is None else 0.5 * a for a in by_alpha]
        return Derivatives(0.5 * value, by_x, [None] * len(factors), halves)
    value, by_x, by_alpha = _in_rows(factors, u, v)
    exchanged = [Factor(f.profile, f.columns, f.x, f.alpha) for f in factors]
    _, by_y, _ = _in_rows(exchanged, v, u, with_alpha=False)
    return Derivatives(value, by_x, list(by_y), by_alpha)


def _rows(n: int, part: Part) -> slice:
    k, number = part
    return slice(k * n // number, (k + 1) * n // number)


def _of_rows(factor: Factor, rows: slice) -> Factor:
    return Factor(factor.profile, factor.x[rows], factor.columns, factor.alpha)


def _derivatives_of_rows(factors: Sequence[Factor], u: Tensor, v: Tensor, rows: slice) -> Derivatives:
    found = derivatives([_of_rows(f, rows) for f in factors], u[rows], v)
    by_x = [torch.zeros_like(f.x) for f in factors]
    for whole, own in zip(by_x, found.x, strict=True):
        whole[rows] = own
    if factors[0].y is not None:
        return Derivatives(found.value, by_x, found.y, found.alpha)
    both = [x if y is None else x + y for x, y in zip(by_x, found.y, strict=True)]  # inputs of rows and columns
    return Derivatives(found.value, both, [None] * len(factors), found.alpha)


def _in_rows(
    factors: Sequence[Factor], u: Tensor, v: Tensor, *, with_alpha: bool = True
) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    """Return u' K v () and its derivatives in the rows' inputs (n, d), not the columns', and in alpha ()."""
    with torch.enable_grad():
        rows = [f.x.detach().requires_grad_() for f in factors]
        alpha = [None if f.alpha is None else f.alpha.detach().requires_grad_(with_alpha) for f in factors]
        free = [Factor(f.profile, x, f.columns.detach(), a) for f, x, a in zip(factors, rows, alpha, strict=True)]
        value = (u * product(free, v)).sum()
    wanted = [a for a in alpha if a is not None and with_alpha]
    found = torch.autograd.grad(value, [*rows, *wanted])
    of_alpha = iter(found[len(rows) :])
    by_alpha = [None if a is None or not with_alpha else next(of_alpha) for a in alpha]
    return value.detach(), list(found[: len(rows)]), by_alpha


def _widths(columns: int) -> list[int]:
    """Return the widths of blocks for this many columns; the last block is wide enough for the remainder."""
    whole, left = divmod(columns, WIDTHS[-1])
    return [WIDTHS[-1]] * whole + [width for width in WIDTHS if width >= left][: int(left > 0)]


@cache
def _compiled(factors: tuple[tuple[str, int], ...], width: int) -> Callable[..., Tensor]:
    """Return KeOps' product for these profiles and dimensions, of (x, y, alpha of rq) for each factor, then v."""
    from pykeops.torch import Genred

    variables, formula = [], []
    for f, (profile, dimension) in enumerate(factors):
        variables += [f"x{f} = Vi({dimension})", f"y{f} = Vj({dimension})"]
        variables += [f"a{f} = Pm(1)"] if profile == "rq" else []
        formula.append(_radial(profile, f"SqDist(x{f},y{f})", f"a{f}"))
    return Genred("*".join([*formula, "v"]), [*variables, f"v = Vj({width})"], reduction_op="Sum", axis=1)


def _radial(profile: str, q: str, alpha: str) -> str:
    """Return the KeOps formula of p for a squared distance q."""
    if profile == "rbf":
        return f"Exp(-{q}/IntCst(2))"
    if profile == "rq":
        return f"Exp(-{alpha}*Log(IntCst(1)+{q}/(IntCst(2)*{alpha})))"
    return _OF_DISTANCE[profile].format(r=f"Sqrt(IntCst({_DISTANCE[profile]})*{q})")
