"""Optimisers and step-size schedules."""

from gpext.optim.lbfgs import Outcome, minimize_lbfgs
from gpext.optim.step_sizes import RobbinsMonro

__all__ = ["Outcome", "RobbinsMonro", "minimize_lbfgs"]
