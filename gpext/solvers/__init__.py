"""Iterative solves of positive definite systems given by their products, exact or unbiased."""

from gpext.solvers.choose_preconditioner import automatic_preconditioner
from gpext.solvers.conjugate_gradients import LinearSolve, conjugate_gradients
from gpext.solvers.estimator_diagnostics import EstimatorDiagnostics, estimator_diagnostics
from gpext.solvers.lanczos import lanczos_log_det, trace_probes
from gpext.solvers.nystrom import nystrom
from gpext.solvers.partial_cholesky import partial_cholesky
from gpext.solvers.preconditioners import LowRankPreconditioner, NeighbourPreconditioner
from gpext.solvers.single_precision import SinglePrecisionPreconditioner
from gpext.solvers.square_roots import RootProduct, square_root_times
from gpext.solvers.steps import SolveStatus
from gpext.solvers.survival import Geometric, Matched, NoSurvival, Survival, Ulisse
from gpext.solvers.unbiased_cg import UnbiasedSolve, unbiased_cg

__all__ = [
    "EstimatorDiagnostics",
    "Geometric",
    "LinearSolve",
    "LowRankPreconditioner",
    "Matched",
    "NeighbourPreconditioner",
    "NoSurvival",
    "RootProduct",
    "SinglePrecisionPreconditioner",
    "SolveStatus",
    "Survival",
    "Ulisse",
    "UnbiasedSolve",
    "automatic_preconditioner",
    "conjugate_gradients",
    "estimator_diagnostics",
    "lanczos_log_det",
    "nystrom",
    "partial_cholesky",
    "square_root_times",
    "trace_probes",
    "unbiased_cg",
]
