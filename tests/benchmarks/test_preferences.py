"""The problems of the preference benchmark, and that its Laplace is BoTorch's."""

import pytest
import torch

from benchmarks.ledger import Ledger
from benchmarks.preferences import METHODS, Problem, measure, measure_many, report


def test_comparisons_favour_the_better_item_as_often_as_the_probit_says():
    problem = Problem(30, 2, 0, 20_000)
    h = problem.new_utility[problem.new_pairs].diff(dim=-1).squeeze(-1).neg()
    assert bool((problem.new_pairs[:, 0] != problem.new_pairs[:, 1]).all())
    p = torch.special.ndtr(h.abs() / 2**0.5)
    error = (p * (1 - p)).sum().sqrt() / len(h)
    assert float((h > 0).double().mean() - p.mean()) == pytest.approx(0, abs=5 * float(error))  # fails once in 1e6


@pytest.mark.slow
def test_every_method_predicts_better_than_a_coin_and_laplace_is_botorchs():
    found = measure(20, 2, 0, 500)
    assert list(found) == list(METHODS)
    assert all(-0.69 < row["log_predictive"] <= found["truth"]["log_predictive"] for row in found.values())
    ours, theirs = (found[name]["log_predictive"] for name in ("Laplace", "PairwiseGP"))
    assert ours == pytest.approx(theirs, abs=0.01)


def test_an_empty_report_is_a_head():
    assert report(Ledger(None)).count("\n") == 1


@pytest.mark.slow
def test_many_comparisons_are_learned_by_minibatches():
    row = measure_many(300, 3000, 15)
    assert row["log predictive"] > -0.65
