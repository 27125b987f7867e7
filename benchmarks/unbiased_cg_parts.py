"""The measurements of :mod:`benchmarks.unbiased_cg`, with a function for each kind of row."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from linear_operator import to_linear_operator
from linear_operator.operators import LinearOperator
from torch import Tensor

from benchmarks.ledger import Row
from benchmarks.unbiased_cg_problems import Problem
from gpext.kernels import keops
from gpext.mlls import UnbiasedMarginalLogLikelihood
from gpext.operators import KeptPreconditioner, UnbiasedSolveOperator, UnbiasedSolver
from gpext.solvers import (
    Geometric,
    LowRankPreconditioner,
    Matched,
    NeighbourPreconditioner,
    NoSurvival,
    SinglePrecisionPreconditioner,
    Survival,
    Ulisse,
    conjugate_gradients,
    estimator_diagnostics,
    unbiased_cg,
)

NUM_GRADIENTS = 100  # that are averaged, as many as the paper's repetitions
NUM_PROBES = 4  # of a gradient
SCHEDULE_RANK = 100  # the rank chosen automatically leaves two or three steps, too few to distinguish laws


@dataclass(frozen=True)
class Seen(Survival):
    """A law without the increments that a number of draws reach less than once: the typical mean of so few draws."""

    law: Survival
    draws: int

    def log_probability(self, j: int, fall: Tensor) -> Tensor:
        """Return log P_j (..., R)."""
        log_p = self.law.log_probability(j, fall)
        return torch.where(log_p < -math.log(self.draws), -math.inf, log_p)


PUBLISHED = {f"ULISSE beta={beta:g}": Ulisse(beta) for beta in (1.0, 0.1, 0.01, 0.001)}
SEEN = {f"{name}, what is seen": Seen(PUBLISHED[name], NUM_GRADIENTS) for name in ("ULISSE beta=1", "ULISSE beta=0.1")}
LAWS: dict[str, tuple[Survival, bool]] = {  # law, whether columns end together
    "default": (Matched(), True),
    "Matched, columns apart": (Matched(), False),
    **{f"Matched({power:g})": (Matched(power), True) for power in (0.5, 1.0, 1.5, 2.0)},
    **{f"Geometric({rate:g})": (Geometric(rate), True) for rate in (0.02, 0.05, 0.1, 0.2, 0.4)},
    **{name: (law, False) for name, law in PUBLISHED.items()},
    **{name: (law, False) for name, law in SEEN.items()},
    "early stopping": (NoSurvival(), True),
}


# ---- iterations and error against the condition number [FE15 Fig. 2] ------------------------------------------------

TOLERANCE = 1e-8  # the paper's
MOST = 20_000  # products
SHIFTS = (10.0, 100.0, 1000.0)  # delta over the noise; the best counts, as in the paper


def cg(problem: Problem, method: str) -> Row:
    """Return products until the residual is 1e-8 of b, and |s - s by Cholesky|."""
    A, b = problem.matrix, problem.y[:, None]
    exact = problem.solve(b)
    single = A.float()
    if method == "PCG, K + delta I" or method == "PCG, K + delta I in float32":
        runs = [_shifted(problem, shift * problem.noise, method.endswith("float32")) for shift in SHIFTS]
        found, products = min(runs, key=lambda run: run[1])
    elif method == "CG, float32":
        solve = conjugate_gradients(lambda v: single @ v, b.float(), tolerance=TOLERANCE, max_steps=MOST)
        found, products = solve.solution.double(), solve.num_steps
    else:
        options: dict[str, Any] = {
            "CG": {},
            "CG, float32 refined": {"cheap_matvec": lambda v: (single @ v.float()).double()},
            "PCG, pivoted Cholesky": {"precondition": problem.preconditioner()},
        }[method]
        solve = conjugate_gradients(problem.product, b, tolerance=TOLERANCE, max_steps=MOST, **options)
        found, products = solve.solution, solve.num_steps
    residual = (b - A @ found).norm() / b.norm()
    return {"products": products, "error": float((found - exact).norm()), "residual": float(residual)}


CG_METHODS = (
    "CG",
    "CG, float32",
    "CG, float32 refined",
    "PCG, K + delta I",
    "PCG, K + delta I in float32",
    "PCG, pivoted Cholesky",
)


def _shifted(problem: Problem, shift: float, in_float32: bool) -> tuple[Tensor, int]:
    """Solve with the paper's preconditioner J = K + delta I by inner CG: the solution, and products of both kinds."""
    b, counted = problem.y[:, None], 0
    J = problem.matrix + shift * torch.eye(len(b), dtype=b.dtype)
    J = J.float() if in_float32 else J

    def precondition(r: Tensor) -> Tensor:
        nonlocal counted
        inner = conjugate_gradients(lambda v: J @ v, r.to(J), tolerance=1e-5 if in_float32 else 1e-10)
        counted += inner.num_steps
        return inner.solution.to(r)

    outer = conjugate_gradients(problem.product, b, precondition=precondition, tolerance=TOLERANCE, max_steps=500)
    return outer.solution, outer.num_steps + counted


