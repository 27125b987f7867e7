"""Ranks of torch.distributed, as algorithms over sums want them."""

from gpext.parallel.ranks import RankError, Ranks, Traffic

__all__ = ["RankError", "Ranks", "Traffic"]
