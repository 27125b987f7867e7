"""The quick size of the benchmark of spatial counts."""

from benchmarks.million_counts import measure


def test_counts_are_predicted_from_regions():
    row = measure(4000, num_new=500, margin=3.0)
    assert row["fit"] == "CONVERGED"
    assert 0.84 < row["coverage of f"] < 0.95  # three standard errors of correlated values, at this size
    assert 0.84 < row["coverage of y"] < 0.95
    assert row["log density"] < row["of truth"] + 0.05
