"""Training over several ranks, against training by one process that has all the data."""

import os
import re
import signal
from pathlib import Path

import gpytorch
import pytest
import torch
from gpytorch.mlls import VariationalELBO

import gpext
from gpext import designs
from gpext.training import minibatch
from gpext.training.minibatch import Minibatches
from tests.members import F64
from tests.parallel.processes import run
from tests.sparse_models import SparseGP, inputs
from tests.variational.test_linear_mixing import LMC, ONE, TASKS, X

pytestmark = pytest.mark.slow

SIZES = {2: (36, 24), 4: (7, 23, 10, 20)}  # of the shards


def problem(seed=1):
    x = inputs(60, 2, seed=2)
    y = torch.sin(2 * x.sum(-1)) + 0.1 * torch.randn(60, generator=torch.Generator().manual_seed(3), dtype=F64)
    model = SparseGP(inputs(6, 2, seed=seed))
    likelihood = gpext.likelihoods.StudentTLikelihood().to(F64)
    return gpext.mlls.AugmentedELBO(likelihood, model, num_data=60), x, y


def numbers(mll, result):
    return [result.trace.double(), torch.tensor(result.objective), *(p.detach() for p in mll.parameters())]


def full_batch(rows=slice(None), seed=1):
    mll, x, y = problem(seed)
    return numbers(mll, gpext.fit(mll, x[rows], y[rows], max_steps=15, progress=False))


def _full_batch_of_rank(rank, size):
    return full_batch(torch.arange(60).split(SIZES[size])[rank], seed=1 + rank)  # rank 0's start counts


