"""The reference of the table of rules against algebra, and the signs of its errors."""

import math

import gpytorch
import torch

from benchmarks.ledger import Ledger
from benchmarks.likelihood_rules import ENTRIES, PAIR, RULES, exact, measured, report
from tests.members import F64, tensor


def test_the_reference_is_the_evidence_of_a_gaussian():
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    y = tensor(0.3, -1.1)
    covariance = PAIR + likelihood.noise.detach() * torch.eye(2, dtype=F64)
    expected = torch.distributions.MultivariateNormal(torch.zeros(2, dtype=F64), covariance).log_prob(y)
    assert abs(exact(likelihood, y) - float(expected)) < 1e-10


def test_bounds_are_below_and_what_is_not_served_says_so():
    covariance = torch.eye(5, dtype=F64)
    for name in ("Poisson", "Censored(Gaussian)", "Mixed(Poisson, BernoulliLogit)"):
        row = measured(ENTRIES[name], RULES["KL"], covariance, 1)
        assert -1 < row["error"] < 0
        assert row["status"] == "CONVERGED"
    assert "augmentation" in measured(ENTRIES["Poisson"], RULES["CAVI"], covariance, 1)["refused"]
    empty = report(Ledger(None))
    assert empty.count("\n") == len(ENTRIES) + 1
    assert not math.isnan(measured(ENTRIES["Laplace"], RULES["EP"], covariance, 1)["error"])
