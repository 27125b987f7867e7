"""The comparison with lifelines: the same coefficients and standard errors, and a report of what there is."""

import numpy as np
import pytest

from benchmarks import survival
from benchmarks.datasets import load
from benchmarks.ledger import Ledger


@pytest.mark.slow
def test_linear_effects_are_cox_estimates():
    lifelines = pytest.importorskip("lifelines")
    assert lifelines is survival.lifelines()
    theirs = survival.effects_by_lifelines("synthetic_survival")
    ours = survival.effects_by_gpext("synthetic_survival", "Laplace", 50)
    assert ours["status"] == "CONVERGED"
    np.testing.assert_allclose(ours["mean"], theirs["mean"], atol=0.1 * np.min(theirs["sd"]))
    np.testing.assert_allclose(ours["sd"], theirs["sd"], rtol=0.02)


@pytest.mark.slow
def test_rules_agree_on_the_effects():
    """With 300 events the posterior is nearly Gaussian."""
    laplace, kl = (survival.effects_by_gpext("synthetic_survival", rule, 5) for rule in ("Laplace", "KL"))
    np.testing.assert_allclose(laplace["mean"], kl["mean"], atol=0.1 * np.min(kl["sd"]))
    np.testing.assert_allclose(laplace["sd"], kl["sd"], rtol=0.02)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:A not p.d.")  # linear kernels have low rank
def test_scores_are_those_of_the_test_part():
    ledger = Ledger(None)
    name = "gpext, piecewise GP, additive"
    row = ledger.get("held-out/synthetic_survival/a/0", lambda: survival.held_out("synthetic_survival", name, 0, 2))
    assert len(row["log_density"]) == len(load("synthetic_survival", fold=(0, 5)).test_y)
    assert 0.5 < row["concordance"] < 1
    assert f"| {name} | {np.mean(row['log_density']):.3f}" in survival.report(ledger)
