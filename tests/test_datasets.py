"""Example data: shapes, totals that their sources state, and copies of the caller's own."""

import numpy as np
import pytest

from gpext.datasets import load_coal, load_glass


def test_coal_has_the_191_disasters_of_jarrett():
    coal = load_coal()
    assert coal.data[:, 0].tolist() == list(range(1851, 1963))
    assert coal.target.sum() == 191
    assert coal.target.dtype == np.float64
    assert coal.target[coal.data[:, 0] < 1891].mean() > 2.5 > 1.5 > coal.target[coal.data[:, 0] > 1891].mean()
    assert coal.feature_names == ("year",)


def test_glass_has_its_kinds_and_oxides_that_add_up_to_about_a_hundred_per_cent():
    glass = load_glass()
    assert np.bincount(glass.target).tolist() == [70, 76, 17, 13, 9, 29]
    assert len(glass.target_names) == 6
    assert glass.feature_names == ("RI", "Na", "Mg", "Al", "Si", "K", "Ca", "Ba", "Fe")
    total = glass.data[:, 1:].sum(1)
    assert 98.5 < total.min() < total.max() < 100.5


@pytest.mark.parametrize("loader", [load_coal, load_glass])
def test_each_call_returns_arrays_of_its_own(loader):
    first = loader()
    first.data[:] = 0
    first.target[:] = 0
    second = loader()
    assert second.data.any()
    assert second.target.any()
    assert second.data.flags.owndata
    assert "Source" in second.description
