"""Classifiers of few rows average their probabilities over kernels: which ones, when, and with what."""

import numpy as np
import pandas as pd
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

from gpext.estimators import GPClassifier
from gpext.estimators.models import plain_kernels

RNG = np.random.default_rng(0)
X = RNG.standard_normal((90, 3))
Y = X[:, 0] + np.sin(2 * X[:, 1]) + 0.5 * RNG.standard_normal(90) > 0


def test_probabilities_are_the_mean_over_three_kernels():
    model = GPClassifier().fit(X, Y)
    assert len(model._others) == 2
    alone = [GPClassifier(kernel=kernel).fit(X, Y).predict_proba(X) for kernel in plain_kernels(3, 0).values()]
    first = model._by_rows(model._inputs(X), model._probabilities)
    expected = (first + sum(alone)) / 3
    np.testing.assert_allclose(model.predict_proba(X), expected, atol=1e-3)  # two trainings, to their tolerance
    np.testing.assert_allclose(model.predict_proba(X).sum(1), 1)
    assert np.abs(first - expected).max() > 0.01
    chosen = model.predict_proba(X)[np.arange(len(Y)), Y.astype(int)]
    np.testing.assert_allclose(model.log_density(X, Y), np.log(chosen))
    assert "averages with those of other kernels: one lengthscale; one lengthscale and a linear" in str(model.report_)


def test_the_other_kernels_are_of_standardised_columns_together():
    single, linear = plain_kernels(4, 1).values()
    assert single.base_kernel.kernels[0].lengthscale.numel() == 1
    x = np.eye(5)[:2]
    both, one = (kernel.double()(torch.tensor(x)).to_dense() for kernel in (linear, single))
    scale = linear.kernels[1].outputscale.item()
    np.testing.assert_allclose((both - one).detach().numpy(), scale * x[:, :4] @ x[:, :4].T / 4, atol=1e-12)
    assert [name for name, p in linear.named_parameters() if not p.requires_grad] == [
        "kernels.1.base_kernel.raw_variance"
    ]


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
        p_up, p_down = (model._by_rows(model._inputs(each), model._probabilities, latent=other) for each in (up, down))
        assert p_up[:, 1].mean() > p_down[:, 1].mean() + 0.3


def test_another_fit_forgets_the_average():
    model = GPClassifier().fit(X, Y)
    model.set_params(priors=False).fit(X, Y)
    assert model._others == []
