"""Small problems run on one thread, large ones on the user's threads, whose number is restored afterwards."""

import os
import subprocess
import sys
import threading
import warnings

import gpytorch
import pytest
import threadpoolctl
import torch
from gpytorch.distributions import MultivariateNormal

from gpext import fit
from gpext.callers import warn_caller
from gpext.inference import CAVI, EP, KL, Laplace, Taylor
from gpext.likelihoods import BernoulliLogitLikelihood
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.models import LatentGP
from gpext.optim import minimize_lbfgs
from gpext.ppl import GibbsKernel, latent_gp, observe
from gpext.samplers import GibbsSampler, MetropolisHastings
from gpext.threads import SMALL, _of_torch, factor_flops, one_thread_of_numpy, threads_for
from gpext.variational import SiteVariationalStrategy
from tests.members import F64

USERS = 3
SMALL_SIZE, LARGE_SIZE = 25, 150


@pytest.fixture(autouse=True)
def users_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(USERS)
    yield
    found = torch.get_num_threads()
    torch.set_num_threads(before)
    assert found == USERS


@pytest.fixture
def seen(monkeypatch):
    """The numbers of threads under which matrices are factorised."""
    numbers, factorise = set(), torch.linalg.cholesky_ex

    def watched(*args, **kwargs):
        numbers.add(torch.get_num_threads())
        return factorise(*args, **kwargs)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", watched)
    return numbers


def problem(size):
    x = torch.linspace(0, 4, size, dtype=F64)
    covariance = (-0.5 * (x.unsqueeze(-1) - x).square()).exp() + 1e-3 * torch.eye(size, dtype=F64)
    return MultivariateNormal(torch.zeros_like(x), covariance), (torch.sin(3 * x) > 0).to(F64)


