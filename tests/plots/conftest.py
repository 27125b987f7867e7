"""Fixtures for tests of figures."""

import matplotlib
import pytest

matplotlib.use("Agg")
import matplotlib.pyplot as plt


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


@pytest.fixture
def ax():
    return plt.subplots()[1]


@pytest.fixture
def labels():
    """The labels that the legend of some axes would have."""
    return lambda ax: ax.get_legend_handles_labels()[1]
