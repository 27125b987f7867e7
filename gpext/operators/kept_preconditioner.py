"""A preconditioner that is computed at one set of parameters and reused at nearby ones."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class KeptPreconditioner:
    """The root L of a preconditioner L L' + D, reused while it is good enough; D is the current one.

    A solve is unbiased with any L that is fixed before its random end is drawn. L is recomputed when the first steps of
    a solve, those taken anyway, exceed `growth` times their number when L was new. The draws depend on earlier solves:
    chains that have to be the same after an interruption cannot use one.

    Args:
        growth: more than 1.

    Raises:
        ValueError: it is not.

    Example:
        >>> from gpext.operators import KeptPreconditioner, UnbiasedSolver
        >>> solver = UnbiasedSolver(keep=KeptPreconditioner())
    """

    def __init__(self, growth: float = 1.5) -> None:
        if not growth > 1:
            raise ValueError(f"growth must be more than 1; got {growth}.")
        self.growth = growth
        self.reset()

    def reset(self) -> None:
        """Forget L."""
        self._root: Tensor | None = None
        self._steps_when_new: int | None = None
        self._is_worn = False

    def root(self, noise: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """Return L (n, k), computed by `make` unless the kept one can be used.

        Args:
            noise: the diagonal of D (n,); another size, dtype or device requires another L.
            make: computes L for the current matrix.
        """
        root = self._root
        is_of_this = root is not None and (root.size(0), root.dtype, root.device) == (
            noise.size(0),
            noise.dtype,
            noise.device,
        )
        if root is None or not is_of_this or self._is_worn:
            self.reset()
            root = self._root = make()
        return root

    def note(self, first_steps: int) -> None:
        """Record the number of first steps of a solve."""
        if self._steps_when_new is None:
            self._steps_when_new = max(first_steps, 1)
        self._is_worn = first_steps > self.growth * self._steps_when_new
