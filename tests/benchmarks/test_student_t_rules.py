"""The benchmark of the rules that train a Student-t runs."""

import numpy as np

from benchmarks import student_t_rules
from benchmarks.datasets import Table


def test_a_quick_run_prints_the_table(monkeypatch, capsys):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((120, 2))
    y = np.sin(x[:, 0]) + 0.1 * rng.standard_t(2, 120)
    monkeypatch.setattr(student_t_rules, "raw_table", lambda name: Table(x, y))
    assert student_t_rules.main(["--quick"]) == 0
    assert "| bike | chosen | 60 |" in capsys.readouterr().out