@pytest.mark.parametrize("size", SIZES)
def test_the_full_batch(size):
    expected = full_batch()
    for found, error in run(_full_batch_of_rank, size, size):
        assert error is None
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def sums_of_values(rows=slice(None)):
    """Counts that depend on sums over two or three latent values."""
    x = inputs(60, 2, seed=2)
    design = designs.sums(torch.arange(60) // 3 + (torch.arange(60) % 7 == 0)).take(rows)
    y = (torch.arange(20) * 7 % 5).double()[rows]
    likelihood = gpext.likelihoods.PoissonLikelihood().to(F64)
    mll = VariationalELBO(likelihood, SparseGP(inputs(6, 2, seed=1)), num_data=20)
    return numbers(mll, gpext.fit(mll, x, y, design=design, max_steps=15, progress=False))


def mixed_latents(rows=slice(None)):
    """One of three tasks at each input, linear combinations of two latents."""
    model, y, tasks = LMC(), ONE.double()[rows], TASKS[rows]
    mll = VariationalELBO(gpext.likelihoods.PoissonLikelihood().to(F64), model, num_data=20)
    return numbers(mll, gpext.fit(mll, X[rows], y, task_indices=tasks, max_steps=15, progress=False))


OF_ROWS = {"design": sums_of_values, "mixing": mixed_latents}


def _part_of_rank(rank, case):
    return OF_ROWS[case](torch.arange(20).split((12, 8))[rank])


@pytest.mark.parametrize("case", OF_ROWS)
def test_designs_and_linear_mixing(case):
    expected = OF_ROWS[case]()
    for found, error in run(_part_of_rank, 2, case):
        assert error is None
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def growing(rows=slice(None)):
    """The two states before hyperparameters are learned, for a subset and for all the data."""
    x = inputs(2500, 2, seed=2)
    y = torch.sin(2 * x.sum(-1)) + 0.1 * torch.randn(2500, generator=torch.Generator().manual_seed(3), dtype=F64)
    likelihood = gpext.likelihoods.LaplaceLikelihood().to(F64)
    mll = gpext.mlls.AugmentedELBO(likelihood, SparseGP(inputs(6, 2, seed=1)), num_data=2500)
    return numbers(mll, gpext.fit(mll, x[rows], y[rows], max_steps=2, tolerance=1e-9, progress=False))


def _growing_of_rank(rank):
    return growing(torch.arange(2500).split((1000, 1500))[rank])


def test_a_subset_is_a_share_of_what_each_rank_holds():
    _, *expected = growing()
    (first, error), (second, other_error) = run(_growing_of_rank, 2)
    assert error is other_error is None
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(first[1:], expected, strict=True):  # the first subset has other data
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


class Together(Minibatches):
    """The minibatches of several ranks with equal shards, drawn by one process."""

    size = 2

    def __init__(self, num_data, batch_size, generator):
        seeds = [torch.Generator().manual_seed(0) for _ in range(self.size)]
        share, own = num_data // self.size, batch_size // self.size
        self.ranks = [Minibatches(share, own, seed) for seed in seeds]
        super().__init__(num_data, batch_size, generator)

    def _start_epoch(self):
        super()._start_epoch()
        if self.num_drawn > 0:
            for each in self.ranks:
                each._start_epoch()

    def of_epoch(self, start, stop):
        parts = [(rank, each, i) for i in range(start, stop) for rank, each in enumerate(self.ranks)]
        return torch.cat([each.of_epoch(i, i + 1) + rank * each.num_data for rank, each, i in parts])


def minibatches(rows=slice(None), max_steps=200, **more):
    mll, x, y = problem()
    result = gpext.fit(mll, x[rows], y[rows], batch_size=20, max_steps=max_steps, tolerance=0.0, progress=False, **more)
    return [*numbers(mll, result), torch.tensor(result.num_steps)]


def _minibatches_of_rank(rank, size):
    return minibatches(torch.arange(60).chunk(size)[rank])


@pytest.mark.parametrize("size", [2, 4])
def test_two_hundred_steps_by_minibatches(size, monkeypatch):
    monkeypatch.setattr(minibatch, "Minibatches", Together)
    monkeypatch.setattr(Together, "size", size)
    expected = minibatches()
    for found, error in run(_minibatches_of_rank, size, size):
        assert error is None
        assert int(found[-1]) == 200
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def _alone(rank):
    assert torch.distributed.get_world_size() == 1
    return minibatches(max_steps=10)


def test_a_world_of_one_is_no_world():
    ((found, error),) = run(_alone, 1)
    assert error is None
    for a, b in zip(found, minibatches(max_steps=10), strict=True):
        assert torch.equal(a, b)


def _with(rank, fault):
    mll, x, y = problem()
    rows = torch.arange(60).chunk(2)[rank]
    callback = None
    if fault == "stops" and rank == 1:

        def callback(step, value):
            return step == 3

    if fault.endswith("interrupts") and rank == 1:

        def callback(step, value):
            if step == 3:
                os.kill(os.getpid(), signal.SIGINT)

    if fault in ("raises", "full batch raises") and rank == 1:

        def callback(step, value):
            if step == 3:
                raise ZeroDivisionError("of the callback")

    if fault == "dies" and rank == 1:

        def callback(step, value):
            if step == 3:
                os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        rows = rows[:0] if fault == "empty" else rows
        mll, x, y = (mll.float(), x.float(), y.float()) if fault == "dtype" else (mll, x, y)
        mll.likelihood = gpext.likelihoods.LaplaceLikelihood().to(F64) if fault == "model" else mll.likelihood
        x = x.where(x != x[rows[:1]], torch.nan) if fault == "nan" else x
    options = {"learning_rate": 0.1 if fault == "options" and rank == 1 else 0.05}
    if rank == 1 and fault == "kernel":
        mll.model.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5)).to(F64)
    elif fault == "kernel":
        mll.model.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5)).to(F64)
    if rank == 1 and fault == "frozen":
        mll.model.covar_module.requires_grad_(False)
    if rank == 1 and fault == "hyperparameters":
        options["hyperparameters"] = "augmented"
    if rank == 1 and fault == "rate":
        options["rate"] = 0.5
    if rank == 1 and fault == "num_data":
        mll.num_data = 59
    if fault == "objective":
        mll = gpytorch.mlls.VariationalELBO(gpytorch.likelihoods.StudentTLikelihood().to(F64), mll.model, num_data=60)
    result = gpext.fit(
        mll,
        x[rows],
        y[rows],
        batch_size=None if fault.startswith("full batch") else 20,
        max_steps=50,
        tolerance=0.0,
        progress=False,
        callback=callback,
        **options,
    )
    return f"{result.status.name} after {result.num_steps}"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("empty", "expected inputs"),
        ("dtype", "expected the same model on every rank"),
        ("model", "expected the same model on every rank"),
        ("options", "expected the same options on every rank"),
        ("nan", "inputs"),
        ("kernel", "expected the same model on every rank; rank 0 has model.covar_module.base_kernel.nu = 2.5, rank 1"),
        ("frozen", "expected the same model on every rank; rank 0 has model.covar_module"),
        ("hyperparameters", "expected the same options on every rank; rank 0 has hyperparameters='exact', rank 1"),
        ("num_data", "the objective has num_data = 59, and there are 60 data, 30 of them here. Make it with"),
        ("objective", "only models with a SiteVariationalStrategy"),
    ],
)
def test_a_fault_of_one_rank_is_an_error_on_all(fault, message):
    for value, error in run(_with, 2, fault):
        assert value is None
        assert error.startswith(f"ValueError: {message}")


