"""Ranks of torch.distributed, as algorithms over sums want them."""

from gpext.parallel.fingerprint import described, fingerprint, tensors_of
from gpext.parallel.interrupts import interrupts
from gpext.parallel.ranks import RankError, Ranks, Traffic, check_ranks

__all__ = ["RankError", "Ranks", "Traffic", "check_ranks", "described", "fingerprint", "interrupts", "tensors_of"]
