"""Optimisers."""

from gpext.optim.lbfgs import Outcome, minimize_lbfgs

__all__ = ["Outcome", "minimize_lbfgs"]
