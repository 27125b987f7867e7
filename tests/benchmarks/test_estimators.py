"""The comparison of estimators scores what it says, on the same rows for all, resumes, and prints its tables."""

import gzip

import numpy as np
import pytest

from benchmarks import estimators
from benchmarks.estimators import class_scores, gaussian, main, split
from benchmarks.estimators_report import ranks, read_scores


@pytest.fixture
def folder(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((120, 2))
    for name, y in (("glass", (x > 0).sum(1)), ("yacht", x[:, 0] + 0.1 * rng.standard_normal(120))):
        with gzip.open(tmp_path / f"{name}.csv.gz", "wt") as file:
            file.write("a,b,y\n" + "\n".join(",".join(map(str, row)) for row in np.column_stack([x, y])))
    monkeypatch.setenv("GPEXT_DATA", str(tmp_path))
    return tmp_path


def test_folds_are_a_partition(folder):
    parts = [split("yacht", fold, 100) for fold in range(estimators.FOLDS)]
    assert [len(part.test_y) for part in parts] == [20] * 5
    assert len(np.unique(np.concatenate([part.test_x for part in parts]), axis=0)) == 100
    assert abs(parts[0].train_y.mean()) < 1e-12
    assert split("glass", 0, 100).num_classes == 3


def test_scores():
    scores = class_scores(np.array([[0.8, 0.2], [0.4, 0.6]]), np.array([0, 0]))
    assert np.isclose(scores["log_density"], np.log([0.8, 0.4]).mean())
    assert scores["error"] == 0.5
    assert np.isclose(scores["calibration"], (0.2 + 0.6) / 2)
    scores = gaussian(np.zeros(2), 1.0, np.array([0.0, 2.0]))
    assert np.isclose(scores["log_density"], -0.5 * np.log(2 * np.pi) - 1)
    assert scores["calibration"] == 0.5


@pytest.mark.slow
def test_a_quick_run_and_its_tables(folder, capsys):
    output, methods = folder / "runs.jsonl", ["gpext", "scikit-learn GP", "linear", "boosting"]
    command = ["--output", str(output), "--quick", "--sets", "glass", "yacht", "--methods", *methods]
    main(command)
    assert len(output.read_text().splitlines()) == 8
    main(command)
    assert len(output.read_text().splitlines()) == 8  # resumed
    main(["--output", str(output), "--table", "--methods", *methods])
    shown = capsys.readouterr().out
    assert shown.count("| glass |") == 4
    found = ranks(read_scores(output, methods), ["glass", "yacht"], methods)
    assert found.shape == (2, 4)
    assert (np.sort(found, 1) == [1, 2, 3, 4]).all()
