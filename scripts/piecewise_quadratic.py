r"""The minimax piecewise quadratic upper bounds on log(1 + e^x), stored in gpext/bounds/minimax_pieces.py.

    log(1 + e^x) = max(x, 0) + f(|x|),    f(t) = log(1 + e^-t)

so only f on t >= 0 has to be bounded, and the bound minus x / 2 is even. If the number of pieces R is odd, the middle
one is a single quadratic in x: there f gets a t^2 - t / 2 + c.

f''' < 0 for t > 0. The error of the best quadratic on an interval is therefore extreme, with alternating signs, at both
ends and at two points between them (Chebyshev); Remez's exchange finds it. Raised by that error the quadratic is an
upper bound, which touches f at the inner end and has its largest gap at the outer end. The middle piece is linear in
r = t^2, and f + t / 2 = log(2 cosh(sqrt(r) / 2)) is concave in r: the best line is the chord, raised until it is a
tangent. The last piece is a constant, f at its left end; its gap is largest at infinity.

In the best bound all pieces have the same largest gap G. Given G, each piece is made as long as G allows, from zero
outwards; G is right if the constant begins where f = G.

The rounded coefficients are verified in 50 digits, at the ends and the stationary points of every gap and on a dense
grid. Needs mpmath; takes seconds.

    python -m scripts.piecewise_quadratic
"""

from __future__ import annotations

import math
from pathlib import Path

import mpmath
import numpy as np
from scipy.optimize import brentq

NUM_PIECES = (3, 5, 10, 20)
OUTPUT = Path(__file__).parent.parent / "gpext" / "bounds" / "minimax_pieces.py"
REACH = 40.0  # further out than any knot: f(40) = 4e-18
HEADER = '''"""Minimax upper bounds on log(1 + e^-t), t >= 0; written by scripts/piecewise_quadratic.py.

By the number of pieces on the whole line: the largest gap G, and (end, a, b, c) for each piece a t^2 + b t + c, which
ends at t = end. The last piece is the constant G.
"""

PIECES: dict[int, tuple[float, list[tuple[float, float, float, float]]]] = {
'''

Quadratic = tuple[float, float, float]  # a, b, c of a t^2 + b t + c
Piece = tuple[float, float, float, float]  # the right end, and a, b, c


def f(t: float) -> float:
    """Return log(1 + e^-t)."""
    return math.log1p(math.exp(-t))


def slope(t: float) -> float:
    """Return f'(t)."""
    return -1 / (1 + math.exp(t))


def best_on(low: float, high: float) -> tuple[Quadratic, float]:
    """Return the quadratic above f on [low, high] that has the smallest largest gap, and this gap."""
    centre, half = 0.5 * (low + high), 0.5 * (high - low)
    inner = np.array([-0.5, 0.5])  # of u = (t - centre) / half: the extrema of the cubic Chebyshev polynomial
    for _ in range(50):
        u = np.array([-1.0, *inner, 1.0])
        system = np.stack([u**2, u, np.ones(4), [1, -1, 1, -1]], axis=1)  # q(u_i) +- E = f(u_i)
        a, b, c, error = np.linalg.solve(system, [f(centre + half * x) for x in u]).tolist()
        previous, inner = inner, stationary_points(a, b, centre, half)
        if np.abs(inner - previous).max() < 1e-13:
            break
    a, b = a / half**2, b / half
    return (a, b - 2 * a * centre, c + error - b * centre + a * centre**2), 2 * error


def stationary_points(a: float, b: float, centre: float, half: float) -> np.ndarray:
    """Return the two zeros of the derivative of (a u^2 + b u) - f(centre + half u), which is convex in u."""

    def derivative(u: float) -> float:
        return 2 * a * u + b - half * slope(centre + half * u)

    sigma = 0.5 * (1 + math.sqrt(1 - 8 * a / half**2))  # the derivative is least where f'' = sigma (1 - sigma) = 2 a
    least = (math.log(sigma / (1 - sigma)) - centre) / half
    return np.array([brentq(derivative, *side, xtol=1e-15) for side in ((-1, least), (least, 1))])


