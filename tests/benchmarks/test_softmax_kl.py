"""The benchmark of KL for several classes: both preconditioners lead to the same evidence."""

from benchmarks.softmax_kl import main, measure


def test_both_ways_end_alike_and_coupled_classes_take_no_more_steps():
    coupled, apart = (measure("generated", 40, 30.0, coupled=way) for way in (True, False))
    assert coupled["status"] == apart["status"] == "CONVERGED"
    assert abs(coupled["evidence"] - apart["evidence"]) < 1e-6
    assert coupled["steps"] <= apart["steps"] + 2


def test_the_quick_run_prints_a_table(tmp_path, capsys):
    assert main(["--quick", "--output", str(tmp_path / "rows.jsonl")]) == 0
    assert "| generated | 60 | 30 |" in capsys.readouterr().out
