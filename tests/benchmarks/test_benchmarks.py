"""The benchmark harness on tiny problems: its measurements are right, and it resumes after an interruption."""

import gzip
import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.integrate import quad

from benchmarks import (
    augmented_svi,
    collapsed_step,
    datasets,
    ep_convergence,
    ep_existence,
    ep_walk,
    first_states,
    mixing_draws,
    outliers_found,
    step_time,
)
from benchmarks.datasets import load, raw_table
from benchmarks.ep_map import grid, kind_of
from benchmarks.ep_problems import EXAMPLES, FAMILIES, StudentTProblem, random_problem, student_t
from benchmarks.ep_references import anneal, conditionals, plain_parallel
from benchmarks.ep_report import honest
from benchmarks.harness import LIKELIHOODS, Recorder, Status, Trace, evaluate, make_problem, minibatches, train
from benchmarks.methods import METHODS
from benchmarks.peers import Matern32Distribution
from benchmarks.scoring import conditional, log_predictive_density
from tests.seeds import as_written

pytestmark = pytest.mark.slow


def tiny_problem(likelihood):
    dataset = "synthetic_binary" if likelihood == "logit" else "synthetic_regression"
    return make_problem(dataset, likelihood, seed=0, num_inducing=10, max_train=200)


# ---- scoring -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize(
    ("mean", "sd", "noise", "target"),
    [
        (0.3, 1.0, 0.1, 0.5),
        (-1.0, 0.02, 1.0, 0.0),
        (0.0, 2.0, 1e-4, 1.0),
        (0.4, 0.1, 0.04, 8.0),
        (30.0, 10.0, 4.0, 0.0),
    ],
)
def test_log_density_agrees_with_scipy(likelihood, mean, sd, noise, target):
    if likelihood == "logit":
        target = float(target > 0.2)
    density = conditional(likelihood, noise=noise, deg_free=3.0)
    as_tensor = lambda value: torch.tensor([value], dtype=torch.float64)  # noqa: E731
    result = log_predictive_density(density, as_tensor(target), as_tensor(mean), as_tensor(sd**2)).item()

    def scaled(f):  # the integrand over its integral: it has to integrate to one
        log_normal = -0.5 * ((f - mean) / sd) ** 2 - math.log(sd * math.sqrt(2 * math.pi))
        return math.exp(log_normal + density.log_prob(as_tensor(target), as_tensor(f)).item() - result)

    kink = target if density.centred else 0.0
    inner = [mean + sd * k for k in (-5, -1, 0, 1, 5)] + [kink + density.width * k for k in (-30, -5, -1, 0, 1, 5, 30)]
    low, high = min(mean, kink) - 12 * sd, max(mean, kink) + 12 * sd
    edges = sorted({low, high, *(e for e in inner if low < e < high)})
    pieces = [quad(scaled, a, b, epsabs=1e-11, epsrel=1e-10)[0] for a, b in itertools.pairwise(edges)]
    assert abs(math.log(sum(pieces))) < 1e-8


@pytest.mark.parametrize("likelihood", ["laplace", "student_t", "matern32"])
def test_conditional_densities_are_normalised(likelihood):
    density = conditional(likelihood, noise=0.3, deg_free=2.5)
    zero = torch.zeros((), dtype=torch.float64)
    value = lambda y: density.log_prob(torch.tensor(y, dtype=torch.float64), zero).exp().item()  # noqa: E731
    assert 2 * quad(value, 0, math.inf)[0] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_peers_and_scoring_mean_the_same_density(likelihood):
    problem = tiny_problem(likelihood)
    learner = METHODS["adam"].learner(problem, seed=0, dtype=torch.float64, lr=0.01)
    f = torch.linspace(-2, 2, 7, dtype=torch.float64)
    y = problem.train_y[:7]
    ours = conditional(likelihood, **learner.likelihood_parameters()).log_prob(y, f)
    torch.testing.assert_close(learner.likelihood(f).log_prob(y).detach(), ours)


def test_matern32_distribution_has_a_batch_shape():
    distribution = Matern32Distribution(torch.zeros(3, 4), torch.ones(1))
    assert distribution.log_prob(torch.zeros(4)).shape == (3, 4)


