"""The benchmark of honest endings runs at its quick size, and detects wrong endings."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import honest_endings, honest_problems
from benchmarks.honest_problems import FAMILIES, random_problem
from gpext import FitStatus
from gpext.inference import Status
from tests.members import F64

pytestmark = pytest.mark.slow


def test_a_problem_is_a_function_of_its_seed():
    one, other = random_problem(7), random_problem(7)
    assert (one.family, one.rule_name) == (other.family, other.rule_name)
    assert torch.equal(one.targets, other.targets)
    assert torch.equal(one.covariance, other.covariance)


def test_every_likelihood_meets_every_rule_that_serves_it():
    met = {(problem.family, problem.rule_name) for problem in map(random_problem, range(1500))}
    assert met == {(name, rule) for name, family in FAMILIES.items() for rule in family.rules}


def test_the_quick_size_is_honest(capsys):
    ledger = honest_endings.main(["--quick", "--first", "0"])
    rows = ledger.of("problem ") + ledger.of("fit ")
    assert len(rows) == honest_endings.QUICK + honest_endings.QUICK_FITS
    broken = {row["key"]: (row["broken"], row.get("error")) for row in rows if set(row["broken"]) - {"slow"}}
    assert not broken  # the time of a call is not tested
    printed = capsys.readouterr().out
    assert f"{honest_endings.QUICK} problems" in printed
    assert f"{honest_endings.QUICK_FITS} trainings" in printed


def test_the_exact_evidence_is_that_of_a_grid():
    problem = next(
        p for p in map(random_problem, range(1000)) if p.rank_one and p.family == "poisson" and len(p.mean) > 2
    )
    problem = replace(problem, mean=problem.mean.double(), covariance=torch.ones_like(problem.covariance).double())
    problem = replace(problem, targets=torch.ones_like(problem.mean))
    f = torch.linspace(-12, 12, 200_001, dtype=F64)
    log_prior = -0.5 * (f - problem.mean[0]).square() - 0.5 * math.log(2 * math.pi)
    total = torch.logsumexp(len(problem.mean) * (f - f.exp()) + log_prior, 0) + math.log(24 / 200_000)
    assert honest_endings.exact_evidence(problem, problem.mean[:1]) == pytest.approx(float(total), abs=1e-8)


class Faulty:
    """A rule whose outcome a test chooses."""

    def __init__(self, outcome):
        self.outcome = outcome

    def __call__(self):
        return self

    def infer(self, prior, likelihood, targets):
        return self.outcome()


def result(evidence, status, problem):
    none = torch.zeros_like(problem.mean)
    return SimpleNamespace(
        log_evidence=torch.tensor(evidence, dtype=F64),
        status=status,
        num_steps=1,
        log_loo=none,
        loo_tail=none,
        posterior=SimpleNamespace(mean=none, variance=none + 1),
    )


def fail():
    raise ZeroDivisionError("as asked")


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (fail, "exception"),
        (lambda: result(math.inf, Status.STALLED, PROBLEM), "infinite"),
        (lambda: result(math.nan, Status.CONVERGED, PROBLEM), "converged_nan"),
        (lambda: result(-math.inf, Status.NOT_POSITIVE_DEFINITE, PROBLEM), "lost"),
        (lambda: result(1e6, Status.CONVERGED, PROBLEM), "order"),
    ],
)
def test_what_is_not_honest_is_seen(monkeypatch, outcome, expected):
    monkeypatch.setitem(honest_problems.RULES, PROBLEM.rule_name, Faulty(outcome))
    assert [kind.split()[0] for kind in honest_endings.judge(PROBLEM)["broken"]] == [expected]


PROBLEM = next(
    p for p in map(random_problem, range(3000)) if p.rank_one and p.rule_name == "kl" and p.family == "bernoulli_logit"
)


class FaultyTraining:
    """A training whose outcome a test chooses."""

    family, rule_name, kind, x = "poisson", "kl", "dense", torch.zeros(3, 1)

    def __init__(self, status, objective, predicted, parameter):
        self.result = SimpleNamespace(status=status, num_steps=1, objective=objective)
        moments = torch.full((3,), predicted)
        model = SimpleNamespace(eval=lambda: lambda _x: SimpleNamespace(mean=moments, variance=moments))
        self.mll = SimpleNamespace(model=model, parameters=lambda: [torch.tensor(parameter)])

    def fit(self, callback):
        callback(1, self.result.objective)
        return self.result


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        (FaultyTraining(FitStatus.CONVERGED, -1.0, 0.0, 1.0), []),
        (FaultyTraining(FitStatus.CONVERGED, -1.0, math.nan, 1.0), ["converged_nan"]),
        (FaultyTraining(FitStatus.CONVERGED, -1.0, 0.0, math.nan), ["converged_nan"]),
        (FaultyTraining(FitStatus.MAX_STEPS, math.nan, 0.0, 1.0), ["converged_nan"]),
        (FaultyTraining(FitStatus.NO_POSTERIOR, -math.inf, math.nan, 1.0), ["lost"]),
        (FaultyTraining(FitStatus.CONVERGED, math.inf, 0.0, 1.0), ["infinite", "converged_nan"]),
    ],
)
def test_what_is_not_honest_in_a_training_is_seen(training, expected):
    assert honest_endings.judge_fit(training)["broken"] == expected
