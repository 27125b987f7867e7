"""The log posterior of hyperparameters against a density written by hand."""

import copy

import gpytorch
import numpy as np
import pytest
import torch

from gpext.mlls import UnbiasedMarginalLogLikelihood
from gpext.samplers import LogPosterior
from tests.samplers.hyper_cases import F64, QuickLogPosterior, log_density, problem
from tests.statistics import misfit

POINTS = torch.tensor([[-2.0, 0.3], [0.5, -1.0], [-5.0, 2.0], [1.5, 1.5]], dtype=F64)


def by_hand(mll, raw):
    return log_density(raw.numpy(), mll.model.train_inputs[0].numpy(), mll.model.train_targets.numpy())


def test_the_value_is_the_density_in_raw_space():
    mll = problem()
    target = LogPosterior(mll)
    assert [slot.name for slot in target.moved.slots] == ["likelihood.noise_covar.noise", "covar_module.lengthscale"]
    ours, hand = (np.array([value(raw) for raw in POINTS]) for value in (target.value, lambda raw: by_hand(mll, raw)))
    np.testing.assert_allclose(ours - ours[0], hand - hand[0], rtol=1e-10)
    assert ours[0] == pytest.approx(hand[0], abs=3e-9)  # gpytorch normalises its LogNormalPrior in single precision


def test_the_quick_density_of_other_tests_is_the_same_up_to_a_constant():
    slow, quick = LogPosterior(problem()), QuickLogPosterior(problem())
    gaps = [slow.value(raw) - quick.value(raw) for raw in POINTS]
    np.testing.assert_allclose(gaps, gaps[0], atol=1e-6)


@pytest.mark.parametrize("raw", POINTS)
def test_the_gradient_is_its_derivative(raw):
    mll = problem()
    gradient, step = LogPosterior(mll).gradient(raw), 1e-5
    for j in range(2):
        shift = torch.zeros(2, dtype=F64)
        shift[j] = step
        slope = (by_hand(mll, raw + shift) - by_hand(mll, raw - shift)) / (2 * step)
        assert float(gradient[j]) == pytest.approx(slope, rel=1e-6, abs=1e-7)


def test_in_logarithms_it_is_the_same_density_with_their_jacobian():
    plain, logs = LogPosterior(problem()), LogPosterior(problem(), logarithms=True)
    for raw in POINTS:
        theta = torch.cat([each.flatten() for each in plain.moved.constrained(raw).values()])
        bounds = torch.stack([slot.constraint.lower_bound.double() for slot in plain.moved.slots])
        x = (theta - bounds).log()
        value = plain.value(raw) - torch.nn.functional.logsigmoid(raw).sum() + x.sum()
        assert logs.value(x) == pytest.approx(float(value), abs=1e-6)
        gradient, step = logs.gradient(x), 1e-5
        for j in range(2):
            shift = step * torch.eye(2, dtype=F64)[j]
            slope = (logs.value(x + shift) - logs.value(x - shift)) / (2 * step)
            assert float(gradient[j]) == pytest.approx(slope, rel=1e-5, abs=1e-6)


def test_float32_follows_float64():
    raw = POINTS[0]
    single, double = LogPosterior(problem(torch.float32)), LogPosterior(problem())
    assert single.value(raw) == pytest.approx(double.value(raw), rel=1e-4)
    assert single.gradient(raw).dtype == F64
    torch.testing.assert_close(single.gradient(raw), double.gradient(raw), rtol=1e-3, atol=1e-3)


def test_the_model_that_was_given_stays_as_it_is():
    mll = problem()
    mll.eval()
    before = copy.deepcopy(mll.state_dict())
    target = LogPosterior(mll)
    target.gradient(POINTS[0])
    assert not mll.training
    assert all(torch.equal(mll.state_dict()[name], value) for name, value in before.items())
    assert mll.model.covar_module.raw_lengthscale.grad is None


def test_only_the_parameters_that_are_named_move():
    target = LogPosterior(problem(), ["covar_module.lengthscale"])
    noise = target.model.likelihood.noise.item()
    target.value(torch.tensor([1.0], dtype=F64))
    assert target.gradient(torch.tensor([1.0], dtype=F64)).shape == (1,)
    assert target.model.likelihood.noise.item() == noise


def test_beyond_gpytorchs_limit_for_factorisations_the_value_is_still_exact():
    mll = problem(size=40)
    with gpytorch.settings.max_cholesky_size(10), gpytorch.settings.cg_tolerance(1.0):
        value = LogPosterior(mll).value(POINTS[0])
    assert value == pytest.approx(by_hand(mll, POINTS[0]), abs=3e-9)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -800.0])  # the softplus of the last is zero
def test_where_there_is_no_model_the_probability_is_zero(poison):
    mll = problem()
    target = LogPosterior(mll)
    raw = torch.tensor([0.0, poison], dtype=F64)
    assert target.value(raw) == -torch.inf
    with pytest.raises(FloatingPointError, match="not finite"):
        target.gradient(raw)


def test_a_covariance_that_cannot_be_factorised_has_probability_zero(monkeypatch):
    target = LogPosterior(problem())
    indefinite = torch.eye(12, dtype=F64) - torch.ones(12, 12, dtype=F64)
    monkeypatch.setattr(target.model.covar_module, "forward", lambda x1, x2, **_: 100 * indefinite)
    assert target.value(POINTS[0]) == -torch.inf


def test_an_unbiased_gradient_is_right_on_average_and_follows_its_generator():
    exact = problem()
    target = LogPosterior(UnbiasedMarginalLogLikelihood(exact.likelihood, exact.model, 2))
    generator = torch.Generator().manual_seed(1)
    estimates = torch.stack([target.gradient(POINTS[0], generator=generator) for _ in range(200)])
    assert misfit(estimates, LogPosterior(exact).gradient(POINTS[0])) < 1
    again = target.gradient(POINTS[0], generator=torch.Generator().manual_seed(1))
    assert torch.equal(again, estimates[0])


def test_bad_input():
    mll = problem()
    with pytest.raises(TypeError, match=r"GibbsSampler.*latent_model"):
        LogPosterior(gpytorch.mlls.VariationalELBO(mll.likelihood, mll.model, 12))
    with pytest.raises(ValueError, match=r"covar_module\.lengthscale"):
        LogPosterior(mll, ["lengthscale"])
    mll.requires_grad_(False)
    with pytest.raises(ValueError, match="none requires gradients"):
        LogPosterior(mll)
