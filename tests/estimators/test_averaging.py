"""The average over hyperparameters of small data: its moments, its curvature, and that files and seeds keep it."""

import gpytorch
import numpy as np
import pytest
import torch

from gpext.estimators import GPRegressor
from gpext.estimators.averaging import DRAWS, Positive, averaged, hyperparameter_draws, members_of
from gpext.estimators.dense_training import evidence_of
from gpext.estimators.models import DenseGP, default_kernel
from gpext.inference import EP, Laplace
from gpext.priors import register_priors
from gpext.training import fit

F64 = torch.float64


def trained(size=40, columns=2):
    torch.manual_seed(0)
    x = torch.randn(size, columns, dtype=F64)
    y = torch.sin(2 * x[:, 0]) + 0.2 * torch.randn(size, dtype=F64)
    model = DenseGP(x, y, gpytorch.likelihoods.GaussianLikelihood(), Laplace(), default_kernel(columns, 0)).to(F64)
    objective = evidence_of(model)
    register_priors(objective)
    fit(objective, x, y, tolerance=1e-9, progress=False)
    return model.eval()


def test_logarithms_of_the_parameters_above_their_bounds():
    model = trained()
    positive = Positive(model)
    phi = positive.get()
    assert len(phi) == 4  # two lengthscales, outputscale, noise
    noise = model.likelihood.noise.detach() - model.likelihood.noise_covar.raw_noise_constraint.lower_bound
    assert any(torch.allclose(value.exp(), noise) for value in phi)
    positive.set(phi + 0.3)
    torch.testing.assert_close(positive.get(), phi + 0.3, rtol=1e-9, atol=1e-9)


def test_the_gradient_is_that_of_differences():
    model = trained().train()
    positive, objective = Positive(model), evidence_of(model)
    phi = positive.get() + 0.1

    def value(at):
        positive.set(at)
        return float(objective(model(*model.train_inputs), model.train_targets).detach()) * len(model.train_targets)

    steps = 1e-5 * torch.eye(len(phi), dtype=F64)
    reference = torch.tensor([(value(phi + step) - value(phi - step)) / 2e-5 for step in steps])
    torch.testing.assert_close(positive.gradient(objective, phi), reference.to(F64), rtol=1e-5, atol=1e-5)


def test_draws_come_in_pairs_about_the_trained_parameters_and_leave_the_model_as_it_is():
    model = trained()
    before = Positive(model).get()
    draws = hyperparameter_draws(model, Laplace(), seed=0)
    assert draws.shape == (DRAWS, len(before))
    torch.testing.assert_close(draws.mean(0), before)
    assert torch.equal(Positive(model).get(), before)
    assert torch.equal(draws, hyperparameter_draws(model, Laplace(), seed=0))


def test_a_model_without_positive_parameters_has_no_draws():
    model = trained()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert members_of(model, hyperparameter_draws(model, Laplace(), seed=0)) == []


def test_moments_are_those_of_the_mixture():
    model = trained()
    members = members_of(model, hyperparameter_draws(model, Laplace(), seed=0))
    assert len(members) == DRAWS
    x = torch.randn(5, 2, dtype=F64)
    with torch.no_grad():
        found = [member(x) for member in members]
        second = torch.stack([q.covariance_matrix + torch.outer(q.mean, q.mean) for q in found]).mean(0)
        mean = torch.stack([q.mean for q in found]).mean(0)
        jointly, apart = averaged(members, x, jointly=True), averaged(members, x, jointly=False)
    torch.testing.assert_close(jointly.mean, mean)
    torch.testing.assert_close(jointly.covariance_matrix, second - torch.outer(mean, mean))
    torch.testing.assert_close(apart.mean, mean)
    torch.testing.assert_close(apart.variance, jointly.variance)


def data():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((60, 4))
    return X, X[:, 0] + 0.3 * rng.standard_normal(60)


def test_draws_whose_inference_does_not_converge_are_left_out():
    model = trained()
    draws = hyperparameter_draws(model, Laplace(), seed=0)
    model.inference = EP(max_steps=1)
    assert members_of(model, draws) == []
    model.inference = EP()
    assert [member.inference.max_steps for member in members_of(model, draws)] == [100] * DRAWS


def test_few_rows_are_averaged_and_said():
    X, y = data()
    found = GPRegressor(noise="gaussian").fit(X, y)
    assert any("averages over 8 draws" in choice for choice in found.report_.choices)
    alone = GPRegressor(noise="gaussian", priors=False).fit(X, y)
    assert not any("averages" in choice for choice in alone.report_.choices)
    _, mine = found.predict(X, return_std=True)
    by_members = [found.likelihood_(member(torch.from_numpy((X - X.mean(0)) / X.std(0)))) for member in found._members]
    assert (mine**2 > 0.9 * y.var() * np.mean([q.variance.detach().numpy() for q in by_members], 0)).all()


@pytest.mark.parametrize("estimator", [GPRegressor(noise="student_t"), GPRegressor(noise="gaussian")])
def test_a_file_keeps_the_average(estimator, tmp_path):
    X, y = data()
    estimator.fit(X, y)
    assert len(estimator._members) == DRAWS
    estimator.save(tmp_path / "model.pt")
    again = type(estimator).load(tmp_path / "model.pt")
    np.testing.assert_allclose(again.log_density(X, y), estimator.log_density(X, y), rtol=1e-6, atol=1e-8)
