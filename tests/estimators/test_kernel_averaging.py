"""Predictions of few rows are averages over kernels: which ones, when, and with which weights."""

import numpy as np
import pandas as pd
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from scipy.optimize import minimize

from gpext.estimators import GPClassifier, GPRegressor
from gpext.estimators.averaging import stacking_weights
from gpext.estimators.models import plain_kernels
from gpext.inference import EP
from gpext.likelihoods import StudentTLikelihood

RNG = np.random.default_rng(0)
X = RNG.standard_normal((90, 3))
NUMBERS = X[:, 0] + np.sin(2 * X[:, 1]) + 0.5 * RNG.standard_normal(90)
Y = NUMBERS > 0
ROUGH = 0.01  # nats a datum, to which the other kernels are trained


def probabilities(model, table, process):
    """The probabilities of one kernel alone."""
    return model._by_rows(lambda x: model._probabilities(process(x)), model._inputs(table))


def test_probabilities_are_the_mean_over_three_kernels():
    model = GPClassifier().fit(X, Y)
    assert len(model._others) == 2
    rough = [GPClassifier(kernel=kernel, tolerance=ROUGH) for kernel in plain_kernels(3, 0).values()]
    alone = [each.fit(X, Y).predict_proba(X) for each in rough]
    first = probabilities(model, X, model.model_)
    expected = (first + sum(alone)) / 3
    np.testing.assert_allclose(model.predict_proba(X), expected, atol=1e-3)
    np.testing.assert_allclose(model.predict_proba(X).sum(1), 1)
    assert np.abs(first - expected).max() > 0.01
    chosen = model.predict_proba(X)[np.arange(len(Y)), Y.astype(int)]
    np.testing.assert_allclose(model.log_density(X, Y), np.log(chosen))
    told = "averages with those of other kernels: 0.33 of one lengthscale, 0.33 of one lengthscale and a linear"
    assert told in str(model.report_)


def test_the_other_kernels_are_of_standardised_columns_together():
    single, linear = plain_kernels(4, 1).values()
    assert single.base_kernel.kernels[0].lengthscale.numel() == 1
    x = np.eye(5)[:2]
    both, one = (kernel.double()(torch.tensor(x)).to_dense() for kernel in (linear, single))
    scale = linear.kernels[1].outputscale.item()
    np.testing.assert_allclose((both - one).detach().numpy(), scale * x[:, :4] @ x[:, :4].T / 4, atol=1e-12)
    diagonal = linear.double()(torch.tensor(x), diag=True)
    np.testing.assert_allclose(diagonal.detach().numpy(), both.diagonal().detach().numpy(), atol=1e-12)


@pytest.mark.parametrize(
    ("options", "x", "y"),
    [
        ({"kernel": ScaleKernel(RBFKernel())}, X, Y),
        ({"priors": False}, X, Y),
        ({"inducing_points": 8}, X, Y),
        ({}, X[:, :1], Y),
        ({}, X, np.digitize(X[:, 0], [-0.5, 0.5])),
        ({}, np.tile(X, (4, 1)) + RNG.standard_normal((360, 3)), np.tile(Y, 4)),
    ],
    ids=["a kernel", "no priors", "inducing points", "one column", "three classes", "many rows"],
)
def test_others_have_one_kernel(options, x, y):
    model = GPClassifier(**options).fit(x, y)
    assert model._others == []
    assert "averages" not in str(model.report_)
    model.predict_proba(x[:2])


def test_categories_are_a_part_of_every_kernel():
    table = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "kind": np.where(X[:, 2] > 0, "up", "down")})
    model = GPClassifier().fit(table, (X[:, 2] > 0) ^ (RNG.random(90) < 0.1))
    up, down = (table.assign(kind=kind) for kind in ("up", "down"))
    for other in [model.model_, *model._others]:
        p_up, p_down = (probabilities(model, each, other) for each in (up, down))
        assert p_up[:, 1].mean() > p_down[:, 1].mean() + 0.3


def test_another_fit_forgets_the_average():
    model = GPClassifier().fit(X, Y)
    model.set_params(priors=False).fit(X, Y)
    assert model._others == []