# ---- the spread of a solution, and of gradients with one probe [FE15 Fig. 3 and 4] ----------------------------------

ESTIMATORS: dict[str, tuple[Survival, float, bool]] = {  # law, q, whether preconditioned
    **{f"ULISSE q={q:g} beta={beta:g}": (Ulisse(beta), q, False) for q in (1.0, 0.1) for beta in (1.0, 100.0)},
    **{f"Matched q={q:g}": (Matched(), q, False) for q in (1.0, 0.1)},
    "Matched q=0.1, preconditioned": (Matched(), 0.1, True),
}


def estimator(problem: Problem, method: str) -> Row:
    """Return expected products, sd as 4000 draws show it, the share never seen, gradients' error [FE15 Eq. 13]."""
    y, generator = problem.y[:, None], torch.Generator().manual_seed(0)
    Z = problem.signs(NUM_GRADIENTS, 1)
    if method == "CG":
        s = problem.solve(y).mT.expand(2 * NUM_GRADIENTS, -1)
        row: Row = {"unseen": 0.0}
        U = problem.solve(Z)
    else:
        law, q, preconditioned = ESTIMATORS[method]
        options: dict[str, Any] = {
            "survival": law,
            "tolerance": q,
            "precondition": problem.preconditioner() if preconditioned else None,
        }
        d = estimator_diagnostics(problem.product, y, **options)
        row = {
            "products": d.expected_steps,
            "sd": float(d.standard_error) * d.num_draws**0.5 * float(d.mean.norm()) / len(y) ** 0.5,
            "unseen": float(d.unseen),
            "shows_mean": bool(d.shows_mean),
        }
        options["generator"] = generator
        s = unbiased_cg(problem.product, y, num_estimates=2 * NUM_GRADIENTS, **options).estimates[..., 0]
        U = unbiased_cg(problem.product, Z, **options).estimates[0]
    first, second = s[:NUM_GRADIENTS], s[NUM_GRADIENTS:]
    g = torch.stack(
        [0.5 * (first * (second @ B)).sum(-1) - 0.5 * (U * (B @ Z)).sum(0) for B in problem.derivatives], -1
    )
    errors = (g - problem.gradient).square().sum(-1) / problem.gradient.square().sum()
    return {**row, "log10_error": float(errors.log10().mean())}


# ---- the mean of 100 gradients against products ---------------------------------------------------------------------


class Tape:
    """Products of a run that is repeated under other laws: the same vectors in the same order, multiplied only once."""

    def __init__(self, product: Callable[[Tensor], Tensor]) -> None:
        self._product = product
        self._found: list[Tensor] = []
        self._next = 0

    def rewound(self) -> Tape:
        """Return the tape, rewound to its beginning."""
        self._next = 0
        return self

    def __call__(self, v: Tensor) -> Tensor:
        """Return the product with the next vector."""
        if self._next == len(self._found):
            self._found.append(self._product(v))
        self._next += 1
        return self._found[self._next - 1]


