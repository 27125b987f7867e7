"""The comparison of minibatches with the full batch runs at a small size, resumes, and draws its figure."""

import json

import pytest

from benchmarks.minibatch_convergence import METHODS, main
from tests.neutral_settings import kept_settings

pytestmark = pytest.mark.slow


def test_a_quick_run_and_its_figure(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("benchmarks.minibatch_convergence.QUICK", {"synthetic_binary": "logit"})
    output, figure = tmp_path / "rows.jsonl", tmp_path / "course.png"
    with kept_settings():
        assert main(["--quick", "--output", str(output)]) == 0
        rows = [json.loads(line) for line in output.read_text().splitlines() if "key" in line]
        assert len(rows) == len(METHODS)
        assert main(["--quick", "--output", str(output), "--figure", str(figure)]) == 0
    assert len(output.read_text().splitlines()) == len(rows) + 1  # resumed; the first line is of the machine
    assert capsys.readouterr().out.count("gpext, minibatches") == 2
    assert figure.stat().st_size > 0
