"""The comparison of robust regression runs at a small size, resumes, and its tables agree with the results."""

import json

import pytest
import torch

from benchmarks import robust_regression
from benchmarks.datasets import load
from benchmarks.robust_regression import friedman, main, plan, read
from benchmarks.robust_regression_methods import METHODS
from benchmarks.robust_regression_report import bootstrap, report

pytestmark = pytest.mark.slow


def test_friedman_is_standardised_and_has_outliers_in_training_only():
    data = friedman(3)
    assert (data.train_x.shape, data.test_x.shape) == ((100, 10), (1000, 10))
    torch.testing.assert_close(data.train_y.mean(), torch.zeros((), dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(data.train_x.std(0, correction=0), torch.ones(10, dtype=torch.float64))
    y = data.test_y * data.target_scale + data.target_mean
    assert 0 < y.min() < y.max() < 30  # values of the function
    assert not torch.equal(data.test_y, friedman(4).test_y)
    assert torch.equal(data.test_y, friedman(3).test_y)


def test_folds_are_a_partition():
    parts = [load("synthetic_regression", fold=(k, 5)) for k in range(5)]
    assert [len(part.test_y) for part in parts] == [240] * 5
    raw = torch.cat([part.test_y * part.target_scale + part.target_mean for part in parts])
    assert len(raw.unique()) == 1200
    assert all(len(part.train_y) == 960 for part in parts)


def test_a_quick_run_and_its_resumption(tmp_path, capsys, monkeypatch):
    output = tmp_path / "results.jsonl"
    assert main(["--quick", "--output", str(output)]) == 0
    table = capsys.readouterr().out
    assert all(f"| {method} |" in table for method in METHODS)
    assert "CPU time at fixed hyperparameters" in table
    head, *rows = (json.loads(line) for line in output.read_text().splitlines())
    assert head.keys() == {"machine", "versions"}
    assert [row["method"] for row in rows] == [*METHODS, "fixed"]
    assert "Failed" not in table
    for row in rows[:-1]:
        assert len(row["log_density"]) == len(row["latent_log_density"]) == len(row["error"]) == 30
        assert row["seconds"] > 0

    lines = output.read_text().splitlines()
    output.write_text("\n".join(line for line in lines if '"method": "LA2"' not in line) + "\n")
    calls = []
    again = rows[list(METHODS).index("LA2")]
    monkeypatch.setattr(robust_regression, "measure", lambda method, *_: calls.append(method) or again)
    assert main(["--quick", "--output", str(output)]) == 0
    assert calls == [METHODS["LA2"]]
    capsys.readouterr()
    assert main(["--table", "--output", str(output)]) == 0
    assert "| LA2 |" in capsys.readouterr().out
    monkeypatch.setattr(robust_regression, "machine", lambda: {"cpu": "another"})
    with pytest.raises(ValueError, match="not comparable"):
        read(output)


def test_a_failure_is_a_row_and_is_shown(tmp_path, monkeypatch, capsys):
    def breaks(data, settings):
        raise torch.linalg.LinAlgError("not positive definite")

    monkeypatch.setitem(METHODS, "LA2", breaks)
    output = tmp_path / "results.jsonl"
    arguments = ["--quick", "--methods", "LA1", "LA2", "EP1", "--output", str(output)]
    assert main(arguments) == 0
    table = capsys.readouterr().out
    assert "Failed: LA2 (fold 0): " in table
    assert "not positive definite." in table
    assert "| LA2 | " not in table.split("## CPU time")[0]


def test_the_plan_goes_fold_by_fold():
    keys = list(plan(["boston"], ["LA1", "KL2", "fixed"], 2, quick=False))
    assert keys == [
        ("boston", 0, "LA1"),
        ("boston", 0, "KL2"),
        ("boston", 0, "fixed"),
        ("boston", 1, "LA1"),
        ("boston", 1, "KL2"),
    ]


def test_fixed_configurations_need_their_centre(tmp_path):
    with pytest.raises(ValueError, match="run it on friedman first"):
        main(["--quick", "--methods", "fixed", "--output", str(tmp_path / "results.jsonl")])


def test_bootstrap_intervals_are_those_of_a_mean():
    values = torch.randn(2000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values[:, 1] = values[:, 0] + 0.1
    score = bootstrap(("a", "b"), values)
    mean, low, high = score.interval("a")
    assert mean == pytest.approx(values[:, 0].mean().item())
    half = 1.96 * values[:, 0].std().item() / 2000**0.5
    assert (low, high) == (pytest.approx(mean - half, abs=0.1 * half), pytest.approx(mean + half, abs=0.1 * half))
    assert score.interval("b", "a") == pytest.approx((0.1, 0.1, 0.1))
    shifts = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64).repeat_interleave(500).unsqueeze(-1)
    wide, narrow = (bootstrap(("a",), shifts, folds).interval("a") for folds in ([500] * 4, None))
    assert wide[2] - wide[1] > 5 * (narrow[2] - narrow[1])


def test_verdicts_of_made_up_rows():
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(400, generator=generator, dtype=torch.float64)

    def row(method, fold, shift, seconds):
        return {
            "dataset": "boston",
            "fold": fold,
            "method": method,
            "num_train": 455,
            "status": "CONVERGED",
            "log_density": (noise + shift).tolist(),
            "error": (noise.abs() - shift).tolist(),
            "seconds": seconds,
            "unconverged": 1,
        }

    shifts = {"LA1": 0.0, "EP1": 0.1, "EP2": 0.2, "KL1": 0.3}
    rows = [row(method, fold, shift, 1.0 + shift) for fold in (0, 1) for method, shift in shifts.items()]
    rows.append({"dataset": "boston", "fold": 0, "method": "fixed", "rules": {
        "LA": {"seconds": [1.0, 1.0], "statuses": ["CONVERGED"] * 2},
        "EP": {"seconds": [1.0, 5.0], "statuses": ["CONVERGED", "STALLED"]},
    }})  # fmt: skip
    text = report({"machine": {"cpu": "c", "cores": 1}, "versions": {}}, rows)
    assert "MLPD: first is KL1. Significantly better than the best EP, EP2: KL1; than EP1: EP2, KL1." in text
    assert "MAE: first is KL1." in text
    assert "| boston | 1.0 | 1.1 | 1.2 | 1.3 |" in text
    assert "| boston, sum of 2 | 1.0 | 3.0 |" in text
    assert "| boston, converged | 2 | 1 |" in text