def schedule(
    problem: Problem, name: str, q: float, preconditioned: bool, probe_sets: int, tapes: defaultdict[int, Tape]
) -> Row:
    """Return the RMS error of the mean of 100 gradients, relative to the gradient; exact for the probes averaged over.

    With e1 and e2 the errors of both estimates for y, e_i those for the probes z_i and dA = B,

        2 (g~ - g) = e1' B a + a' B e2 + e1' B e2 - mean_i e_i' B z_i  + the probes' own part,    a = A^-1 y,

    the covariance of errors is that of :mod:`gpext.solvers.estimator_diagnostics`. `tapes` keeps products, by seed.
    """
    law, share_columns = LAWS[name]
    a = problem.solve(problem.y[:, None])
    precondition = problem.preconditioner(SCHEDULE_RANK) if preconditioned else None
    # more sets where there is a bias, which has to be averaged over probes, too
    sets = probe_sets * {"early stopping": 8}.get(name, 2 if name in SEEN else 1)
    products, variances, biases = [], [], []
    for seed in range(sets):
        Z = problem.signs(NUM_PROBES, seed)
        b = torch.cat([problem.y[:, None], Z], -1)
        d = estimator_diagnostics(
            tapes[seed].rewound(),
            b,
            num_estimates=2,
            precondition=precondition,
            tolerance=q,
            survival=law,
            share_columns=share_columns,
        )
        products.append(d.expected_steps + 1)  # one for the derivatives
        variance, bias = [], []
        for B in problem.derivatives:
            mean = d.mean[:, :1]
            h = (d.left[..., :1] * (B @ mean)).sum(-2)  # (T, 1)
            k = (d.left[..., 1:] * (B @ Z)).sum(-2)  # (T, probes)
            w, w_probes = d.weight[:, :1], d.weight[:, 1:]
            of_y = replace(d, mean=mean, left=d.left[..., :1], weight=w)
            both = float(of_y.quadratic_variance(lambda v, B=B: torch.einsum("nm,...mr->...nr", B, v)))  # Var(s1' B s2)
            if share_columns:
                joint = float((w * (k.mean(-1, keepdim=True).square() - 2 * h * k.mean(-1, keepdim=True))).nansum())
            else:
                joint = float((w_probes * k.square()).nansum()) / NUM_PROBES**2
            variance.append(0.25 * (both + joint) if math.isfinite(both) else math.inf)
            shift = float((mean * (B @ mean)).sum() - (a * (B @ a)).sum())
            bias.append(0.5 * shift - 0.5 * float((d.bias[:, 1:] * (B @ Z)).sum(0).mean()))
        variances.append(variance)
        biases.append(bias)
    size = float(problem.gradient.norm())
    truncation = torch.tensor(variances, dtype=torch.float64).mean(0).sum()
    bias = torch.tensor(biases, dtype=torch.float64).mean(0).norm()
    probes = problem.probe_variance.sum() / NUM_PROBES
    return {
        "products": sum(products) / len(products),
        "truncation": float((truncation / NUM_GRADIENTS).sqrt()) / size,
        "bias": float(bias) / size,
        "probes": float((probes / NUM_GRADIENTS).sqrt()) / size,
        "total": float(((truncation + probes) / NUM_GRADIENTS + bias.square()).sqrt()) / size,
    }


# ---- 4000 draws -----------------------------------------------------------------------------------------------------


def solution_draws(problem: Problem, law: Survival, q: float, preconditioned: bool, number: int) -> Row:
    """Return the error of the mean of draws of the solution of A s = y, relative and in standard errors."""
    y, options = problem.y[:, None], {"precondition": problem.preconditioner() if preconditioned else None}
    found = unbiased_cg(
        problem.product,
        y,
        num_estimates=number,
        tolerance=q,
        survival=law,
        generator=torch.Generator().manual_seed(0),
        **options,
    )
    d = estimator_diagnostics(problem.product, y, tolerance=q, survival=law, num_draws=number, **options)
    x, exact = found.estimates[..., 0], problem.solve(y)[:, 0]
    deviation = x.mean(0) - exact
    z = deviation.abs() / (x.std(0) / number**0.5).clamp_min(1e-12 * exact.abs().max())
    return {
        "first_steps": found.first_steps,
        "extra": float(found.truncations.double().mean()) + 1,
        "products": d.expected_steps,
        "deviation": float(deviation.norm() / exact.norm()),
        "z": float(z.max()),
        "unseen": float(d.unseen),
        "standard_error": float(d.standard_error),
        "shows_mean": bool(d.shows_mean),
    }


