"""The factors that the benchmark of a training step counts."""

from benchmarks.softmax_step import measure


def test_a_step_has_fewer_factors_than_newtons_method():
    row = measure(40, 3, shared=True)
    assert row["number"] == 2 * (3 + 1)
    assert row["plain_number"] % (3 + 1) == 0
    assert row["plain_number"] > row["number"]
    assert min(row["factors"], row["step"], row["plain"]) > 0
