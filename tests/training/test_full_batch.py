"""Before hyperparameters are learned there is a q(u) of many data, which does not affect the training after it."""

import copy
import math

import pytest
import torch
from gpytorch.mlls import VariationalELBO

from gpext import FitStatus, fit
from gpext.likelihoods import BernoulliLogitLikelihood
from gpext.mlls import AugmentedELBO
from gpext.training import full_batch
from gpext.variational import CollapsedBound
from tests.members import F64
from tests.sparse_models import SparseGP

FIRST = 1000
BOUNDS = {"augmented": AugmentedELBO, "exact": VariationalELBO}


def problem(num_data, dtype=F64):
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(num_data, 1, generator=generator, dtype=F64)
    y = (torch.rand(num_data, generator=generator, dtype=F64) < torch.sigmoid(3 * torch.sin(2 * x[:, 0]))).to(F64)
    model = SparseGP(torch.linspace(0, 4, 10, dtype=dtype).unsqueeze(-1))
    return AugmentedELBO(BernoulliLogitLikelihood().to(dtype), model, num_data=num_data), x.to(dtype), y.to(dtype)


def in_order(x, y):
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    return x[order], y[order]


def values(mll):
    return [p.detach().clone() for p in mll.parameters()]


def assert_close(actual, expected, tolerance=1e-10):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize(("num_data", "ahead"), [(4200, 4200), (12000, 10000)])
def test_the_first_two_states_are_closed_forms_at_the_hyperparameters_given(num_data, ahead, bound):
    mll, x, y = problem(num_data)
    expected, likelihood = copy.deepcopy(mll.model), mll.likelihood
    seen = []
    fit(
        mll,
        x,
        y,
        hyperparameters=bound,
        progress=False,
        callback=lambda step, value: seen.append((value, copy.deepcopy(mll.model))) or step == 2,
    )
    x, y = in_order(x, y)
    for size, (value, found) in zip((FIRST, ahead), seen, strict=True):
        expected.train().base.update(x[:size], y[:size], likelihood)  # the best sites at the marginals so far
        expected.base.update(x[:size], y[:size], likelihood, bound=bound)
        assert_close(found.parameters(), expected.parameters())
        elbo = BOUNDS[bound](likelihood, expected, num_data=size)
        assert value == pytest.approx(elbo(expected(x[:size]), y[:size]).item(), abs=1e-10)


def learned_from_the_start(sizes, stage_of):
    for size in sizes:
        yield stage_of(size, is_last=size == sizes[-1]), True


def test_what_is_learned_is_what_the_subsets_teach_bit_for_bit(monkeypatch):
    results = []
    for extra in (1, 0):  # one of the steps is in q(u) alone
        mll, x, y = problem(12000)
        trace = fit(mll, x, y, max_steps=30 + extra, progress=False).trace.tolist()
        results.append((trace[:1] + trace[1 + extra :], values(mll)))
        monkeypatch.setattr(full_batch, "_stages", learned_from_the_start)
    (trace, found), (same_trace, same) = results
    assert trace == same_trace
    assert all(torch.equal(a, b) for a, b in zip(found, same, strict=True))


@pytest.mark.parametrize(
    ("num_data", "sizes"), [(2000, [2000]), (2001, [1000, 2001, 2001]), (12000, [1000, 10000, 3464, 12000])]
)
def test_how_many_data_are_seen_in_turn(num_data, sizes, monkeypatch):
    made = []

    class Noted(CollapsedBound):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            made.append(self.num_data)

    monkeypatch.setattr(full_batch, "CollapsedBound", Noted)
    mll, x, y = problem(num_data)
    fit(mll, x, y, tolerance=1e-2, progress=False)
    assert made == sizes


@pytest.mark.parametrize("how", ["callback", "max_steps"])
def test_who_stops_there_has_the_q_of_those_data(how):
    mll, x, y = problem(4200)
    options = {"callback": lambda step, value: step == 2} if how == "callback" else {"max_steps": 2}
    result = fit(mll, x, y, progress=False, **options)
    assert result.status is {"callback": FitStatus.STOPPED, "max_steps": FitStatus.MAX_STEPS}[how]
    elbo = VariationalELBO(mll.likelihood, mll.model.train(), num_data=4200)
    assert result.objective == pytest.approx(elbo(mll.model(x), y).item(), abs=1e-10)
    assert result.objective > result.trace[1]


def test_data_that_the_hyperparameters_given_cannot_serve_wait(monkeypatch):
    evaluate = CollapsedBound.evaluate

    def evaluated(self, *, gradient=True):
        if self.num_data == 10000:
            raise torch.linalg.LinAlgError("the marginals of q(f) have lost their digits")
        return evaluate(self, gradient=gradient)

    mll, x, y = problem(12000)
    expected = fit(copy.deepcopy(mll), x, y, max_steps=21, progress=False)
    monkeypatch.setattr(CollapsedBound, "evaluate", evaluated)
    result = fit(mll, x, y, max_steps=20, progress=False)
    assert result.status is expected.status
    assert result.trace.tolist() == [*expected.trace[:1].tolist(), *expected.trace[2:].tolist()]
    assert math.isclose(result.objective, expected.objective)
