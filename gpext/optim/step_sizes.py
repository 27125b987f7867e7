"""Step-size schedules: functions of the step number."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RobbinsMonro:
    """The decreasing steps rho_t = scale (delay + t)^-exponent, t = 0, 1, ...

    Their sum diverges and that of their squares does not [Robbins & Monro 1951]: with them the closed-form minibatch
    updates of q(u) converge, not just hover [Hoffman et al. 2013].

    Args:
        scale: a > 0; the first step a delay^-exponent must not exceed 1.
        delay: b >= 1.
        exponent: in (0.5, 1].

    Raises:
        ValueError: outside these ranges.

    Example:
        >>> rate = RobbinsMonro(scale=1.0, delay=1.0, exponent=0.6)
        >>> [round(rate(step), 3) for step in range(3)]
        [1.0, 0.66, 0.517]
    """

    scale: float = 1.0
    delay: float = 1.0
    exponent: float = 0.6

    def __post_init__(self) -> None:
        if not 0.5 < self.exponent <= 1:
            raise ValueError(f"exponent must be in (0.5, 1] for convergence; got {self.exponent}.")
        if self.delay < 1 or self.scale <= 0 or self(0) > 1:
            raise ValueError(
                f"delay must be at least 1 and 0 < scale delay^-exponent <= 1; got scale {self.scale} "
                f"and delay {self.delay}."
            )

    def __call__(self, step: int) -> float:
        """Return rho at a step."""
        return self.scale * (self.delay + step) ** -self.exponent
