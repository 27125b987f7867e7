"""Heteroscedastic models compared: the peer's likelihood is gpext's, and every method runs on generated data."""

import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal

from benchmarks import heteroscedastic
from benchmarks.datasets import load
from gpext.likelihoods import HeteroscedasticGaussianLikelihood


def test_monte_carlo_expectations_of_the_peer_estimate_the_closed_form():
    generator = torch.Generator().manual_seed(0)
    y, mean = torch.randn(4, generator=generator), torch.randn(4, 2, generator=generator)
    variance = torch.tensor([[0.2, 0.1]]).expand(4, 2)
    q = MultitaskMultivariateNormal(mean, torch.diag(variance.reshape(-1)))
    peer = heteroscedastic._MonteCarlo()
    torch.manual_seed(0)
    draws = torch.stack([peer.expected_log_prob(y, q) for _ in range(2000)])  # of ten draws each
    exact = HeteroscedasticGaussianLikelihood().expected_log_density(y, mean.mT, variance.mT)
    z = (draws.mean(0) - exact) / (draws.std(0) / 2000**0.5)
    assert z.square().sum() < 35  # chi-square of 4 degrees: 5e-7


@pytest.mark.slow
def test_every_method_runs_and_the_report_resumes(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(heteroscedastic, "_LONGEST", 20)
    output = tmp_path / "rows.jsonl"
    assert heteroscedastic.main(["--quick", "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    assert all(f"| {method}" in shown for method in heteroscedastic.METHODS)
    assert heteroscedastic.main(["--report-only", "--output", str(output)]) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.slow
def test_scores_are_finite_and_of_the_test_part():
    data = load("synthetic_regression", fold=(0, 5), max_train=60)
    row = heteroscedastic.METHODS["gpext, KL"](data, 0)
    assert row["status"] == "CONVERGED"
    assert 0 <= row["coverage"] * len(data.test_y) <= len(data.test_y)
    assert row["coverage"] * len(data.test_y) == pytest.approx(round(row["coverage"] * len(data.test_y)))
    assert 0.1 < row["rmse"] < 2
