"""Optimisers, Langevin dynamics and step-size schedules."""

from gpext.optim.lbfgs import Curvature, Outcome, minimize_lbfgs
from gpext.optim.polynomial_decay import PolynomialDecay
from gpext.optim.sgld import SGLD
from gpext.optim.step_sizes import RobbinsMonro

__all__ = ["SGLD", "Curvature", "Outcome", "PolynomialDecay", "RobbinsMonro", "minimize_lbfgs"]
