"""The benchmark of the cost of a gradient runs at its smallest size."""

import json

import pytest

from benchmarks import sgld_pace

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("options", [["--dtype", "float64"], ["--controlled"]])
def test_measures_once_and_prints_a_row(options, tmp_path, capsys, monkeypatch):
    path = tmp_path / "pace.jsonl"
    arguments = ["--data", "generated", "--rows", "60", "--steps", "3", *options, "--output", str(path)]
    assert sgld_pace.main(arguments) == 0
    printed = capsys.readouterr().out
    row = json.loads(path.read_text().splitlines()[-1])
    assert len(row["clock"]) == 3
    assert len(row["gradient"]) == 3
    assert f"| generated | 60 | {row['dtype']} | 4{', controlled' * row['controlled']} |" in printed
    monkeypatch.setattr(sgld_pace, "measure", None)  # nothing is measured now
    sgld_pace.main(arguments)
    assert capsys.readouterr().out == printed
