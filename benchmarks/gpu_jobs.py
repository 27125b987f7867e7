"""The jobs of :mod:`benchmarks.gpu`, each timed with its counterpart in gpytorch or KeOps, and a program for one job.

    python -m benchmarks.gpu_jobs "product float32" --device cpu --sizes quick

prints the row as JSON on its last line. Each job runs in a separate process: a card that has failed once fails for the
rest of the process, and a process that hangs can be ended.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator.utils.linear_cg import linear_cg
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

import gpext
from benchmarks import gpu_counts
from benchmarks.device_times import in_turns, limits
from benchmarks.gpu_counts import Work
from benchmarks.gpu_peers import gaussian_evidence, gpytorch_draw, variational_posterior
from benchmarks.kernel_matvec import PROFILES, form_and_derivatives, product, product_and_derivatives
from benchmarks.ledger import Row
from benchmarks.mixing_draws import sum_of_gammas
from benchmarks.step_time import STEPS_A_ROUND, next_step, synthetic_problem
from gpext.distributions import PolyaGamma
from gpext.inference import EP, Laplace
from gpext.kernels import keops
from gpext.likelihoods import BernoulliLogitLikelihood
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.samplers import GibbsSampler
from gpext.sites import GaussianSites
from gpext.solvers import SolveStatus, conjugate_gradients

OURS = "gpext"
NOISE = 0.1
Calls = dict[str, tuple[Callable[[], object], float]]


@dataclass(frozen=True)
class Sizes:
    """The sizes of the jobs."""

    limit: int  # side of the matrices of the limits
    copied: int  # bytes
    num_data: int  # of the steps
    num_inducing: int
    batch: int
    product: int  # rows of the products
    solve: int  # rows of CG
    gibbs: int
    chains: int
    ep: int
    evidence: int
    field: int  # of nearest neighbours
    draws: int
    with_keops: bool  # compiling takes some ten seconds a formula; else gpytorch's stored matrices
    seconds: float  # for the turns of one job


SIZES = {
    "gpu": Sizes(8192, 2**31, 200_000, 1000, 4000, 100_000, 50_000, 2000, 8, 2000, 4000, 20_000, 10_000_000, True, 8.0),
    "cpu": Sizes(512, 2**28, 50_000, 200, 1000, 5000, 5000, 500, 4, 500, 1000, 5000, 200_000, True, 2.0),
    "quick": Sizes(128, 2**20, 1000, 20, 100, 200, 200, 30, 2, 30, 40, 60, 5000, False, 0.1),
}
DIMENSION = 8


@dataclass(frozen=True)
class Job:
    """A job to time: its calls, the size of a unit of work, and its description."""

    calls: Calls
    work: Work
    unit: str
    about: str
    products: dict[str, int] = field(default_factory=dict)  # of a solve, by contestant, counted during the run


# ---- training steps -------------------------------------------------------------------------------------------------


def step(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Job:
    """Return minibatch steps of a sparse model with Laplace noise, and of gpytorch's with NGD and with Adam."""
    problem = synthetic_problem(
        "laplace", num_data=sizes.num_data, dimension=DIMENSION, num_inducing=sizes.num_inducing
    )

    def twenty(name: str) -> Callable[[], None]:
        take = next_step(problem, name, batch_size=sizes.batch, dtype=dtype, device=device)

        def steps() -> None:
            for _ in range(STEPS_A_ROUND):
                take()

        return steps

    names = {OURS: OURS, "gpytorch NGD": "ngd", "gpytorch Adam": "adam", "its linear algebra alone": "floor"}
    calls: Calls = {shown: (twenty(name), STEPS_A_ROUND) for shown, name in names.items()}
    about = f"M = {sizes.num_inducing}, batches of {sizes.batch}"
    return Job(calls, gpu_counts.step(sizes.num_inducing, sizes.batch, DIMENSION, dtype.itemsize), "step", about)


# ---- products -------------------------------------------------------------------------------------------------------


