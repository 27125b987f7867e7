"""The benchmark of devices: its counts, its clock, its table, and its jobs on the simulated device."""

import json
import math
import os
import time

import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import gpu, gpu_counts, gpu_laws
from benchmarks.bounded import Ended, ended
from benchmarks.device_times import in_turns, limits
from benchmarks.gpu_jobs import JOBS, OURS, SIZES, classes, covariance_of, measure
from benchmarks.gpu_peers import gaussian_evidence, gpytorch_draw, variational_posterior
from benchmarks.step_time import floor_step, synthetic_problem
from gpext.inference import EP
from gpext.likelihoods import BernoulliLogitLikelihood
from tests.accelerator import DEVICE, IS_REAL, accelerated

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _same_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


# ---- counts ---------------------------------------------------------------------------------------------------------


class Counted:
    """A number that counts the operations it takes part in."""

    count = 0

    def __init__(self, value):
        self.value = value

    def _with(self, value):
        Counted.count += 1
        return Counted(value)

    def __add__(self, other):
        return self._with(self.value + other.value)

    def __sub__(self, other):
        return self._with(self.value - other.value)

    def __mul__(self, other):
        return self._with(self.value * other.value)

    def __truediv__(self, other):
        return self._with(self.value / other.value)

    def exp(self):
        return self._with(math.exp(self.value))

    def sqrt(self):
        return self._with(math.sqrt(self.value))


def counted(work):
    Counted.count = 0
    work()
    return Counted.count


def total(terms):
    first, *rest = terms
    for term in rest:
        first = first + term
    return first


def matrix(rows, columns):
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).tolist()
    return [[Counted(value) for value in row] for row in values]


def factor(A):
    """The Cholesky factor."""
    n = len(A)
    L = [[Counted(0.0)] * n for _ in range(n)]
    for j in range(n):
        for i in range(j, n):
            left = A[i][j]
            for k in range(j):
                left = left - L[i][k] * L[j][k]
            L[i][j] = left.sqrt() if i == j else left / L[j][j]
    return L


def inverse_of_triangle(L):
    n = len(L)
    for j in range(n):
        column = {j: Counted(1.0) / L[j][j]}
        for i in range(j + 1, n):
            column[i] = total([L[i][k] * column[k] for k in range(j, i)]) / L[i][i]


def test_products_count_what_a_plain_program_does():
    n, d, R = 5, 3, 2
    x, v = matrix(n, d), matrix(n, R)
    half = Counted(-0.5)

    def product():
        sums = [[Counted(0.0)] * R for _ in range(n)]
        for i in range(n):
            for j in range(i + 1):
                differences = [a - b for a, b in zip(x[i], x[j], strict=True)]
                k = (half * total([each * each for each in differences])).exp()
                for to, of in {(i, j), (j, i)}:
                    sums[to] = [s + k * each for s, each in zip(sums[to], v[of], strict=True)]

    assert counted(product) == gpu_counts.product(n, d, R, 8).flops


def test_derivatives_count_what_a_plain_program_does():
    n, d, R = 5, 3, 2
    x, u, v = matrix(n, d), matrix(n, R), matrix(n, R)
    half = Counted(-0.5)

    def derivatives():
        slopes = [[Counted(0.0)] * d for _ in range(n)]
        for i in range(n):
            for j in range(i):
                differences = [a - b for a, b in zip(x[i], x[j], strict=True)]
                k = (half * total([each * each for each in differences])).exp()
                pairs = [each for r in range(R) for each in (u[i][r] * v[j][r], v[i][r] * u[j][r])]
                weight = k * total(pairs)
                pulls = [weight * each for each in differences]
                slopes[i] = [s + each for s, each in zip(slopes[i], pulls, strict=True)]
                slopes[j] = [s - each for s, each in zip(slopes[j], pulls, strict=True)]

    assert counted(derivatives) == gpu_counts.derivatives(n, d, R, 8).flops


