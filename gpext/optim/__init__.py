"""Optimisers and step-size schedules."""

from gpext.optim.lbfgs import Minimisation, Outcome, minimize_lbfgs
from gpext.optim.step_sizes import RobbinsMonro

__all__ = ["Minimisation", "Outcome", "RobbinsMonro", "minimize_lbfgs"]
