"""The demo and the augmentation gap run at a small size; the gap's baseline finds the optimum."""

import json
import math

import pytest
import torch

from benchmarks import augmentation_gap, demo
from benchmarks.harness import Trace
from benchmarks.ours import LIKELIHOODS

pytestmark = pytest.mark.slow


def outcome(method, seconds, log_density):
    values = torch.full((4,), log_density[-1])
    trace = Trace(seconds=seconds, steps=[0] * len(seconds), error=[0.1] * len(seconds), log_density=log_density)
    return demo.Outcome(method, trace, None, values)


@pytest.mark.filterwarnings("default")
def test_demo_runs(tmp_path, capsys):
    assert demo.main(["--quick", "--budget", "0.1", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("gpytorch NGD") >= 6
    figures = {"outliers.png", "log_density.png", "log_density_priors.png", "calibration.png"}
    assert {path.name for path in tmp_path.glob("*.png")} == figures
    for name, heading, _ in demo.TABLES:
        assert heading in printed
        assert (tmp_path / f"{name}.md").read_text().count("\n") == 2 + 3 * len(demo.METHOD_NAMES)


@pytest.mark.parametrize("name", demo.METHOD_NAMES)
@pytest.mark.parametrize("priors", [False, True])
def test_every_method_gets_the_same_priors_or_none(name, priors):
    problem = demo.all_problems(num_inducing=5)[0]
    runner = demo.run_peer if name in demo.PEERS else demo.run_gpext
    learner = runner(name, problem, 60.0, max_steps=1, priors=priors).learner
    objective = learner.objective if name in demo.PEERS else learner.mll
    leaves = {name.split(".")[-1] for name, *_ in objective.named_priors()}
    assert leaves == ({"lengthscale_prior", "outputscale_prior"} if priors else set())


def test_demo_says_where_gpext_did_not_win():
    runs = [
        outcome("gpext", [1.0, 2.0], [-3.0, -2.0]),
        outcome("gpext + exact", [1.0, 2.0], [-3.0, -2.0]),
        outcome("gpytorch Adam", [1.0, 4.0], [-3.0, -1.0]),
        outcome("gpytorch NGD", [1.0, 3.0], [-3.0, -1.0]),
    ]
    assert demo.arrival(runs) == {
        "gpext": math.inf,
        "gpext + exact": math.inf,
        "gpytorch Adam": 4.0,
        "gpytorch NGD": 3.0,
    }
    (line,) = demo.verdict({"toy": runs})
    assert "gpext did NOT win; gpytorch NGD got there after 3.00 s, gpext did not get there" in line
    assert "gpytorch Adam ended 1.000" in line
    table = demo.table({"toy": runs})
    assert "not reached" in table


def test_passing_through_is_no_win():
    runs = [
        outcome("gpext", [1.0, 2.0], [-1.0, -2.0]),
        outcome("gpext + exact", [3.0], [-1.5]),
        outcome("gpytorch Adam", [4.0], [-1.0]),
        outcome("gpytorch NGD", [5.0], [-3.0]),
    ]
    (line,) = demo.verdict({"toy": runs})
    assert "did NOT win; gpytorch Adam got there after 4.00 s, gpext passed it after 1.00 s but did not stay" in line
    assert "1.00 (left)" in demo.table({"toy": runs})


def test_staying_first_is_a_win():
    runs = [
        outcome("gpext", [1.0, 2.0], [-1.0, -1.0]),
        outcome("gpext + exact", [2.0], [-1.0]),
        outcome("gpytorch Adam", [4.0], [-1.0]),
        outcome("gpytorch NGD", [5.0], [-3.0]),
    ]
    assert demo.verdict({"toy": runs}) == ["toy: gpext was first, 4.0 times as fast as gpytorch Adam."]


def test_only_training_targets_are_corrupted():
    problem, corrupted = demo.diabetes_problem(num_inducing=5, feature=2)
    assert corrupted.sum() == round(0.05 * len(problem.train_y))
    assert problem.train_y[corrupted].abs().min() > 1.5
    assert problem.test_y.abs().max() < 4


@pytest.mark.filterwarnings("default")
def test_gap_runs(tmp_path, capsys):
    output = tmp_path / "gap.json"
    assert augmentation_gap.main(["--quick", "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert len(rows) == 6
    assert all(row["bound_without"] >= row["bound_with"] - 1e-9 for row in rows)
    assert all(row["status_without"] == "CONVERGED" for row in rows)
    assert output.with_suffix(".png").exists()
    assert "visible gap" in capsys.readouterr().out


def test_kernel_is_the_papers():
    a = torch.tensor([[0.0], [2.0]], dtype=torch.float64)
    value = augmentation_gap.squared_exponential(a, a, theta=2.0)[0, 1].item()
    assert value == pytest.approx(0.1 * math.exp(-1))


def test_all_likelihoods_of_the_gap_exist():
    assert {name for _, name in augmentation_gap.PROBLEMS} <= set(LIKELIHOODS)
