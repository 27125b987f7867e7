"""Iterative solves of positive definite systems known by their products, exact or unbiased."""

from gpext.solvers.conjugate_gradients import LinearSolve, conjugate_gradients
from gpext.solvers.steps import SolveStatus
from gpext.solvers.survival import Geometric, NoSurvival, Survival, Ulisse
from gpext.solvers.unbiased_cg import UnbiasedSolve, unbiased_cg

__all__ = [
    "Geometric",
    "LinearSolve",
    "NoSurvival",
    "SolveStatus",
    "Survival",
    "Ulisse",
    "UnbiasedSolve",
    "conjugate_gradients",
    "unbiased_cg",
]