# ---- data ----------------------------------------------------------------------------------------------------------


def test_load_standardises_on_the_training_part_only():
    data = load("synthetic_regression", seed=1)
    torch.testing.assert_close(data.train_x.mean(0), torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(data.train_x.std(0, correction=0), torch.ones(4, dtype=torch.float64))
    assert data.test_x.mean(0).abs().max() > 1e-6
    assert (len(data.train_y), len(data.test_y)) == (1080, 120)
    assert not torch.equal(data.test_x, load("synthetic_regression", seed=2).test_x)


def test_folds_test_on_disjoint_parts_and_train_on_different_random_rows():
    raw = raw_table("synthetic_regression")
    row_of = {value: row for row, value in enumerate(raw.targets)}
    found = [load("synthetic_regression", fold=(k, 4), max_train=200) for k in range(4)]

    def rows(y, data):
        values = (y * data.target_scale + data.target_mean).numpy()
        return {int(np.abs(raw.targets - value).argmin()) for value in values}

    tested = [rows(data.test_y, data) for data in found]
    trained = [rows(data.train_y, data) for data in found]
    assert len(row_of) == sum(map(len, tested)) == len(set().union(*tested))
    assert all(not (some & rest) for some, rest in zip(trained, tested, strict=True))
    assert len(set().union(*trained)) == 4 * 200
    for some in trained:  # four deviations of a mean of 200 of 1200 rows; the seed is fixed
        assert abs(np.mean(list(some)) - 599.5) < 4 * 1200 / np.sqrt(12 * 200)


def test_load_reads_the_folder(tmp_path, monkeypatch):
    rows = "\n".join(f"{k % 3},{k},7,{k % 4},{10 * k}" for k in range(40))
    (tmp_path / "covtype_every50th.csv.gz").write_bytes(gzip.compress(f"a,b,c,y,y_other\n{rows}\n".encode()))
    split = "\n".join(f"{int(k >= 30)},{k},{k % 2}" for k in range(40))
    (tmp_path / "susy_21k.csv.gz").write_bytes(gzip.compress(f"split,x1,y\n{split}\n".encode()))
    monkeypatch.setenv("GPEXT_DATA", str(tmp_path))
    covtype = load("covtype")
    assert covtype.train_x.shape == (36, 2)  # neither the constant column nor the other target
    assert torch.cat([covtype.train_y, covtype.test_y]).sum() == 10  # class 1 of 0..3
    susy = load("susy", seed=3)
    assert (len(susy.train_y), len(susy.test_y)) == (30, 10)
    soils = "\n".join(f"{k},0.{k % 3 + 1},0.4,0.{5 - k % 3}" for k in range(20))
    (tmp_path / "arctic_lake.csv.gz").write_bytes(gzip.compress(f"depth,y_sand,y_silt,y_clay\n{soils}\n".encode()))
    lake = load("arctic_lake", fold=(0, 4))
    assert (lake.train_x.shape, lake.train_y.shape, lake.test_y.shape) == ((15, 1), (15, 3), (5, 3))
    torch.testing.assert_close(lake.test_y.sum(-1), torch.ones(5, dtype=torch.float64))
    with pytest.raises(FileNotFoundError, match=r"GPEXT_DATA has no magic04\.csv\.gz"):
        load("magic")


def test_load_says_what_to_do_without_data(monkeypatch):
    monkeypatch.delenv("GPEXT_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="Set GPEXT_DATA to a folder that has airline_delay_nyc13"):
        load("airline")

    def fails():
        raise OSError("no network")

    monkeypatch.setitem(datasets.SOURCES, "magic", replace(datasets.SOURCES["magic"], fetch=fails))
    with pytest.raises(FileNotFoundError, match=r"could not be downloaded\. Set GPEXT_DATA"):
        load("magic")
    with pytest.raises(ValueError, match="unknown data set"):
        load("nowhere")


def test_minibatches_cover_each_epoch_once():
    batches = minibatches(10, 3, seed=0)
    epoch = torch.cat([next(batches) for _ in range(3)])
    assert len(epoch.unique()) == 9


# ---- methods and traces --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("name", list(METHODS))
def test_methods_learn_in_a_few_steps(name, likelihood):
    method = METHODS[name]
    trace = method.run(
        tiny_problem(likelihood),
        batch_size=50,
        budget=60.0,
        seed=0,
        dtype=torch.float64,
        max_steps=20,
        **method.options,
    )
    assert trace.status is Status.FINISHED
    assert trace.num_steps == trace.steps[-1] == 20
    assert trace.log_density[-1] > trace.log_density[0]
    assert trace.seconds == sorted(trace.seconds)
    assert Trace.from_dict(json.loads(json.dumps(trace.as_dict()))) == trace


@pytest.mark.parametrize("name", ["adam", "ngd"])
def test_peers_run_in_float32(name):
    trace = METHODS[name].run(
        tiny_problem("student_t"),
        batch_size=50,
        budget=60.0,
        seed=0,
        dtype=torch.float32,
        max_steps=3,
        **METHODS[name].options,
    )
    assert trace.status is Status.FINISHED


def test_a_seed_repeats_a_run():
    run = lambda seed: METHODS["ngd"].run(  # noqa: E731
        tiny_problem("laplace"),
        batch_size=50,
        budget=60.0,
        seed=seed,
        dtype=torch.float64,
        max_steps=3,
        **METHODS["ngd"].options,
    )
    assert run(0).log_density[-1] == run(0).log_density[-1] != run(1).log_density[-1]


class Constant:
    """A learner that predicts zero with unit variance and may break at a step."""

    def __init__(self, breaks=None):
        self.breaks = breaks

    def step(self, x, y):
        if self.breaks is not None:
            raise self.breaks

    def latent(self, x):
        return torch.zeros(len(x)), torch.ones(len(x))

    def likelihood_parameters(self):
        return {"noise": 0.1}

    def hyperparameters(self):
        return {}


def test_evaluation_of_a_known_predictor():
    problem = tiny_problem("laplace")
    error, log_density = evaluate(problem, Constant())
    assert error == pytest.approx(problem.test_y.square().mean().sqrt().item())
    assert -2 < log_density < -1
    classes = tiny_problem("logit")
    assert evaluate(replace(classes, likelihood="logit"), Constant())[1] == pytest.approx(-math.log(2))


def test_breakdowns_are_recorded_and_mistakes_are_raised():
    run = lambda error: train(  # noqa: E731
        tiny_problem("laplace"), lambda: Constant(error), batch_size=10, budget=1.0, seed=0, dtype=torch.float64
    )
    assert run(torch.linalg.LinAlgError("not positive-definite")).status is Status.NOT_POSITIVE_DEFINITE
    assert run(ValueError("found nan")).status is Status.NOT_FINITE
    with pytest.raises(RuntimeError, match="shapes"):
        run(RuntimeError("shapes do not fit"))


def test_the_clock_stands_during_evaluation():
    recorder = Recorder(tiny_problem("laplace"), budget=0.05)
    recorder.start()
    while recorder.advance(Constant()):
        pass
    trace = recorder.trace()
    assert 0.05 <= trace.train_seconds < 0.2
    assert 3 <= len(trace.seconds) <= 41


# ---- command lines -------------------------------------------------------------------------------------------------


def small_plan(methods, **changes):
    settings = {
        "batch_sizes": [50],
        "num_seeds": 1,
        "steps": "default",
        "dtype": "float64",
        "budget": 30.0,
        "num_inducing": 10,
        "threads": 1,
    }
    return list(augmented_svi.plan({"synthetic_regression": ["laplace"]}, methods, **{**settings, **changes}))


def test_a_second_call_does_only_what_is_missing(tmp_path, monkeypatch):
    calls = []

    def counted(problem, *, max_steps, **options):
        calls.append(max_steps)
        return METHODS["adam"].run(problem, max_steps=max_steps, **options)

    methods = {"adam": replace(METHODS["adam"], run=counted)}
    output = tmp_path / "results.json"
    kwargs = {"max_steps": 2, "max_train": 100, "progress": False}
    augmented_svi.execute(small_plan(methods), methods, output, **kwargs)
    assert calls == [3, 2]  # the warm-up and the run
    augmented_svi.execute(small_plan(methods), methods, output, **kwargs)
    assert calls == [3, 2]
    results = augmented_svi.execute(small_plan(methods, num_seeds=2), methods, output, **kwargs)
    assert calls == [3, 2, 3, 2]
    assert len(results["runs"]) == 2
    assert json.loads(output.read_text()) == json.loads(json.dumps(results))
    augmented_svi.execute(small_plan(methods), methods, output, redo=["adam"], **kwargs)
    assert calls == [3, 2, 3, 2, 3, 2]
    monkeypatch.setattr(augmented_svi, "machine", lambda: {"cpu": "another"})
    with pytest.raises(ValueError, match="not comparable"):
        augmented_svi.execute(small_plan(methods), methods, output, **kwargs)


def test_plan_rotates_the_methods():
    methods = {name: METHODS[name] for name in ("adam", "ngd")}
    assert [run.method for run in small_plan(methods, num_seeds=2)] == ["adam", "ngd", "ngd", "adam"]
    keys = [run.key for run in small_plan(methods, steps="grid")]
    assert len(keys) == len(set(keys)) == sum(len(method.grid) for method in methods.values())


def test_summary_of_made_up_runs():
    def run(method, seed, seconds, values, **options):
        trace = Trace(seconds=seconds, steps=[1] * len(seconds), error=[0.0] * len(seconds), log_density=values)
        return {
            "dataset": "d",
            "likelihood": "laplace",
            "method": method,
            "options": options or dict(METHODS[method].options if method in METHODS else {}),
            "batch_size": 100,
            "dtype": "float64",
            "seed": seed,
            "budget": 50.0,
            "trace": trace.as_dict(),
        }

    runs = [
        run("gpext", 0, [1.0, 2.0], [-1.0, -0.5]),
        run("gpext", 1, [1.0, 2.0], [-0.5, -0.5]),
        run("adam", 0, [5.0, 10.0], [-1.0, -0.505]),
        run("adam", 1, [5.0, 10.0], [-1.0, -0.505]),
        run("adam", 0, [5.0, 10.0], [-0.505, -0.505], lr=0.1),
        run("adam", 1, [5.0, 10.0], [-0.505, -0.505], lr=0.1),
        run("ngd", 0, [5.0], [-0.6]),
        run("ngd", 1, [5.0], [-0.6]),
    ]
    results = {"machine": {"cpu": "c", "cores": 1}, "versions": {}, "runs": dict(enumerate(runs))}
    rows = {row.label: row for row in augmented_svi.summarise(results)}
    assert rows["gpext"].seconds == 2.0
    assert (rows["adam"].seconds, rows["adam"].ratio) == (10.0, 5.0)
    assert rows["adam tuned (lr=0.1)"].ratio == 2.5
    assert math.isinf(rows["ngd"].seconds)
    table = augmented_svi.report(results)
    assert "not reached | > 25.0 |" in table
    only_peers = {**results, "runs": {k: v for k, v in results["runs"].items() if v["method"] != "gpext"}}
    assert all(row.ratio is None for row in augmented_svi.summarise(only_peers))


def test_step_timer(capsys, tmp_path):
    output = tmp_path / "steps.json"
    threads = torch.get_num_threads()
    try:
        step_time.main(["--quick", "--batch-size", "50", "--dtypes", "float64", "--output", str(output)])
    finally:
        torch.set_num_threads(threads)
    milliseconds = json.loads(output.read_text())["cells"][0]["milliseconds"]
    assert set(milliseconds) >= {"floor", "adam", "ngd"}
    assert all(np.isfinite(value) and value > 0 for value in milliseconds.values())
    assert "laplace" in capsys.readouterr().out


# ---- expectation propagation ---------------------------------------------------------------------------------------


def test_ep_convergence_runs_and_resumes(tmp_path, capsys, monkeypatch):
    output = tmp_path / "ep.jsonl"
    threads = torch.get_num_threads()
    arguments = ["--quick", "--output", str(output), "--figure", str(tmp_path / "map.png")]
    try:
        assert ep_convergence.main(arguments) == 0
        rows = [json.loads(line) for line in output.read_text().splitlines()]
        monkeypatch.setattr(ep_convergence, "inferred", None)  # nothing remains to be done
        assert ep_convergence.main(arguments[:-2]) == 0
    finally:
        torch.set_num_threads(threads)
    assert len(rows) == len(output.read_text().splitlines())
    assert "versions" in rows[0]
    inferred = [row for row in rows[1:] if "residual" in row]
    assert len(inferred) == 2 * 3 + 2 * 4
    assert all(honest(row) and row["residual"] < 1e-5 for row in inferred)
    assert (tmp_path / "map.png").exists()
    assert "mean absolute error" in capsys.readouterr().out


def test_ep_walk_goes_from_neighbour_to_neighbour(tmp_path, capsys):
    output, threads = tmp_path / "walk.jsonl", torch.get_num_threads()
    try:
        assert ep_walk.main(["--quick", "--output", str(output), "--figure", str(tmp_path / "map.png")]) == 0
        lines = output.read_text().splitlines()
        assert ep_walk.main(["--quick", "--output", str(output)]) == 0
    finally:
        torch.set_num_threads(threads)
    assert output.read_text().splitlines() == lines
    rows = [json.loads(line) for line in lines[1:]]
    assert len(rows) == 2 * 4
    assert all(honest(row) and row["residual"] < 1e-5 for row in rows)
    assert (tmp_path / "map.png").exists()
    assert "example 1, walked" in capsys.readouterr().out


@as_written()
def test_ep_existence_tells_how_branches_end(tmp_path, capsys):
    output, threads = tmp_path / "existence.jsonl", torch.get_num_threads()
    try:
        assert ep_existence.main(["--quick", "--output", str(output)]) == 0
    finally:
        torch.set_num_threads(threads)
    row = json.loads(output.read_text().splitlines()[-1])
    assert row["status"] == "REDUCED_POWER"
    assert row["by power"]["reason"] == "turned back"
    assert row["power"] <= row["by power"]["farthest"] < 1
    assert row["by width"]["reason"] != "converged"
    assert row["by width"]["looks"] <= 120
    assert "turned back, farthest" in capsys.readouterr().out


def test_dishonest_rows_are_told_apart():
    row = {"status": "CONVERGED", "power": 1.0, "finite": True, "residual": 1e-7, "stage": "sweeps"}
    assert honest(row)
    assert kind_of(row) == "sweeps"
    for change in ({"residual": 1e-3}, {"finite": False}, {"power": 0.9}, {"status": "LinAlgError"}):
        assert not honest({**row, **change})
    assert kind_of({**row, "power": 0.3}) == "power below 0.5"
    assert kind_of({**row, "residual": 1e-3}) == "not matched"


@pytest.mark.parametrize("family", FAMILIES)
def test_random_problems_are_what_they_say(family):
    first, again, other = (random_problem(family, seed) for seed in (0, 0, 1))
    torch.testing.assert_close(first.targets, again.targets, rtol=0, atol=0)
    assert len(first.targets) != len(other.targets)
    for seed in range(20):
        problem = random_problem(family, seed)
        assert 20 <= len(problem.targets) == problem.about["n"] <= 200
        assert 1 <= problem.deg_free <= 20
        assert 1e-3 <= problem.scale <= 1
        assert bool((torch.linalg.eigvalsh(problem.covariance) > 0).all())


def test_map_is_centred_on_the_best_setting():
    for example in EXAMPLES.values():
        settings = grid(example, "near", 3)
        assert settings[4][2:] == pytest.approx((example.lengthscale, example.magnitude))
        assert len({(i, j) for i, j, _, _ in settings}) == 9


def test_annealing_finds_the_evidence_and_the_posterior_of_one_datum():
    covariance, targets = torch.tensor([[4.0]], dtype=torch.float64), torch.tensor([3.0], dtype=torch.float64)
    problem = StudentTProblem(torch.zeros(1, 1, dtype=torch.float64), covariance, targets, 2.5, 0.3, {})
    exact = student_t(2.5, 0.3).log_density(targets, torch.zeros_like(targets), covariance[0]).item()
    found = anneal(problem, chains=4000, temperatures=50, seed=1)
    assert 0 < found.standard_error < 0.03
    assert abs(found.log_evidence - exact) < 4 * found.standard_error
    joint = lambda f: math.exp(  # noqa: E731
        -(f**2) / 8 + student_t(2.5, 0.3).log_prob(targets, torch.tensor([f], dtype=torch.float64)).item()
    )
    total, first = quad(joint, -10, 10, points=[3.0])[0], quad(lambda f: f * joint(f), -10, 10, points=[3.0])[0]
    mean, variance = conditionals(problem, found.mixing, covariance[0], 4.0)
    assert (found.weights * found.latent[:, 0]).sum().item() == pytest.approx(first / total, abs=0.05)
    assert (found.weights * mean).sum().item() == pytest.approx(first / total, abs=0.05)
    assert bool(((variance > 0) & (variance < 4)).all())


def test_plain_iteration_fails_where_it_is_known_to():
    easy, hard = (EXAMPLES[number].problem() for number in (1, 2))
    assert plain_parallel(easy).outcome == "converged"
    assert plain_parallel(hard).outcome == "improper"
    assert plain_parallel(hard, damping=0.1, max_sweeps=5).outcome == "goes on"


def test_outliers_found_counts(capsys):
    assert outliers_found.main(["--draws", "1"]) == 0
    counts = dict(line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines()[:6])
    counts = {name.strip(): int(count) for name, count in counts.items()}
    assert counts["moved"] == counts["among the first"] > 0


# ---- draws by Gibbs sampling ---------------------------------------------------------------------------------------


def test_mixing_draws_reports_what_it_tests(tmp_path, capsys, monkeypatch):
    names = ("laplace, svm", "logistic")
    monkeypatch.setattr(mixing_draws, "FAMILIES", {name: mixing_draws.FAMILIES[name] for name in names})
    monkeypatch.setattr(mixing_draws, "COUNTS", (2.3,))
    output = tmp_path / "draws.json"
    threads = torch.get_num_threads()
    try:
        assert mixing_draws.main(["--quick", "--output", str(output)]) == 0
    finally:
        torch.set_num_threads(threads)
    results = json.loads(output.read_text())
    assert [row["family"] for row in results["families"]] == [name for name in names for _ in mixing_draws.TILTS]
    assert all(row[kind]["p_value"] > 1e-5 for row in results["families"] for kind in ("exact", "numerical"))
    assert max(error for errors in results["cdf_errors"].values() for error in errors.values()) < 1e-8
    assert all(row["rates"]["gpext"] > row["rates"]["200 gammas"] for row in results["speed"])
    assert "Smallest of 20 p values" in capsys.readouterr().out


def test_mixing_draws_finds_a_wrong_law():
    law = mixing_draws.FAMILIES["logistic"][0].mixing(mixing_draws.number(1.0))
    other = mixing_draws.FAMILIES["logistic"][0].mixing(mixing_draws.number(1.5))
    draws = other.sample((20_000,), generator=torch.Generator().manual_seed(0))
    found = mixing_draws.tested(law, draws)
    assert found["p_value"] < 1e-6
    assert abs(found["mean_error"]) > 4.5


def test_first_states(capsys):
    arguments = ["--dataset", "synthetic_binary", "--num-inducing", "20", "--sizes", "100", "1000", "--steps", "3"]
    threads = torch.get_num_threads()
    try:
        assert first_states.main(arguments) == 0
    finally:
        torch.set_num_threads(threads)
    *_, last = capsys.readouterr().out.splitlines()
    seed, step, spent, *densities = last.strip("| ").split(" | ")
    assert (seed, step) == ("0", "3")
    assert float(spent) > 0
    assert all(-1 < float(density) < 0 for density in densities)


def test_collapsed_step_timer(capsys):
    arguments = ["--sizes", "60", "--dimension", "2", "--num-inducing", "10", "--likelihoods", "logit", "--rounds", "3"]
    assert collapsed_step.main(arguments) == 0
    cells = capsys.readouterr().out.splitlines()[-1].split("|")
    assert [cells[1].strip(), cells[2].strip()] == ["logit", "60"]
    assert all(float(cell.split()[0]) > 0 for cell in cells[3:6])