@pytest.mark.parametrize("fault", ["raises", "full batch raises"])
def test_what_a_callback_raises_is_raised_on_all(fault):
    for value, error in run(_with, 2, fault):
        assert value is None
        assert error.startswith("ZeroDivisionError: of the callback, from RankError: this failed on rank 1 of 2")


def test_ranks_whose_steps_in_q_differ_are_told_so():
    for value, error in run(_with, 2, "rate"):
        assert value is None
        assert re.match(r"RankError: rank . of 2 was about to sum \d+ numbers of an update of q\(u\), rate=", error)


@pytest.mark.parametrize(
    ("what", "status"),
    [("stops", "STOPPED"), ("interrupts", "INTERRUPTED"), ("full batch interrupts", "INTERRUPTED")],
)
def test_all_stop_where_one_does(what, status):
    assert [value for value, _ in run(_with, 2, what)] == [f"{status} after 3"] * 2


def test_a_rank_that_dies_leaves_no_other_waiting():
    (_, error), killed = run(_with, 2, "dies", timeout=20.0)
    assert killed is None
    assert error.startswith("RankError: rank 0 of 2 has lost another one")


def _of_the_tour(rank, folder):
    tour = (Path(__file__).resolve().parents[2] / "docs/tour.md").read_text(encoding="utf-8")
    diffs = re.findall(r"^```diff\n(.*?)^```$", tour, flags=re.DOTALL | re.MULTILINE)
    (diff,) = [each for each in diffs if "init_process_group" in each]
    start, *lines = [line[1:] for line in diff.splitlines() if not line.startswith("-")]
    assert start.startswith("torch.distributed.init_process_group(")  # as these processes have done
    mll, x, y = problem()
    names = {
        "gpext": gpext,
        "torch": torch,
        "likelihood": mll.likelihood,
        "model": mll.model,
        "train_x": x,
        "train_y": y,
    }
    os.chdir(folder)
    exec(compile("\n".join(lines), "tour", "exec"), names)
    return numbers(names["mll"], names["result"]), len(names["train_x"]), os.listdir("checkpoints")


def test_what_the_tour_shows(tmp_path):
    outcomes = run(_of_the_tour, 2, str(tmp_path))
    assert [error for _, error in outcomes] == [None, None]
    (first, size, files), (second, *_) = (value for value, _ in outcomes)
    assert size == 30
    assert files == ["fit.pt"]
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
