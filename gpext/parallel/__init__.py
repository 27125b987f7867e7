"""Ranks of torch.distributed, as algorithms over sums want them."""

from gpext.parallel.descriptions import described, tensors_of
from gpext.parallel.interrupts import interrupts
from gpext.parallel.marks import mark
from gpext.parallel.ranks import RankError, Ranks, Traffic, check_ranks

__all__ = ["RankError", "Ranks", "Traffic", "check_ranks", "described", "interrupts", "mark", "tensors_of"]
