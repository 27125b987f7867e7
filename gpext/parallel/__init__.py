"""Ranks of torch.distributed, as algorithms over sums want them."""

from gpext.parallel.interrupts import interrupts
from gpext.parallel.marks import mark
from gpext.parallel.ranks import RankError, Ranks, Traffic

__all__ = ["RankError", "Ranks", "Traffic", "interrupts", "mark"]
