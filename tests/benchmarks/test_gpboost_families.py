"""The formulas both packages are scored by are densities, and gpext's side runs without the peer."""

import numpy as np
import pytest
import torch

from benchmarks.gpboost_families import FAMILIES, data_of, main, scores
from gpext.bounds import conditional_log_prob

PARAMETERS = {
    "zero-inflated Poisson": {"p0": 0.3},
    "Tobit": {"sigma": 0.4, "lambda": 1.3},
    "negative binomial": {"shape": 2.0},
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_formulas_are_densities_with_these_means(name):
    family, parameters = FAMILIES[name], PARAMETERS[name]
    if name == "Tobit":
        y = np.concatenate([[0.0], (np.arange(200000) + 0.5) * 5e-5])
        weights = np.concatenate([[1.0], np.full(200000, 5e-5)])
    else:
        y, weights = np.arange(300.0), np.ones(300)
    mass = weights * np.exp(family.log_prob(y, np.full_like(y, 0.4), parameters))
    assert mass.sum() == pytest.approx(1, abs=1e-4)
    mean = family.response_mean(np.array([0.4]), np.array([0.0]), parameters)
    assert mean[0] == pytest.approx((mass * y).sum(), rel=1e-3)


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_likelihoods_of_gpext_have_the_same_density(name):
    family = FAMILIES[name]
    data = data_of(family, 30, 0)
    likelihood, y, read = family.ours(data.y)
    f = np.linspace(-1, 1, 30)
    with torch.no_grad():
        found = conditional_log_prob(likelihood, y, torch.from_numpy(f)).numpy()
        np.testing.assert_allclose(found, family.log_prob(data.y, f, read()), rtol=1e-7, atol=1e-7)
    row = scores(family, data, f, np.full(30, 0.2), {**read(), "unused": 1.0})
    assert np.isfinite([row["log_density"], row["rmse"]]).all()


@pytest.mark.slow
def test_the_side_of_gpext_runs_alone(capsys, tmp_path):
    output = tmp_path / "rows.jsonl"
    assert main(["--quick", "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("gpext, EP") == 4
    assert "GPBoost" not in shown
    assert main(["--report-only", "--output", str(output)]) == 0
    assert capsys.readouterr().out == shown
