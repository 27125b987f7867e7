"""Trainings from both kinds of initial lengthscales, as their benchmark counts them."""

import pytest

from benchmarks.initial_values import measure


@pytest.mark.parametrize("kind", ["gaussian", "student_t", "sparse"])
def test_both_starts_are_counted_and_scored(kind, monkeypatch):
    monkeypatch.setattr("benchmarks.initial_values._ROWS", 80)
    rows = [
        measure("synthetic_binary" if kind == "sparse" else "diabetes", kind, 0, each) for each in ("given", "data")
    ]
    given, data = rows
    assert given["evidence"] != data["evidence"]
    for row in rows:
        assert row["status"] == "converged"
        assert row["evaluations"] > 5
        assert abs(row["log_density"]) < 3
