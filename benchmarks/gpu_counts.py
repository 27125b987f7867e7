r"""Floating-point operations and bytes of the jobs of :mod:`benchmarks.gpu`, by formulas.

An addition, a product, a quotient, a root, an exponential: one operation each. Bytes are those of every operand and
result of an operation (a factor, a solve, a product), read or written once. For a unit of work of a job:

* step: its floor (:mod:`benchmarks.step_time`), whatever a method does beyond it, or does only every few steps as gpext
  does with the factor and the kernel of the inducing points; M inducing points, B data, d inputs:
  2 M B d + 3 M B for the kernel, M^3 / 3 for the factor, 2 M^2 B for two triangular solves, 4 M^2 B for two products.
* product: n (n + 1) / 2 (3 d + 1) + 2 n^2 R for distances, profile and R columns; K_ij = K_ji is needed once. A
  distance has d differences, d squares and d - 1 sums, and the RBF profile one factor -1/2 and one exponential.
* derivatives of u' K v in x: n (n - 1) / 2 (6 d + 1 + 4 R), for each pair of data its distance and profile, the sum of
  u_i v_j + v_i u_j over R columns (4 R - 1), times the profile, and times each difference (d), added at both (2 d).
* CG: the products, and 10 n R a step for its vectors.
* Gibbs sweep: a Cholesky factor n^3 / 3 a chain, and 8 n^2: two triangular solves, two products with K and one with its
  root, the last three of them of n^2 multiplications and additions.
* EP: for each evaluation of sites a Cholesky factor and the inverse of a triangle, 2 n^3 / 3.
* evidence: a Cholesky factor n^3 / 3 for each Newton step and at the mode, and there an inverse of a triangle, whose
  square the derivatives take, 2 n^3 / 3. With neighbours, the factors of the sparse precision alone.
* Polya-Gamma draws: none are counted (a draw takes a random number of steps); its bytes are count, tilt and draw.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """The minimum operations and bytes of a unit of work."""

    flops: float
    bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, number: float) -> Work:
        return Work(number * self.flops, number * self.bytes)


def step(M: int, B: int, d: int, size: int) -> Work:
    """Return the work of the floor of a training step, in numbers of `size` bytes."""
    flops = 2 * M * B * d + 3 * M * B + M**3 / 3 + 2 * M**2 * B + 4 * M**2 * B
    numbers = (M + B) * d + 3 * M * B  # inputs, distances written, K_zx read and written
    numbers += 2 * M**2 + 2 * (M**2 + 2 * M * B) + (M**2 + 2 * M * B) + (2 * M * B + M**2)
    return Work(flops, float(size * numbers))


def product(n: int, d: int, R: int, size: int) -> Work:
    """Return the work of K V, K (n, n) not stored."""
    return Work(float(n * (n + 1) // 2 * (3 * d + 1) + 2 * n**2 * R), float(size * n * (d + 2 * R)))


def derivatives(n: int, d: int, R: int, size: int) -> Work:
    """Return the work of the derivatives of sum(U * (K V)) in all inputs, K not stored."""
    return Work(float(n * (n - 1) // 2 * (6 * d + 1 + 4 * R)), float(size * n * (2 * d + 2 * R)))


def cg(n: int, d: int, R: int, num_products: int, size: int) -> Work:
    """Return the work of a solve by a number of products."""
    return (product(n, d, R, size) + Work(10.0 * n * R, 10.0 * size * n * R)) * num_products


def gibbs_sweep(n: int, num_chains: int) -> Work:
    """Return the work of a sweep of all chains, in float64."""
    return Work(n**3 / 3 + 8 * n**2, 8.0 * 6 * n**2) * num_chains


def ep(n: int, num_looks: int) -> Work:
    """Return the work of one inference in float64."""
    return Work(2 * n**3 / 3, 8.0 * 5 * n**2) * num_looks


def evidence(n: int, num_steps: int) -> Work:
    """Return the work of an evidence and its derivatives after a number of Newton steps, in float64."""
    return Work((num_steps + 1) * n**3 / 3 + 2 * n**3 / 3, 8.0 * 2 * n**2 * (num_steps + 3))


def sparse_evidence(multiplications: float, stored: int, num_steps: int) -> Work:
    """Return the work of the sparse factors of an evidence after a number of Newton steps, in float64."""
    return Work(2 * multiplications, 8.0 * stored) * (num_steps + 1)


def polya_gamma() -> Work:
    """Return the work of one draw."""
    return Work(0.0, 3 * 8.0)