def inputs(n: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return standard normal inputs (n, d), the same on every device."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, DIMENSION, generator=generator, dtype=torch.float64).to(device, dtype)


def columns(n: int, number: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return standard normal vectors (number, n, 1), the same on every device."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(number, n, 1, generator=generator, dtype=torch.float64).to(device, dtype)


def kernels(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> dict[str, gpytorch.kernels.Kernel]:
    """Return the RBF kernels of gpext and of the peer."""
    found = {OURS: PROFILES["rbf"](keops, DIMENSION)}
    if sizes.with_keops:
        if importlib.util.find_spec("pykeops"):
            found["gpytorch KeOps"] = PROFILES["rbf"](gpytorch.kernels.keops, DIMENSION)
    else:
        found["gpytorch stored"] = PROFILES["rbf"](gpytorch.kernels, DIMENSION)
    for kernel in found.values():
        kernel.to(device, dtype)
        kernel.lengthscale = math.sqrt(DIMENSION)
    return found


def _about_products(sizes: Sizes, n: int) -> str:
    missing = sizes.with_keops and not importlib.util.find_spec("pykeops")
    return f"n = {n}, d = {DIMENSION}, RBF, 1 column" + ("; pykeops is not installed" if missing else "")


def products(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Job:
    """Return products K v without derivatives, K not stored."""
    n = sizes.product
    x, (v,) = inputs(n, device, dtype), columns(n, 1, device, dtype)
    calls: Calls = {name: (partial(product, kernel, x, v), 1) for name, kernel in kernels(sizes, device, dtype).items()}
    return Job(calls, gpu_counts.product(n, DIMENSION, 1, dtype.itemsize), "product", _about_products(sizes, n))


def derivatives(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Job:
    """Return sum(u * (K v)) and its derivatives in the length scales: gpext's in one pass, the peer's by autograd."""
    n = sizes.product
    x, (u, v) = inputs(n, device, dtype), columns(n, 2, device, dtype)
    each = kernels(sizes, device, dtype)
    calls: Calls = {OURS: (partial(form_and_derivatives, each.pop(OURS), x, u, v), 1)}
    calls |= {name: (partial(product_and_derivatives, kernel, x, u, v), 1) for name, kernel in each.items()}
    work = gpu_counts.derivatives(n, DIMENSION, 1, dtype.itemsize)
    return Job(calls, work, "gradient", _about_products(sizes, n))


def solve(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Job:
    """Return solves (K + noise I) a = y by conjugate gradients, no preconditioner, to a residual that both can reach.

    With a tolerance of 1e-6 gpytorch's continues to its last step without converging, also in float64.
    """
    n, tolerance = sizes.solve, 1e-4
    x, (y,) = inputs(n, device, dtype), columns(n, 1, device, dtype)
    num_products: dict[str, int] = {}

    def solver(name: str, kernel: gpytorch.kernels.Kernel) -> Callable[[], object]:
        with torch.no_grad(), gpytorch.settings.max_cholesky_size(1):
            K = kernel(x).evaluate_kernel()

        def times(v: Tensor) -> Tensor:
            num_products[name] += 1
            return K @ v + NOISE * v

        @torch.no_grad()
        def solved() -> object:
            num_products[name] = 0
            if name == OURS:
                found = conjugate_gradients(times, y, tolerance=tolerance)
                if found.status is not SolveStatus.CONVERGED:
                    raise ArithmeticError(f"conjugate_gradients: {found.status.name}")
                return found
            with warnings.catch_warnings():
                warnings.simplefilter("error", NumericalWarning)  # not converged
                return linear_cg(times, y, tolerance=tolerance, max_iter=10 * n, max_tridiag_iter=0)

        return solved

    calls: Calls = {name: (solver(name, each), 1) for name, each in kernels(sizes, device, dtype).items()}
    calls[OURS][0]()  # counts the products
    work = gpu_counts.cg(n, DIMENSION, 1, num_products[OURS], dtype.itemsize)
    return Job(calls, work, "solve", f"{_about_products(sizes, n)}, to {tolerance}", num_products)


# ---- inference ------------------------------------------------------------------------------------------------------


def classes(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return inputs (n, d) and classes (n,), float64, the same on every device."""
    x = inputs(n, torch.device("cpu"), torch.float64)
    y = (x[:, 0] + 0.5 * columns(n, 1, x.device, x.dtype)[0, :, 0] > 0).double()
    return x.to(device), y.to(device)


def covariance_of(x: Tensor) -> Tensor:
    """Return the covariance of f at inputs (n, n)."""
    return torch.exp(-0.5 * torch.cdist(x, x).square() / DIMENSION)


def gibbs(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Job:
    """Return Gibbs sweeps of a logit model; gpytorch's draw of f given the same w alone, without drawing w."""
    n, chains, sweeps = sizes.gibbs, sizes.chains, 5
    x, y = classes(n, device)
    sampler = GibbsSampler(MultivariateNormal(y.new_zeros(n), covariance_of(x)), BernoulliLogitLikelihood(), y)
    generator = torch.Generator(device).manual_seed(0)
    calls: Calls = {
        OURS: (lambda: sampler.run(sweeps, chains, 0, generator=generator, progress=False), sweeps),
        "gpytorch, f alone": (gpytorch_draw(x, y, chains), 1),
    }
    return Job(calls, gpu_counts.gibbs_sweep(n, chains), "sweep", f"n = {n}, {chains} chains, logit")


def ep(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Job:
    """Return EP on a logit model; gpytorch's natural gradients, all data inducing, until its bound has converged."""
    n = sizes.ep
    x, y = classes(n, device)
    prior, likelihood = MultivariateNormal(y.new_zeros(n), covariance_of(x)), BernoulliLogitLikelihood()
    found = EP().infer(prior, likelihood, y)
    calls: Calls = {
        OURS: (lambda: EP().infer(prior, likelihood, y), 1),
        "gpytorch NGD": (lambda: variational_posterior(x, y), 1),
    }
    about = f"n = {n}, logit, {found.num_steps} site evaluations, {found.status.name.lower()}"
    return Job(calls, gpu_counts.ep(n, found.num_steps), "inference", about)


class _Latent(gpext.models.LatentGP):
    def __init__(self, x: Tensor, y: Tensor, neighbours: int | None) -> None:
        super().__init__(x, y, BernoulliLogitLikelihood(), Laplace(), neighbours=neighbours)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()).to(x)
        self.covar_module.base_kernel.lengthscale = math.sqrt(x.size(-1)) if neighbours is None else 0.3

    def forward(self, x: Tensor) -> MultivariateNormal:
        """The prior at x."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def _evidence(model: _Latent) -> Callable[[], float]:
    """Return a function that infers from no sites, and differentiates the evidence; it returns the evidence a datum."""
    (x,), y = model.train_inputs, model.train_targets
    mll = LatentMarginalLogLikelihood(model.likelihood, model)
    none = GaussianSites(torch.zeros_like(y), torch.zeros_like(y))

    def evaluate() -> float:
        model.train().zero_grad()
        model.variational_strategy.start_from(none)
        value = mll(model(x), y)
        value.backward()
        return value.item()

    return evaluate


def evidence(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Job:
    """Return Laplace's evidence of a logit model and its derivatives; gpytorch's with Gaussian noise, without steps."""
    n = sizes.evidence
    x, y = classes(n, device)
    model = _Latent(x, y, None)
    num_steps = model.eval().result.num_steps
    calls: Calls = {OURS: (_evidence(model), 1), "gpytorch, Gaussian noise": (gaussian_evidence(x, y), 1)}
    about = f"n = {n}, d = {DIMENSION}, logit, Laplace, {num_steps} Newton steps"
    return Job(calls, gpu_counts.evidence(n, num_steps), "evaluation", about)


def sparse_evidence(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Job:
    """Return the same in the plane, of 20 nearest neighbours; neither gpytorch nor KeOps has any."""
    n, k = sizes.field, 20
    x, y = classes(n, device)
    model = _Latent(x[:, :2], y, k)
    num_steps = model.eval().result.num_steps
    tree = model.variational_strategy.prior_distribution.lazy_covariance_matrix.graph.dissection
    work = gpu_counts.sparse_evidence(tree.work, tree.stored, num_steps)
    about = f"n = {n}, d = 2, logit, Laplace, {k} neighbours, {num_steps} Newton steps"
    return Job({OURS: (_evidence(model), 1)}, work, "evaluation", about)


def polya_gamma(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> Job:
    """Return draws of PG(1, z), z normal with standard deviation 3; neither gpytorch nor KeOps has any."""
    z = 3 * torch.randn(sizes.draws, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device)
    law, generator = PolyaGamma(torch.ones_like(z), z), torch.Generator(device).manual_seed(0)
    few = z[: max(len(z) // 20, 1)]
    calls: Calls = {
        OURS: (lambda: law.sample(generator=generator), len(z)),
        "sum of 200 gammas": (lambda: sum_of_gammas(few, generator), len(few)),
    }
    return Job(calls, gpu_counts.polya_gamma(), "draw", f"{len(z)} at once, z ~ N(0, 3^2)")


# ---- rows -----------------------------------------------------------------------------------------------------------

_JOBS: dict[str, tuple[Callable[[torch.device, Sizes, torch.dtype], Job], tuple[str, ...]]] = {
    "step": (step, ("float32", "float64")),
    "product": (products, ("float32", "float64")),
    "derivatives": (derivatives, ("float32", "float64")),
    "CG": (solve, ("float64",)),
    "Gibbs sweep": (gibbs, ("float64",)),
    "EP": (ep, ("float64",)),
    "evidence": (evidence, ("float64",)),
    "sparse evidence": (sparse_evidence, ("float64",)),
    "Polya-Gamma": (polya_gamma, ("float64",)),
}
JOBS = {f"{name} {dtype}": (make, dtype) for name, (make, dtypes) in _JOBS.items() for dtype in dtypes}
LIMITS = {f"limits {dtype}": dtype for dtype in ("float32", "float64")}


def measure(name: str, device: torch.device, sizes: Sizes) -> Row:
    """Return the row of one of `JOBS` or `LIMITS`."""
    if name in LIMITS:
        dtype = getattr(torch, LIMITS[name])
        return {
            "name": name,
            **limits(device, dtype, size=sizes.limit, copied=sizes.copied, most_seconds=sizes.seconds),
        }
    make, dtype = JOBS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)  # jitter of peers
        job = make(device, sizes, getattr(torch, dtype))
        found = in_turns(job.calls, device, most_seconds=sizes.seconds, first=OURS)
    about = {"name": name, "dtype": dtype, "about": job.about, "unit": job.unit, "products": job.products}
    return {**about, **asdict(job.work), **asdict(found)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=[*LIMITS, *JOBS])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", choices=list(SIZES), default="gpu")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    print(json.dumps(measure(options.name, torch.device(options.device), SIZES[options.sizes])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
