"""Options of unbiased solves with a covariance, for :class:`gpext.operators.UnbiasedSolveOperator`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from gpext.checks import whole_number, whole_number_or_none
from gpext.operators.kept_preconditioner import KeptPreconditioner
from gpext.solvers import Survival


@dataclass(frozen=True)
class UnbiasedSolver:
    """Options of unbiased solves.

    Args:
        num_probes: vectors of random signs for the derivatives of log|A|; from n on these are exact up to the solves.
        tolerance: relative size of the residual from which on the end is random.
        survival: the law of the random end; by default as the residual falls (:class:`gpext.solvers.Ulisse`).
        rank: of the preconditioner of K + D; 0 for none. If None it is chosen by what it saves. For a lazy kernel,
            and if nothing is kept or controlled, nearest neighbours complete it where that helps, or a complete
            Cholesky factor in float32 replaces it, 1.5 GiB at most (`gpext.solvers.single_precision.MOST_STORED`).
        keep: keeps the preconditioner's root from solve to solve of one model; None to compute it for each matrix.
        max_steps: maximum number of products with A in one solve; 10 n by default.
        log_det: the value of log|A|. "rough": that of the preconditioner, below log|A| unless it was kept from another
            matrix, has neighbours or is in float32 (nearly log|A| then), or without one the sum of the logarithms of
            the diagonal, above; "lanczos": an estimate by stochastic Lanczos quadrature, at its own cost.
        controlled: whether probes estimate only the part of the derivatives of log|A| that P leaves: many times less
            noise where P is near A, and more where its rank is far too low. The rank is then chosen for accurate
            solves.
        lanczos_probes, lanczos_steps: vectors of random signs and products with A for the Lanczos estimate.
        generator: for probes and truncations, on the CPU.

    Raises:
        TypeError: a number that is not whole where it has to be, or something else than a survival law, a kept
            preconditioner or a generator.
        ValueError: a number outside its range.

    Example:
        >>> UnbiasedSolver(num_probes=2, tolerance=0.01).num_probes
        2
    """

    num_probes: int = 4
    tolerance: float = 0.1
    survival: Survival | None = None
    rank: int | None = None
    keep: KeptPreconditioner | None = None
    max_steps: int | None = None
    log_det: Literal["rough", "lanczos"] = "rough"
    controlled: bool = False
    lanczos_probes: int = 16
    lanczos_steps: int = 50
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        for name, number in (
            ("num_probes", self.num_probes),
            ("lanczos_probes", self.lanczos_probes),
            ("lanczos_steps", self.lanczos_steps),
        ):
            whole_number(name, number, 1)
        for name, most in (("rank", self.rank), ("max_steps", self.max_steps)):
            whole_number_or_none(name, most, 0)
        if not self.tolerance >= 0:
            raise ValueError(f"tolerance must not be negative; got {self.tolerance}.")
        for name, kind in (("survival", Survival), ("keep", KeptPreconditioner), ("generator", torch.Generator)):
            value = vars(self)[name]
            if not isinstance(value, kind | None):
                raise TypeError(f"{name} must be a {kind.__name__} or None; got {value!r}.")
        if self.log_det not in ("rough", "lanczos"):
            raise ValueError(f"log_det must be 'rough' or 'lanczos'; got {self.log_det!r}.")
