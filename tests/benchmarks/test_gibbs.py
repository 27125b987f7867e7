"""The Gibbs benchmark at its smallest size: every part runs, and its claims are checked."""

import gzip

import pytest
import torch
from gpytorch.distributions import MultivariateNormal

from benchmarks import gibbs_baselines, gibbs_mixing
from benchmarks.gibbs_baselines import Sampled, noise_by_scale_mixture, sample_by_pyro
from benchmarks.gibbs_mixing import diagnose
from gpext.likelihoods import StudentTLikelihood
from gpext.posteriors import DensePrior
from gpext.samplers import GibbsSampler

pytestmark = pytest.mark.slow

F64 = torch.float64


def problem():
    x = torch.linspace(0, 2, 8, dtype=F64)
    covariance = torch.exp(-0.5 * (x.unsqueeze(-1) - x) ** 2) + 1e-6 * torch.eye(8, dtype=F64)
    return MultivariateNormal(torch.zeros_like(x), covariance), torch.sin(3 * x)


@pytest.mark.parametrize("method", ["HMC", "MH"])
def test_baselines_sample_the_same_posterior(method, monkeypatch):
    monkeypatch.setattr(gibbs_baselines, "_PILOT", 30)
    prior, y = problem()
    likelihood = StudentTLikelihood().double().requires_grad_(False)
    draws = 150 if method == "HMC" else 1500
    found = sample_by_pyro(method, prior, likelihood, y, num_samples=draws, num_chains=2, warmup=30, seed=0)
    assert found.latent.shape == (2, draws, 8)
    assert found.seconds > 0
    exact = GibbsSampler(prior, likelihood, y).run(2000, generator=torch.Generator().manual_seed(0), progress=False)
    assert (found.latent.mean((0, 1)) - exact.latent.mean((0, 1))).abs().max() < 0.5


@pytest.mark.parametrize("expanded", [False, True])
def test_the_scale_mixture_has_the_same_noise_scale(expanded):
    prior, y = problem()
    dense = DensePrior.of(prior.mean, prior.covariance_matrix, 0.0)
    data = y + torch.randn(30, 8, dtype=F64, generator=torch.Generator().manual_seed(0))[0]
    options = {"num_samples": 1500, "num_chains": 20, "warmup": 200, "seed": 0}
    found = noise_by_scale_mixture(dense, data, 4.0, expanded=expanded, **options)
    # Quadrature over log s of the Student-t posterior of f, which is computed by importance sampling from the prior.
    f = prior.rsample(torch.Size((20_000,)))
    log_s = torch.linspace(-4, 3, 141, dtype=F64)
    log_p = torch.stack([torch.distributions.StudentT(4.0, f, s.exp()).log_prob(data).sum(-1) for s in log_s])
    weight = torch.softmax(torch.logsumexp(log_p, -1), 0)
    assert float((weight * log_s).sum()) == pytest.approx(float(found.latent.mean()), abs=0.06)


def test_independent_draws_are_worth_what_they_are():
    draws = torch.randn(4, 2000, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    row = diagnose(Sampled(draws, 2.0))
    assert row["ess"] == pytest.approx(8000, rel=0.1)
    assert row["ms"] == pytest.approx(0.25)
    assert abs(row["lag1"]) < 0.05
    assert row["per_second"] == row["ess"] / 2


@pytest.mark.filterwarnings("default")  # Pyro's and ArviZ's own warnings at such sizes
def test_runs_and_resumes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gibbs_baselines, "_PILOT", 10)
    for name, modulus in (("boston_housing", 7), ("heart_cleveland", 2)):  # in the format of the real ones
        rows = "\n".join(f"{k % 5},{k * k % 11},{k % modulus}" for k in range(20))
        (tmp_path / f"{name}.csv.gz").write_bytes(gzip.compress(f"a,b,y\n{rows}\n".encode()))
    monkeypatch.setenv("GPEXT_DATA", str(tmp_path))
    arguments = ["--quick", "--output", str(tmp_path / "rows.jsonl")]
    assert gibbs_mixing.main(arguments) == 0
    table = capsys.readouterr().out
    assert table.count("| Gibbs |") == 4
    assert "w integrated out" in table
    assert gibbs_mixing.main([*arguments, "--report-only"]) == 0
    assert capsys.readouterr().out == table