class Model(LatentGP):
    def __init__(self, size):
        y = problem(size)[1]
        super().__init__(torch.linspace(0, 4, size, dtype=F64), y, BernoulliLogitLikelihood(), Laplace())
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.RBFKernel().to(F64)
        self.seen, self.breaks = set(), False

    def forward(self, x):
        self.seen.add(torch.get_num_threads())
        if self.breaks:
            raise RuntimeError("broken")
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Regression(gpytorch.models.ExactGP):
    def __init__(self, size):
        super().__init__(torch.linspace(0, 4, size), problem(size)[1], gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.RBFKernel()

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def expected(size):
    return {1 if size == SMALL_SIZE else USERS}


# ---- the block -----------------------------------------------------------------------------------------------------


def test_a_small_block_runs_on_one_thread():
    with threads_for(SMALL):
        assert torch.get_num_threads() == 1


def test_a_large_block_keeps_the_threads():
    with threads_for(1.001 * SMALL):
        assert torch.get_num_threads() == USERS


def test_blocks_are_nested_and_each_restores_what_it_met():
    with threads_for(1.0):
        with threads_for(2 * SMALL):
            assert torch.get_num_threads() == 1  # the outer block has decided
        with threads_for(1.0):
            pass
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == USERS


def test_it_restores_after_an_exception():
    with pytest.raises(KeyboardInterrupt), threads_for(1.0):
        raise KeyboardInterrupt
    assert torch.get_num_threads() == USERS


def test_one_thread_is_left_alone(monkeypatch):
    torch.set_num_threads(1)
    with monkeypatch.context() as patch:
        patch.setattr("gpext.threads._set_number", lambda *numbers: pytest.fail("nothing has to change"))
        with threads_for(1.0):
            pass
    torch.set_num_threads(USERS)


def test_another_python_thread_at_work_keeps_its_own():
    begun, inside, numbers = threading.Event(), threading.Event(), []

    def other():
        torch.set_num_threads(2)
        torch.get_num_threads()  # fixes the number
        begun.set()
        inside.wait(10)
        numbers.append(torch.get_num_threads())

    thread = threading.Thread(target=other)
    thread.start()
    begun.wait(10)
    with threads_for(1.0):
        inside.set()
        thread.join()
    assert numbers == [2]
    assert torch.get_num_threads() == USERS


def test_mkl_keeps_the_number_it_had():
    of_mkl = _of_torch("MKL_Set_Num_Threads_Local")
    if of_mkl is None:
        pytest.skip("torch runs on another library")
    for number in (0, 2):  # its default, and one of the user's
        before = of_mkl(number)
        with threads_for(1.0):
            assert of_mkl(1) == 1
        assert of_mkl(before) == number


PROCESS = """
import threading
import torch
A = torch.randn(3, 256, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
A = A @ A.mT + 256 * torch.eye(256)
exact = 2 * torch.linalg.cholesky(A).diagonal(dim1=-2, dim2=-1).log().sum(-1)
{work}
torch.testing.assert_close(torch.linalg.slogdet(A).logabsdet, exact)
numbers = []
thread = threading.Thread(target=lambda: numbers.append(torch.get_num_threads()))
thread.start()
thread.join()
assert [torch.get_num_threads(), *numbers] == [2, 2], numbers
"""
WORK = {
    "a small block": """
from gpext.threads import threads_for
with threads_for(1.0):
    torch.linalg.cholesky(A)
""",
    "threads over tiles": """
from gpext.operators.tiles import shared_out
shared_out(lambda starts: torch.linalg.cholesky(A), [0, 1], 10**9, torch.device("cpu"))
""",
}


@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_a_process_is_left_as_it_was(work):
    """LU factors of a batch would be wrong if `torch.set_num_threads` had been called."""
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    program = PROCESS.format(work=work)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_flops_of_factors():
    assert factor_flops(30) == 9000
    assert factor_flops(3, rows=100, number=2) == 600


# ---- callers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [SMALL_SIZE, LARGE_SIZE])
@pytest.mark.parametrize("rule", [Taylor(), Laplace(), KL(), CAVI(), EP()], ids=lambda rule: type(rule).__name__)
def test_rules(rule, size, seen):
    prior, y = problem(size)
    rule.infer(prior, BernoulliLogitLikelihood(), y)
    assert seen == expected(size)


def test_a_rule_restores_after_an_exception():
    prior, y = problem(SMALL_SIZE)
    with pytest.raises(ValueError, match="targets"):
        Laplace().infer(prior=prior, likelihood=BernoulliLogitLikelihood(), targets=y + 0.5)
    with pytest.raises(TypeError, match="prior"):
        Laplace().infer()


def test_a_batch_counts_as_a_whole(seen):
    prior, y = problem(SMALL_SIZE)
    Laplace().infer(prior.expand(torch.Size([200])), BernoulliLogitLikelihood(), y)
    assert seen == {USERS}


@pytest.mark.parametrize(("size", "chains"), [(SMALL_SIZE, 1), (SMALL_SIZE, 4), (LARGE_SIZE, 1), (100, 4)])
def test_gibbs_sampler(size, chains, seen):
    prior, y = problem(size)
    GibbsSampler(prior, BernoulliLogitLikelihood(), y).run(3, chains, warmup=2, progress=False)
    assert seen == expected(size)


def test_gibbs_sampler_restores_after_an_exception(monkeypatch):
    prior, y = problem(SMALL_SIZE)
    sampler = GibbsSampler(prior, BernoulliLogitLikelihood(), y)

    def broken(*args):
        assert torch.get_num_threads() == 1
        raise RuntimeError("broken")

    monkeypatch.setattr(sampler, "step", broken)
    with pytest.raises(RuntimeError, match="broken"):
        sampler.run(3, 1, progress=False)
    assert torch.get_num_threads() == USERS


@pytest.mark.parametrize("size", [SMALL_SIZE, LARGE_SIZE])
def test_metropolis_hastings(size, seen):
    model = Regression(size)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    MetropolisHastings(mll).run(2, 1, warmup=1, progress=False)
    assert seen == expected(size)


@pytest.mark.parametrize("size", [SMALL_SIZE, LARGE_SIZE])
def test_fit(size):
    model = Model(size)
    fit(LatentMarginalLogLikelihood(model.likelihood, model), *model.train_inputs, model.train_targets, max_steps=2)
    assert model.seen == expected(size)


def test_fit_restores_after_an_exception():
    model = Model(SMALL_SIZE)
    model.breaks = True
    with pytest.raises(RuntimeError, match="broken"):
        fit(LatentMarginalLogLikelihood(model.likelihood, model), *model.train_inputs, model.train_targets)
    assert model.seen == {1}


@pytest.mark.parametrize("size", [SMALL_SIZE, LARGE_SIZE])
def test_gibbs_within_pyro(size, seen):
    prior, y = problem(size)
    likelihood = BernoulliLogitLikelihood()

    def program():
        observe("y", likelihood, latent_gp("f", prior), y)

    kernel = GibbsKernel(program)
    kernel.setup(0)
    params = kernel.initial_params
    seen.clear()
    kernel.sample(params)
    assert seen == expected(size)


class Sparse(gpytorch.models.ApproximateGP):
    """Three latents of so many inducing points that LU factors of a batch err, now that a number has been set."""

    def __init__(self):
        points = torch.linspace(0, 1, 160, dtype=F64).unsqueeze(-1).expand(3, -1, -1)
        super().__init__(SiteVariationalStrategy(self, points))
        self.mean_module = gpytorch.means.ZeroMean(batch_shape=torch.Size([3]))
        self.covar_module = gpytorch.kernels.MaternKernel(0.5, batch_shape=torch.Size([3])).to(F64)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


@pytest.mark.parametrize(
    "begin",
    [lambda model: model(torch.zeros(1, 1, dtype=F64)), lambda model: model.variational_strategy.posterior()],
    ids=["call", "posterior"],
)
def test_many_latents_begin_at_the_prior(begin):
    model = Sparse()
    begin(model)
    precision = -2 * model.variational_strategy._variational_distribution.natural_mat
    assert torch.equal(precision, torch.eye(160, dtype=F64).expand(3, -1, -1))


# ---- warnings point at the caller ----------------------------------------------------------------------------------


def test_a_warning_points_at_this_file_through_decorators():
    @torch.no_grad()
    def between():
        warn_caller("here", UserWarning)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        between()
    assert caught[0].filename == __file__


@pytest.fixture
def blas_threads():
    """The numbers of threads of NumPy's and SciPy's own libraries, which the user has set to two."""
    import scipy.linalg  # noqa: F401

    def numbers():
        found = threadpoolctl.threadpool_info()
        return {each["num_threads"] for each in found if any(part in each["filepath"] for part in ("numpy", "scipy"))}

    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        if not numbers():
            pytest.skip("NumPy has no BLAS of its own here")
        yield numbers
        assert numbers() == {2}


def test_lbfgs_runs_numpy_on_one_thread(blas_threads):
    seen, p = set(), torch.nn.Parameter(torch.ones(2, dtype=F64))

    def objective():
        seen.update(blas_threads())
        value = p.square().sum()
        value.backward()
        return value.detach()

    minimize_lbfgs(objective, [p], max_steps=5, tolerance=1e-6)
    assert seen == {1}
    assert torch.get_num_threads() == USERS


def test_numpys_number_is_restored_after_nested_blocks(blas_threads):
    with one_thread_of_numpy():
        with one_thread_of_numpy():
            assert blas_threads() == {1}
        assert blas_threads() == {1}
    assert blas_threads() == {2}


def test_numpys_number_is_restored_after_several_python_threads(blas_threads):
    inside, may_end = threading.Event(), threading.Event()

    def other():
        with one_thread_of_numpy():
            inside.set()
            may_end.wait(10)

    thread = threading.Thread(target=other)
    with one_thread_of_numpy():
        thread.start()
        assert inside.wait(10)
        assert blas_threads() == {1}
    may_end.set()
    thread.join()
    assert blas_threads() == {2}