def best_in_the_middle(end: float) -> tuple[Quadratic, float]:
    """Return a t^2 - t / 2 + c above f on [0, end] that has the smallest largest gap, and this gap."""

    def symmetric(t: float) -> float:
        return f(t) + 0.5 * t

    a = (symmetric(end) - math.log(2)) / end**2
    touch = brentq(lambda t: slope(t) + 0.5 - 2 * a * t, 1e-6 * end, end)
    c = symmetric(touch) - a * touch**2
    return (a, -0.5, c), c - math.log(2)


def pieces_within(gap: float, num_pieces: int) -> list[Piece]:
    """Return the pieces from zero on, without the constant, each as long as `gap` allows."""
    pieces: list[Piece] = []
    if num_pieces % 2:
        end = brentq(lambda t: best_in_the_middle(t)[1] - gap, 1e-2, REACH, xtol=1e-15)
        pieces.append((end, *best_in_the_middle(end)[0]))
    while len(pieces) < (num_pieces - 1) // 2:
        low = pieces[-1][0] if pieces else 0.0
        if best_on(low, REACH)[1] < gap:
            return [*pieces, (REACH, 0.0, 0.0, gap)]  # so large a gap needs no further piece
        end = brentq(lambda t, low=low: best_on(low, t)[1] - gap, low + 1e-2, REACH, xtol=1e-15)
        pieces.append((end, *best_on(low, end)[0]))
    return pieces


@mpmath.workdps(50)
def best_bound(num_pieces: int) -> tuple[float, list[Piece]]:
    """Return the largest gap and the pieces of the best bound, raised until rounding cannot bring them below f."""
    log_gap = brentq(lambda g: f(pieces_within(math.exp(g), num_pieces)[-1][0]) - math.exp(g), -12, -1.5, xtol=1e-14)
    pieces, low, raised = pieces_within(math.exp(log_gap), num_pieces), 0.0, []
    for end, a, b, c in pieces:
        while smallest_and_largest_gap(low, end, (a, b, c))[0] < 0:
            c = math.nextafter(c, math.inf)
        raised.append((end, a, b, c))
        low = end
    return float(mpmath.log1p(mpmath.exp(-mpmath.mpf(low)))), raised


@mpmath.workdps(50)
def smallest_and_largest_gap(low: float, end: float, quadratic: Quadratic) -> tuple[mpmath.mpf, mpmath.mpf]:
    """Return the extremes over [low, end] of a t^2 + b t + c - f(t), in high precision."""
    a, b, c = map(mpmath.mpf, quadratic)
    grid = mpmath.linspace(low, end, 400)
    derivative = [2 * a * t + b + 1 / (1 + mpmath.exp(t)) for t in grid]
    stationary = [
        mpmath.findroot(lambda t: 2 * a * t + b + 1 / (1 + mpmath.exp(t)), (left, right), solver="anderson")
        for left, right, d_left, d_right in zip(grid, grid[1:], derivative, derivative[1:], strict=False)
        if d_left * d_right < 0
    ]
    gaps = [a * t**2 + b * t + c - mpmath.log1p(mpmath.exp(-t)) for t in [*grid, *stationary]]
    return min(gaps), max(gaps)


def main() -> None:
    """Compute, verify, print and store the bounds."""
    entries = []
    for num_pieces in NUM_PIECES:
        gap, pieces = best_bound(num_pieces)
        starts = [0.0, *(piece[0] for piece in pieces)]
        gaps = [smallest_and_largest_gap(low, end, q) for low, (end, *q) in zip(starts, pieces, strict=False)]
        assert all(smallest >= 0 for smallest, _ in gaps)
        largest = [float(largest) for _, largest in gaps]
        print(f"R = {num_pieces:2d}: largest gap {gap:.6e}, knots {', '.join(f'{end:.4f}' for end in starts[1:])}")
        print("        of the pieces, over it, minus 1:", ", ".join(f"{g / gap - 1:.0e}" for g in largest))
        lines = "".join(f"            {piece!r},\n" for piece in pieces)
        largest_gap = math.nextafter(max(gap, *largest), math.inf)  # rounded up
        entries.append(f"    {num_pieces}: (\n        {largest_gap!r},\n        [\n{lines}        ],\n    ),\n")
    OUTPUT.write_text(HEADER + "".join(entries) + "}\n")


if __name__ == "__main__":
    main()
