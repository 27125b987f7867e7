"""The coordinates of L-BFGS: there and back, their derivative, and parameters that come back to the bit."""

import numpy as np
import pytest
import torch

from gpext.optim import minimize_lbfgs
from gpext.optim.coordinates import flatten, from_coordinates, stretch, to_coordinates, unflatten, usual_step
from tests.members import F64, tensor

X = np.array([-1e12, -300.0, -1.0, -0.7, 0.0, 0.3, 1.0, 1.0001, 3.0, 1e8])


def test_there_and_back():
    z = to_coordinates(X)
    assert (np.diff(z) > 0).all()
    np.testing.assert_allclose(from_coordinates(z), X, rtol=1e-12)
    near = X <= 1  # below zero a softplus is a logarithm already
    np.testing.assert_array_equal(z[near], X[near])


def test_the_stretch_is_the_derivative():
    x = X[(X != 1) & (np.abs(X) < 1e9)]
    z, h = to_coordinates(x), 1e-5
    slopes = (from_coordinates(z + h) - from_coordinates(z - h)) / (2 * h)
    np.testing.assert_allclose(stretch(x), slopes, rtol=1e-6)


def test_a_usual_step_is_in_proportion():
    np.testing.assert_allclose(usual_step(X) * stretch(X), np.maximum(1, np.abs(X)), rtol=1e-12)


def test_a_point_too_far_away_is_infinite_not_an_error():
    assert from_coordinates(np.array([1e100])).tolist() == [np.inf]


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_parameters_of_any_shape_make_one_vector(dtype):
    given = [torch.randn(2, 3, dtype=dtype), torch.randn((), dtype=dtype), torch.empty(0, dtype=dtype)]
    numbers = flatten(given)
    assert numbers.shape == (7,)
    copies = [torch.zeros_like(t) for t in given]
    unflatten(numbers, copies)
    assert all(torch.equal(a, b) for a, b in zip(given, copies, strict=True))
    assert flatten([]).shape == (0,)


def test_where_no_step_gains_the_parameters_come_back_to_the_bit():
    x = torch.nn.Parameter(torch.randn(100, dtype=F64, generator=torch.Generator().manual_seed(0)) * 30)
    kept = x.detach().clone()

    def objective():  # has its minimum where x is, and a slope that leads away
        moved = (x.detach() - kept).abs().sum()
        x.grad = torch.ones_like(x)
        return moved

    minimize_lbfgs(objective, [x], max_steps=5, tolerance=1e-9)
    assert torch.equal(x.detach(), kept)


def test_a_step_is_along_the_gradient_in_these_coordinates():
    x, seen = torch.nn.Parameter(tensor(16.0, 0.5)), []

    def objective():
        seen.append(to_coordinates(flatten([x])))
        value = 1e-3 * (x * tensor(1.0, 4.0)).sum()
        value.backward()
        return value.detach()

    minimize_lbfgs(objective, [x], max_steps=1, tolerance=0.0)
    step = seen[1] - seen[0]
    # dz = -t u (u dx/dz g) with u the unit of each coordinate: 2 x 2 x 8 x 1 and 1 x 1 x 1 x 4
    assert step[0] / step[1] == pytest.approx(8.0, rel=1e-6)
