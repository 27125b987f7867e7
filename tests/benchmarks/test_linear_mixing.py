"""The benchmark of LMC models: its data, and a run of every method."""

import pytest
import torch

from benchmarks.linear_mixing import METHODS, data


def test_a_third_of_the_outputs_is_missing():
    x, task, y = data(2000)
    assert x.shape == (len(y), 2)
    assert torch.bincount(task).tolist() == pytest.approx([1333, 1333, 1333], abs=110)  # five standard deviations


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_reports_an_elbo_for_each_budget(method):
    found = METHODS[method](*data(60), [0.05, 0.1])
    assert len(found) == 2
    assert all(-20 < value < 0 for value in found)