class SumModel(gpytorch.models.ExactGP):
    """A scaled RBF and a Matern-3/2 kernel, a constant mean."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        likelihood = gpytorch.likelihoods.GaussianLikelihood().to(x)
        likelihood.noise = 0.05
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = ScaleKernel(RBFKernel()) + MaternKernel(nu=1.5)
        self.covar_module.kernels[0].base_kernel.lengthscale = 2.0
        self.covar_module.kernels[1].lengthscale = 3.0
        self.to(x)

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Return the prior at x."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class StochasticSolve(LinearOperator):
    """A matrix whose `_solve` is an unbiased estimate, and whose `inv_quad` is linear_operator's own."""

    def __init__(self, base: LinearOperator, *, generator: torch.Generator) -> None:
        super().__init__(base, generator=generator)
        self.base, self.generator = base, generator

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.base._matmul(rhs)

    def _size(self) -> torch.Size:
        return self.base.size()

    def _transpose_nonbatch(self) -> LinearOperator:
        return self

    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        return self.base._bilinear_derivative(left_vecs, right_vecs)

    def _solve(self, rhs: Tensor, preconditioner: Any = None, num_tridiag: int = 0) -> Tensor:
        return unbiased_cg(self.base._matmul, rhs, generator=self.generator).estimates[0]


def gradient_draws(x: Tensor, y: Tensor, method: str, number: int) -> Row:
    """Return the errors of the mean of draws of y' A^-1 y and of each derivative in standard errors, for a sum kernel.

    "stock inv_quad": the derivatives of y' A^-1 y alone, by linear_operator from one unbiased solve; the other methods
    have those of the whole log marginal likelihood.
    """
    model, generator = SumModel(x, y), torch.Generator().manual_seed(0)
    likelihood = model.likelihood
    parameters = list(model.parameters())
    with gpytorch.settings.max_cholesky_size(max(len(y), 800)):
        output = likelihood(model(x))
        centred = y - output.mean
        quadratic = to_linear_operator(output.lazy_covariance_matrix.to_dense()).inv_quad(centred)
        objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
        exact = quadratic if method == "stock inv_quad" else objective(model(x), y)
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(exact, parameters, retain_graph=True)])
    draws, values = [], []
    for _ in range(number):
        covariance = likelihood(model(x)).lazy_covariance_matrix.evaluate_kernel()
        centred = y - model.mean_module(x)
        with gpytorch.settings.max_cholesky_size(1):
            if method == "stock inv_quad":
                value = estimate = StochasticSolve(covariance, generator=generator).inv_quad(centred)
            else:
                law, q, rank = GRADIENT_METHODS[method]
                solver = UnbiasedSolver(tolerance=q, survival=law, rank=rank, generator=generator)
                operator = UnbiasedSolveOperator(covariance, solver=solver)
                estimate, log_det = operator.inv_quad_logdet(centred, logdet=True)
                value = -0.5 * (estimate + log_det) / len(y)
            gradient = torch.autograd.grad(value, parameters)
        draws.append(torch.cat([g.flatten() for g in gradient]))
        values.append(estimate.detach())
    found, estimates = torch.stack(draws), torch.stack(values)
    rounding = 1e-9  # relative; the spread where there is no other
    z = (found.mean(0) - expected) / (found.std(0) / number**0.5 + rounding * expected.abs())
    value_z = (estimates.mean() - quadratic.detach()) / (estimates.std() / number**0.5 + rounding * quadratic.detach())
    return {
        "rows": len(y),
        "draws": number,
        "names": [name.removeprefix("covar_module.").replace("raw_", "") for name, _ in model.named_parameters()],
        "z": z.tolist(),
        "inv_quad_z": float(value_z),
        "deviation": float((found.mean(0) - expected).norm() / expected.norm()),
    }


GRADIENT_METHODS: dict[str, tuple[Survival | None, float, int | None]] = {  # law, q, rank
    "default": (None, 0.1, None),
    "default, no preconditioner": (None, 0.1, 0),
    "published, q=1": (Ulisse(1.0), 1.0, 0),
    "published, q=0.1": (Ulisse(1.0), 0.1, 0),
}


# ---- preconditioners ------------------------------------------------------------------------------------------------