def test_densities_of_numbers_are_a_mixture_of_those_of_three_kernels():
    model = GPRegressor("student_t").fit(X, NUMBERS)
    assert len(model._others) == 2
    alone = [GPRegressor("student_t", kernel=kernel, tolerance=ROUGH) for kernel in plain_kernels(3, 0).values()]
    alone = [each.fit(X, NUMBERS) for each in alone]
    for other, each in zip(model._others, alone, strict=True):
        assert other.result.log_loo.mean() == pytest.approx(each.model_.result.log_loo.mean().item(), abs=ROUGH)
    targets = torch.from_numpy((NUMBERS - model._center) / model._scale)

    def density(likelihood, q):
        return likelihood(q).log_prob(targets).exp().detach().numpy() / model._scale

    inputs = model._inputs(X)
    with torch.no_grad():
        parts = [density(model.likelihood_, model._latent(inputs))]
        parts += [density(other.likelihood, other(inputs)) for other in model._others]
    expected = np.average(parts, 0, model._weights)
    np.testing.assert_allclose(np.exp(model.log_density(X, NUMBERS)), expected, rtol=1e-10)
    low, high = model.predict_interval(X, 0.5).T
    covered = [
        model._predictive(inputs, inputs[:, 0]).cdf(torch.from_numpy(end).to(inputs))
        for end in ((low - model._center) / model._scale, (high - model._center) / model._scale)
    ]
    torch.testing.assert_close(covered[1] - covered[0], torch.full_like(covered[0], 0.5))


def test_draws_of_numbers_are_of_the_mixture():
    """The mean of S independent draws has deviation sigma / sqrt(S) about the predictive mean."""
    model = GPRegressor("gaussian").fit(X, NUMBERS)
    model._weights = np.array([0.2, 0.5, 0.3])  # more of the others than stacking gives them
    draws = model.sample_y(X[:5], 20_000, random_state=0)
    mean, deviation = model.predict(X[:5], return_std=True)
    z = (draws.mean(1) - mean) / deviation * np.sqrt(20_000)
    assert np.abs(z).max() < 4.5
    np.testing.assert_allclose(draws.std(1), deviation, rtol=0.03)


def test_stacking_weights_are_the_optimum():
    """Of sum_i log sum_j w_j p_ij + sum_j log w_j, by another optimiser; data without a density are left out."""
    log_densities = torch.from_numpy(RNG.standard_normal((3, 40)) + np.array([[0.0], [0.5], [-3.0]]))
    weights = stacking_weights(log_densities)

    def lost(free):
        log_w = torch.log_softmax(torch.tensor([0.0, *free], dtype=torch.float64), 0)
        return -float(torch.logsumexp(log_densities + log_w.unsqueeze(-1), 0).sum() + log_w.sum())

    best = torch.softmax(torch.tensor([0.0, *minimize(lost, [0.0, 0.0], tol=1e-12).x]), 0)
    torch.testing.assert_close(weights, best.to(weights), atol=1e-4, rtol=0)
    torch.testing.assert_close(stacking_weights(torch.zeros(2, 5).double()), torch.full((2,), 0.5).double())
    spoiled = torch.cat([log_densities, torch.tensor([[0.0], [float("nan")], [0.0]])], 1)
    torch.testing.assert_close(stacking_weights(spoiled), weights)


@pytest.mark.parametrize(
    ("options", "x"),
    [
        ({"kernel": ScaleKernel(RBFKernel())}, X),
        ({"priors": False}, X),
        ({"noise": "heteroscedastic"}, X),
        ({"noise": StudentTLikelihood()}, X),
        ({"inducing_points": 8}, X),
        ({}, X[:, :1]),
    ],
    ids=["a kernel", "no priors", "two latents", "a likelihood", "inducing points", "one column"],
)
def test_other_regressions_have_one_kernel(options, x):
    model = GPRegressor(**options).fit(x, NUMBERS)
    assert model._others == []
    assert "other kernels" not in str(model.report_)
    model.predict(x[:2])


@pytest.mark.filterwarnings("ignore::gpext.inference.InferenceWarning")
def test_a_kernel_without_a_posterior_has_no_weight():
    model = GPRegressor("student_t").fit(X, NUMBERS)
    before = model.predict(X[:3])
    other = model._others[0]
    other.inference = EP(max_steps=1)
    other.set_train_data(other.train_inputs[0], other.train_targets)  # the sites begin anew
    model._weights = model._weigh_others()
    assert model._weights[1] == 0
    assert model._weights.sum() == pytest.approx(1)
    assert np.isfinite(model.predict(X[:3])).all()
    assert not np.array_equal(model.predict(X[:3]), before)


def test_a_file_keeps_the_mixture(tmp_path):
    model = GPRegressor("gaussian").fit(X, NUMBERS)
    model.save(tmp_path / "model.pt")
    again = GPRegressor.load(tmp_path / "model.pt")
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    np.testing.assert_array_equal(again.predict_quantiles(X[:4]), model.predict_quantiles(X[:4]))
