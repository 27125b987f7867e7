"""The quick size of the benchmark of inducing inputs beside neighbours of what they leave."""

import numpy as np
import pytest

from benchmarks import residual_form
from benchmarks.datasets import Table


@pytest.mark.slow
def test_the_quick_run_has_its_table(monkeypatch, capsys):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 3))
    monkeypatch.setattr(residual_form, "raw_table", lambda name: Table(x, (x[:, 0] > 0).astype(float)))
    assert residual_form.main(["--quick"]) == 0
    shown = capsys.readouterr().out
    assert "| magic | 150 | 10, 200 fixed |" in shown
    assert "| magic | 150 | all |" in shown