def test_factors_count_what_a_plain_program_does():
    n = 40
    A = [[Counted(2.0 * n if i == j else 1.0) for j in range(n)] for i in range(n)]
    assert counted(lambda: factor(A)) == pytest.approx(n**3 / 3, rel=0.1)
    L = factor(A)
    both = counted(lambda: factor(A)) + counted(lambda: inverse_of_triangle(L))
    assert both == pytest.approx(gpu_counts.ep(n, 1).flops, rel=0.1)
    assert gpu_counts.gibbs_sweep(n, 3).flops == pytest.approx(3 * (n**3 / 3 + 8 * n**2))


def test_products_of_a_step_are_those_that_torch_counts():
    M, B, d = 20, 50, 8
    problem = synthetic_problem("laplace", num_data=100, dimension=d, num_inducing=M)
    step = floor_step(problem, batch_size=B, dtype=torch.float64)
    with FlopCounterMode(display=False) as counter:
        step()
    of_solves_and_elements = 2 * M**2 * B + M**3 / 3 + 3 * M * B
    assert counter.get_total_flops() == pytest.approx(gpu_counts.step(M, B, d, 8).flops - of_solves_and_elements)


# ---- the clock ------------------------------------------------------------------------------------------------------


def test_turns_are_bounded_and_who_raises_is_left_out():
    calls = []

    def of(name, breaks_at=None):
        def call():
            calls.append(name)
            if calls.count(name) == breaks_at:
                raise ValueError("no more\nof this")

        return call, 2

    found = in_turns({"a": of("a"), "b": of("b", 3), "c": of("c")}, CPU, most_seconds=0.0)
    assert set(found.seconds) == {"a", "b", "c"}  # after two turns
    found = in_turns({"a": of("a"), "b": of("b", 3), "c": of("c")}, CPU, most_seconds=1000.0)
    assert found.errors == {"b": "ValueError: no more"}
    assert (set(found.seconds), found.rounds) == ({"a", "c"}, 50)
    with pytest.raises(ValueError, match="no more"):
        in_turns({"a": of("a", calls.count("a") + 1)}, CPU, most_seconds=0.0, first="a")


def test_limits_are_positive():
    assert all(
        0 < value < math.inf for value in limits(CPU, torch.float32, size=64, copied=2**16, most_seconds=0.01).values()
    )


# ---- its peers ------------------------------------------------------------------------------------------------------


def test_gpytorch_draws_f_given_the_same_sites():
    x, y = classes(3, CPU)
    covariance = covariance_of(x)
    draws = gpytorch_draw(x, y, 20_000)()
    posterior = torch.linalg.inv(torch.linalg.inv(covariance) + 0.25 * torch.eye(3).double())
    variance = posterior.diagonal()
    z = (draws.mean(0) - posterior @ (y - 0.5)) / (variance / len(draws)).sqrt()
    assert float(z.abs().max()) < 4.5
    z = (draws.T.cov() - posterior) / ((variance * variance[:, None] + posterior.square()) / len(draws)).sqrt()
    assert float(z.abs().max()) < 4.5


def test_the_bound_of_gpytorch_is_below_the_evidence_and_near():
    x, y = classes(20, CPU)
    covariance = covariance_of(x)
    bound = variational_posterior(x, y)
    evidence = EP().infer(MultivariateNormal(y.new_zeros(20), covariance), BernoulliLogitLikelihood(), y).log_evidence
    evidence = float(evidence)
    assert evidence - 0.5 < len(y) * bound < evidence


def test_the_evidence_of_gpytorch_is_a_normal_density():
    x, y = classes(20, CPU)
    value = gaussian_evidence(x, y)()
    noise = torch.nn.functional.softplus(torch.zeros(())).double() + 1e-4
    exact = MultivariateNormal(y.new_zeros(20), covariance_of(x) + noise * torch.eye(20).double()).log_prob(y)
    assert float(value) == pytest.approx(float(exact) / 20)


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.NumericalWarning")
@pytest.mark.parametrize("name", [name for name in JOBS if "float32" not in name])
def test_jobs_stay_on_their_device(name):
    with accelerated():
        row = measure(name, DEVICE, SIZES["quick"])
    assert row["errors"] == {}


