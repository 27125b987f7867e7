"""The benchmark of several processes runs on a tiny problem."""

import pytest

from benchmarks import scale_out

pytestmark = pytest.mark.slow


def test_it_runs_and_goes_on_where_it_stopped(tmp_path, capsys, monkeypatch):
    arguments = ["--quick", "--tasks", "product", "--ranks", "1", "2", "--output", str(tmp_path / "rows.jsonl")]
    assert scale_out.main(arguments) == 0
    first = capsys.readouterr().out
    assert "| product, n = 600 | 2 |" in first
    assert "| 605 |" in first  # traffic of a product: n numbers, and five to synchronise
    monkeypatch.setattr(scale_out, "measure", None)
    assert scale_out.main(arguments) == 0
    assert capsys.readouterr().out == first
