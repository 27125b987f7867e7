"""Products whose tiles are divided among ranks, solves and draws with them, against those of one process."""

import os
import re
import signal

import gpytorch
import pytest
import torch

from gpext import files
from gpext.files import save
from gpext.kernels import keops
from gpext.mlls import UnbiasedMarginalLogLikelihood
from gpext.operators import UnbiasedSolver, compiled_tiles, tiles
from gpext.optim import SGLD
from gpext.parallel import Ranks
from gpext.samplers import SGLDSampler, draw_files
from gpext.solvers import conjugate_gradients
from tests.members import F64
from tests.parallel.processes import run

pytestmark = pytest.mark.slow

N = 300


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y):
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module = gpytorch.means.ConstantMean()
        smooth = gpytorch.kernels.ScaleKernel(keops.RBFKernel(ard_num_dims=2, backend="tiles"))
        self.covar_module = smooth + keops.MaternKernel(nu=1.5, backend="tiles")
        self.to(F64)
        self.likelihood.noise = 0.2

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def shared_sampler(ranks=None, n=60):
    """SGLD whose gradients use products of lazy kernels, also at this size."""
    with gpytorch.settings.max_cholesky_size(10):
        made = SGLDSampler(_mll(n, ranks), ["likelihood.noise_covar.noise", "covar_module.kernels.0.outputscale"])
    gradient = made.target.gradient

    def lazily(*args, **kwargs):
        with gpytorch.settings.max_cholesky_size(10):
            return gradient(*args, **kwargs)

    made.target.gradient = lazily
    return made


def results(ranks=None):
    """Products, a solve, a stochastic gradient and draws, lazily also at this size."""
    with gpytorch.settings.max_cholesky_size(10):
        return _results(ranks)


def _mll(n, ranks):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, 2, generator=generator, dtype=F64)
    y = torch.sin(4 * x.sum(-1)) + 0.3 * torch.randn(n, generator=generator, dtype=F64)
    model = Model(x, y)
    if ranks is not None:
        keops.share_products(model, ranks)
    solver = UnbiasedSolver(generator=torch.Generator().manual_seed(1))
    return UnbiasedMarginalLogLikelihood(model.likelihood, model, solver=solver)


def _results(ranks):
    mll = _mll(N, ranks)
    model = mll.model
    (x,), y = model.train_inputs, model.train_targets
    kernel = model.covar_module
    before = 0 if ranks is None else ranks.traffic.numbers
    K = kernel(x).evaluate_kernel()
    with torch.no_grad():
        product = K @ y
        per_product = (ranks.traffic.numbers - before if ranks is not None else 0, 2 * (N + 10))  # two kernels
        solution = conjugate_gradients(lambda v: K._matmul(v) + 0.2 * v, y, tolerance=1e-10).solution
    (-mll(model(x), y)).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    optimizer = SGLD(list(model.parameters()), lr=1e-3, generator=torch.Generator().manual_seed(2))
    for _ in range(5):
        optimizer.zero_grad()
        (-N * mll(model(x), y)).backward()
        optimizer.step()
    draws = torch.cat([p.detach().flatten() for p in model.parameters()])
    return [product, solution, gradient, draws], per_product


def _of_rank(rank):
    return results(Ranks())


@pytest.mark.parametrize("size", [2, 4])
def test_everything_is_as_in_one_process(size):
    expected, _ = results()
    for (found, (numbers, bound)), error in run(_of_rank, size):
        assert error is None
        assert numbers <= bound
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def _solve(rank, fault, where):
    """A product, or a solve by many, with a fault on rank 1."""
    ranks, taken = Ranks(), []
    mll = _mll(N, ranks)
    (x,), y = mll.model.train_inputs, mll.model.train_targets
    if rank == 1 and fault == "inputs":
        x = x.where(torch.arange(N).unsqueeze(-1) != 3, torch.nan)
    if rank == 1 and fault in ("nan", "other"):
        y = y.where(torch.arange(N) != 3, torch.nan) if fault == "nan" else y.flip(0) * 1.5
    if rank == 1 and fault == "order":
        x, y = x.flip(0), y.flip(0)
    if rank == 1 and fault == "kernel":
        mll.model.covar_module.kernels[1].nu = 2.5
    if rank == 1 and fault == "dtype":
        mll.model.float()
        x, y = x.float(), y.float()
    product = tiles.product

    def disturbed(*args):
        taken.append(1)
        if rank == 1 and len(taken) == (2 if where == "product" else 9):
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "memory":
                raise MemoryError("no more")
        return product(*args)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), gpytorch.settings.max_cholesky_size(10):
        patch.setattr(compiled_tiles, "serves", lambda factors: False)
        patch.setattr(tiles, "product", disturbed)
        K = mll.model.covar_module(x).evaluate_kernel()
        if where == "product":
            return K @ y
        return conjugate_gradients(lambda v: K._matmul(v) + 0.01 * v, y, tolerance=1e-10).solution