KERNELS: dict[str, Callable[[], gpytorch.kernels.Kernel]] = {
    "RBF": keops.RBFKernel,
    "Matern-3/2": lambda: keops.MaternKernel(nu=1.5),
    "Matern-1/2": lambda: keops.MaternKernel(nu=0.5),
}
UNIFORM = "uniform"
REAL = ("census_house_8L", "protein", "magic", "susy", "airline")
SYSTEMS = (  # inputs, kernel, length scale, noise; the first four are those of the first measurements
    (UNIFORM, "RBF", 2.0, 1e-2),
    (UNIFORM, "RBF", 4.0, 1e-2),
    (UNIFORM, "Matern-3/2", 2.0, 1e-2),
    (UNIFORM, "Matern-3/2", 4.0, 1e-2),
    (UNIFORM, "RBF", 1.0, 1e-2),
    (UNIFORM, "Matern-3/2", 1.0, 1e-2),
    (UNIFORM, "Matern-1/2", 2.0, 1e-2),
    (UNIFORM, "Matern-3/2", 2.0, 1e-3),
    (UNIFORM, "RBF", 2.0, 1e-3),
    *((name, "RBF", 3.0, 1e-2) for name in REAL),
    *((name, "Matern-3/2", 1.0, 1e-2) for name in REAL),
)
MADE_OF = {
    LowRankPreconditioner: "low rank",
    NeighbourPreconditioner: "neighbours",
    SinglePrecisionPreconditioner: "float32",
}


def preconditioned(x: Tensor, kernel: str, lengthscale: float, noise: float) -> Row:
    """Return products and seconds of solves to 1e-8 with and without the automatic preconditioner."""
    generator, n = torch.Generator().manual_seed(0), len(x)
    b = torch.randn(n, 4, dtype=torch.float64, generator=generator)
    module = KERNELS[kernel]().double()
    module.lengthscale = lengthscale
    with torch.no_grad(), gpytorch.settings.max_cholesky_size(1):
        K = module(x).evaluate_kernel()
    # The preconditioner is chosen for a tenth of the solver's tolerance.
    solver = UnbiasedSolver(tolerance=10 * TOLERANCE, generator=generator, max_steps=MOST)
    A = K.add_diagonal(torch.full_like(x[:, 0], noise))
    without, operator = (UnbiasedSolveOperator(A, solver=each) for each in (replace(solver, rank=0), solver))
    A._matmul(b)  # one-time work
    plain, plain_seconds = _timed(lambda: without.solve_to(b, TOLERANCE))
    P, built = _timed(lambda: operator.preconditioner)
    found, seconds = _timed(lambda: operator.solve_to(b, TOLERANCE))
    return {
        "kernel": kernel,
        "lengthscale": lengthscale,
        "n": n,
        "noise": noise,
        "plain": plain.num_steps,
        "plain_seconds": plain_seconds,
        "rank": P.rank,
        "preconditioner": MADE_OF[type(P)],
        "products": found.num_steps,
        "build_seconds": built,
        "seconds": [each + own for each, own in zip(built, seconds, strict=True)],
        "status": [plain.status.name, found.status.name],
        "residual": float(found.residual_norm.max()),
    }


def uniform(n: int) -> Tensor:
    """Return standardised inputs in 8 dimensions (n, 8)."""
    x = torch.rand(n, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return (x - x.mean(0)) / x.std(0)


def _timed(work: Callable[[], Any]) -> tuple[Any, list[float]]:
    """Return the result of the work, and its wall-clock and CPU seconds."""
    begun = time.perf_counter(), time.process_time()
    found = work()
    return found, [time.perf_counter() - begun[0], time.process_time() - begun[1]]


def keeping(x: Tensor, y: Tensor, method: str, number: int) -> Row:
    """Return seconds a gradient on a random walk of the parameters, with steps of 0.02 in their raw values."""
    model = SumModel(x, y)
    rank = 0 if method == "no preconditioner" else None
    keep = KeptPreconditioner() if method == "kept" else None
    solver = UnbiasedSolver(rank=rank, keep=keep, generator=torch.Generator().manual_seed(0))
    mll = UnbiasedMarginalLogLikelihood(model.likelihood, model, solver=solver)
    parameters, walk = list(model.parameters()), torch.Generator().manual_seed(1)
    torch.autograd.grad(mll(model(x), y), parameters)  # one-time work
    begun = time.perf_counter()
    for _ in range(number):
        with torch.no_grad():
            for p in parameters:
                p.add_(0.02 * torch.randn(p.shape, generator=walk, dtype=torch.float64))
        torch.autograd.grad(mll(model(x), y), parameters)
    return {"seconds": (time.perf_counter() - begun) / number, "rows": len(y), "gradients": number}