def test_it_runs_and_goes_on_where_it_stopped(tmp_path, capsys, monkeypatch):
    output = tmp_path / "rows.jsonl"
    arguments = ["--device", "cpu", "--quick", "--output", str(output)]
    make, dtype = JOBS["EP float64"]

    def fails(*_):
        raise ModuleNotFoundError("No module named 'pykeops'")

    monkeypatch.setitem(JOBS, "EP float64", (fails, dtype))
    assert gpu.main(arguments) == 1
    table = capsys.readouterr().out
    assert "**no result**: ModuleNotFoundError: No module named 'pykeops'" in table
    monkeypatch.setattr(gpu, "measure", lambda name, *_: measure(name, CPU, SIZES["quick"]) if "EP" in name else None)
    monkeypatch.setitem(JOBS, "EP float64", (make, dtype))
    assert gpu.main(arguments) == 0  # nothing else remains to be done
    rows = [json.loads(line) for line in output.read_text().splitlines()[1:]]
    assert len(rows) == len(JOBS) + 2 + 1
    assert all(row["seconds"][OURS] > 0 for row in rows if "seconds" in row)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("Limits in float32: ")
    assert len(lines) == 3 + 1 + 2 + len(JOBS)
    assert "no result" not in "".join(lines)


def test_a_job_has_a_process_of_its_own_that_may_fail_or_hang(monkeypatch):
    row = gpu.apart("limits float32", "cpu", "quick", 1, 300.0)
    assert row["flops"] > 0
    for status, expected in (
        (1, "RuntimeError: no kernel image (exit status 1)"),
        (None, "ended after 60 s without a"),
    ):
        monkeypatch.setattr(
            gpu, "ended", lambda *_, status=status, **__: Ended(status, "", "a\nRuntimeError: no kernel image")
        )
        assert gpu.apart("limits float32", "cpu", "quick", 1, 60.0)["error"].startswith(expected)


@pytest.mark.skipif(os.name != "posix", reason="has no sh")
def test_programs_end_with_those_they_have_started(tmp_path):
    begun = time.monotonic()
    found = ended(["sh", "-c", "echo before; sleep 600 & wait"], 1.0, folder=tmp_path, environment=os.environ)
    assert (found.status, found.stdout) == (None, "before\n")
    assert time.monotonic() - begun < 300


@pytest.mark.skipif(IS_REAL, reason="has a GPU")
def test_it_says_what_to_do_without_a_card(capsys):
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "torch sees no CUDA device here. The rehearsal without one is --device cpu." in capsys.readouterr().err


def test_laws_are_counted_also_when_their_time_is_over(tmp_path, monkeypatch):
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('k', ['a b', 'c'])\n"
        "def test_it(k): assert k == 'c'\n"
        "@pytest.mark.skip\n"
        "def test_skipped(): pass\n"
        "def test_of_a_fixture(missing): pass\n"
    )
    found = gpu_laws.run(["test_some.py"], on_cuda=False, most_seconds=60.0, root=tmp_path)
    assert (found["passed"], found["failed"], found["skipped"], found["note"]) == (1, 2, 1, "")
    assert found["failures"] == ["test_some.py::test_it[a b]", "test_some.py::test_of_a_fixture"]
    assert "failed: test_some.py::test_it[a b]" in gpu_laws.summary(found)
    text = "test_some.py::test_it[a b] PASSED [ 50%]\ntest_some.py::test_it[c] "
    monkeypatch.setattr(gpu_laws, "ended", lambda *_, **__: Ended(None, text, ""))
    found = gpu_laws.run(["test_some.py"], on_cuda=False, most_seconds=4.0, root=tmp_path)
    assert (found["passed"], found["note"]) == (1, "ended after 4 s, before the last of them")
    found = gpu_laws.run(["tests/nowhere.py"], on_cuda=False, most_seconds=1.0, root=tmp_path)
    assert "there is no tests/nowhere.py" in found["note"]


def test_the_laws_are_there():
    for law in gpu_laws.LAWS:
        path, _, name = law.partition("::")
        assert f"def {name}(" in (gpu_laws.ROOT / path).read_text() or not name