@pytest.mark.parametrize("where", ["product", "solve"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("kill", "RankError: rank 0 of 2 has lost another one"),
        ("memory", "MemoryError: no more, from RankError: this failed on rank 1"),
        ("nan", "ValueError: expected the same inputs and vectors on every rank"),
        ("inputs", "ValueError: inputs must be finite"),
        ("other", "ValueError: expected the same inputs and vectors on every rank"),
        ("order", "ValueError: expected the same inputs and vectors on every rank"),
        ("kernel", "RankError: rank 0 of 2 was about to sum 300 numbers of matern32, torch.float64, by tiles"),
        ("dtype", "RankError: rank 0 of 2 was about to sum 300 numbers of rbf, torch.float64, by tiles"),
    ],
)
def test_a_fault_of_one_rank_is_an_error_on_all(fault, message, where):
    (_, first), second = run(_solve, 2, fault, where, timeout=20.0)
    if (fault, where) == ("nan", "solve"):  # the solver has rejected it before any product
        assert first.startswith("RankError: rank 0 of 2 has lost another one")
        assert second[1].startswith("ValueError: ")
        return
    assert first.startswith(message)
    assert second is None if fault == "kill" else second[1].startswith(message[:11])


def _by_other_routes(rank):
    """The program and torch's tiles divide a matrix differently."""
    model = _mll(N, Ranks()).model
    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), gpytorch.settings.max_cholesky_size(10):
        patch.setattr(compiled_tiles, "serves", lambda factors: rank == 0)
        return model.covar_module(*model.train_inputs).evaluate_kernel() @ model.train_targets


def test_ranks_that_make_products_in_other_ways_are_told_so():
    for _, error in run(_by_other_routes, 2):
        assert "of 2 was about to sum 300 numbers of rbf, torch.float64, by " in error


def _with_own_kernels(rank, fault):
    model = _mll(N, None).model
    if rank == 1 and fault == "none":
        model.covar_module = gpytorch.kernels.RBFKernel()
    elif rank == 1:
        model.covar_module.kernels[1].backend = "dense"
    keops.share_products(model, Ranks())


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("backend", r"ValueError: expected the same kernels on every rank; rank 0 has .*, tiles\), rank 1 .*, dense\)"),
        ("none", "ValueError: expected kernels of gpext.kernels.keops in Model; found none"),
    ],
)
def test_kernels_that_differ_are_refused_where_they_are_shared_out(fault, message):
    for _, error in run(_with_own_kernels, 2, fault):
        assert re.match(message, error)


def _drawn(rank, folder):
    """Draws with a checkpoint a step, how many were written by this rank, and more of them."""
    written = []

    def counted(content, path):
        written.append(path)
        return save(content, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.Pace, "is_due", lambda *_: True)
        patch.setattr(draw_files, "save", counted)
        made, options = shared_sampler(Ranks()), {"progress": False, "checkpoint": folder}
        generator = torch.Generator().manual_seed(rank)  # that of rank 0 counts
        made.run(2, 2, 1, step_size=0.1, generator=generator, **options)
        found = shared_sampler(Ranks()).load(folder)
        return made.run(1, resume=found, **options).raw, len(written)


def test_ranks_that_share_products_draw_the_same_and_one_writes(tmp_path):
    expected = shared_sampler().run(3, 2, 1, step_size=0.1, generator=torch.Generator().manual_seed(0), progress=False)
    outcomes = run(_drawn, 2, str(tmp_path))
    assert [error for _, error in outcomes] == [None, None]
    (first, some), (second, none) = (value for value, _ in outcomes)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, expected.raw, rtol=1e-8, atol=1e-8)
    assert (some > 3, none) == (True, 0)
    files = [*(f"draws-{start:09d}.pt" for start in range(3)), "state.pt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == files


def _both(rank):
    shared_sampler(Ranks()).run(2, 2, 1, step_size=0.1, progress=False, ranks=Ranks())


def test_chains_are_spread_or_products_shared():
    for _, error in run(_both, 2):
        assert error.startswith("ValueError: expected either chains spread over ranks or products of kernels shared")
