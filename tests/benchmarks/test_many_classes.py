"""The benchmark of many classes makes the rows that it describes, and prints its table."""

import numpy as np
import pytest
import torch

from benchmarks import many_classes
from benchmarks.datasets import Dataset


def test_covtype_is_enlarged_by_rows_that_differ_in_their_numbers_alone(monkeypatch):
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((30, 12)))
    y = torch.arange(30.0).remainder(3)
    data = Dataset("covtype_classes", "classes", x[:20], y[:20], x[20:], y[20:], 0.0, 1.0)
    monkeypatch.setattr(many_classes, "load", lambda name, test_fraction: data)
    enlarged = many_classes.split("covtype")
    assert len(np.unique(enlarged.train_x, axis=0)) == many_classes.COVTYPE_ROWS
    assert len(np.unique(enlarged.train_x[:, many_classes.COVTYPE_NUMBERS :], axis=0)) == 20
    gap = enlarged.train_x[:100, None] - x[:20].numpy()
    nearest = np.abs(gap).max(-1).argmin(1)
    assert (enlarged.train_y[:100] == y[:20].numpy()[nearest]).all()
    plain = many_classes.split("letter")
    assert np.array_equal(plain.train_x, x[:20].numpy())
    assert plain.num_classes == 3


@pytest.mark.slow
def test_a_quick_run_and_its_table(tmp_path, capsys):
    command = ["--quick", "--output", str(tmp_path / "rows.jsonl")]
    rows = many_classes.main(command).rows
    assert set(rows) == {f"generated {method}" for method in many_classes.METHODS}
    assert many_classes.main(command).rows == rows  # resumed
    assert capsys.readouterr().out.count("| generated |") == 8
