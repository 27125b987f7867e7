"""The quick size of the benchmark of spatial counts."""

from functools import partial

import pytest

from benchmarks.million_counts import by_blocks, measure, on_regions


@pytest.mark.slow
def test_counts_are_predicted_from_regions():
    row = measure(4000, on_regions, num_new=500, margin=3.0)
    assert row["fit"] == "CONVERGED"
    assert 0.84 < row["coverage of f"] < 0.95  # three standard errors of correlated values, at this size
    assert 0.84 < row["coverage of y"] < 0.95
    assert row["log density"] < row["of truth"] + 0.05


def test_training_by_blocks_is_timed():
    row = measure(300, partial(by_blocks, num_steps=3), num_new=50, margin=3.0)
    assert row["fit"] == "MAX_STEPS"
    assert row["lengthscale"] != 0.1
    assert row["step"] > 0
