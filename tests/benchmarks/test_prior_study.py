"""The study of priors: leave-one-out densities, ranks, and a run on generated data."""

import gpytorch
import pytest
import torch

from benchmarks.prior_study import VARIANTS, _Exact, _ranks, leave_one_out, main, measured
from tests.members import F64


def test_leave_one_out_is_that_of_models_without_a_datum():
    x = torch.linspace(0, 3, 7, dtype=F64).unsqueeze(-1)
    y = torch.sin(2 * x[:, 0])
    model = _Exact(x, y, gpytorch.likelihoods.GaussianLikelihood())
    found = []
    for index in range(7):
        kept = torch.arange(7) != index
        other = _Exact(x[kept], y[kept], gpytorch.likelihoods.GaussianLikelihood()).eval()
        with torch.no_grad():
            one = other.likelihood(other(x[[index]]))
        found.append(torch.distributions.Normal(one.mean, one.stddev).log_prob(y[index]).item())
    assert leave_one_out(model) == pytest.approx(sum(found) / 7, abs=1e-8)


def test_equal_values_share_their_ranks():
    assert _ranks([1.0, 3.0, 1.0, 2.0]).tolist() == [3.5, 1.0, 3.5, 2.0]


def test_without_noise_variants_that_differ_in_its_prior_are_one():
    names = {measured("synthetic_binary", label) for label in VARIANTS}
    assert len(names) == 7
    assert all(measured("diabetes", label) == label for label in VARIANTS)


@pytest.mark.slow
def test_a_quick_run_has_every_variant():
    rows = main(["--quick"]).rows
    assert len(rows) == len(VARIANTS) + 7
    assert all(row["log_density"] > -3 for row in rows.values())
