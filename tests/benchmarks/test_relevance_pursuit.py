"""The comparison with relevance pursuit runs at a small size, resumes, and corrupts what it says it corrupts."""

import json

import pytest
import torch

from benchmarks.relevance_pursuit import CELLS, METHODS, draw, main
from tests.neutral_settings import kept_settings

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("name", "regime", "share"), CELLS)
def test_a_share_of_the_training_targets_is_corrupted(name, regime, share):
    with kept_settings():
        clean, problem = draw(name, "none", 0.0, 3), draw(name, regime, share, 3)
    assert torch.equal(clean.x, problem.x)
    assert torch.equal(clean.test_y, problem.test_y)
    changed = clean.y != problem.y
    assert int(changed.sum()) == round(100 * share)
    if regime == "uniform":
        assert problem.y[changed].min() > clean.test_f.min() - clean.spread
        assert problem.y[changed].max() < clean.test_f.max() + clean.spread
    if regime == "one-sided":
        assert bool((problem.y >= clean.y).all())


def test_a_quick_run_and_its_resumption(tmp_path, capsys):
    output, cells = tmp_path / "results.jsonl", ["friedman/constant/0.15", "friedman/student/0.15"]
    methods = [method for method in METHODS if method != "relevance pursuit"]  # minutes
    with kept_settings():
        quick = ["--quick", "--output", str(output), "--cells", *cells, "--methods", *methods]
        assert main(quick) == 0
        table = capsys.readouterr().out
        rows = [json.loads(line) for line in output.read_text().splitlines()]
        assert len(rows) == len(cells) * len(methods)
        assert not [row for row in rows if "error" in row]
        assert all(table.count(f"| {method} |") == len(cells) for method in methods)
        assert main(quick) == 0
    assert len(output.read_text().splitlines()) == len(rows)
    assert capsys.readouterr().out == table
