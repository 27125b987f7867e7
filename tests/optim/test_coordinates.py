"""Coordinates of L-BFGS: logarithms of what a softplus makes of parameters, and back to the bit."""

import numpy as np
import pytest
import torch

from gpext.optim import minimize_lbfgs
from gpext.optim.coordinates import Coordinates
from tests.members import F64, tensor

RAW = [-800.0, -30.5, -29.5, -3.0, 0.0, 2.0, 50.0, 1e8]


def test_a_point_is_the_logarithm_of_the_softplus_and_leads_back():
    raw, other = tensor(*RAW), tensor(3.0, -4.0)
    coordinates = Coordinates([raw, other], positive=[raw])
    point = coordinates.get()
    inner = slice(1, -3)  # where torch's softplus has its digits
    log = torch.nn.functional.softplus(raw).log()
    np.testing.assert_allclose(point[: len(RAW)][inner], log[inner], rtol=1e-9)
    np.testing.assert_allclose(point[len(RAW) - 2 : len(RAW)], np.log(RAW[-2:]), rtol=1e-14)
    assert point[0] == RAW[0]
    np.testing.assert_array_equal(point[len(RAW) :], [3.0, -4.0])
    coordinates.set(point + 1.0)
    coordinates.set(Coordinates([raw, other], positive=[raw]).get() - 1.0)
    np.testing.assert_allclose(torch.cat([raw, other]), [*RAW, 3.0, -4.0], rtol=1e-12, atol=1e-12)


def test_the_start_comes_back_to_the_bit():
    raw = torch.randn(100, dtype=F64) * 10
    kept = raw.clone()
    coordinates = Coordinates([raw], positive=[raw])
    start = coordinates.get()
    coordinates.set(start + 0.1)
    assert not torch.equal(raw, kept)
    coordinates.set(start)
    assert torch.equal(raw, kept)


@pytest.mark.parametrize("values", [[-40.0, -29.99], [-2.0, 0.5], [30.0, 200.0]])
def test_the_gradient_is_that_along_the_coordinates(values):
    raw = torch.nn.Parameter(tensor(*values))
    coordinates = Coordinates([raw], positive=[raw])

    def value():
        return torch.nn.functional.softplus(raw).log().sin().sum()

    value().backward()
    found, start, step = coordinates.gradient(), coordinates.get(), 1e-5
    for i in range(2):
        ends = []
        for sign in (1, -1):
            coordinates.set(start + sign * step * np.eye(2)[i])
            ends.append(float(value().detach()))
        assert found[i] == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-6)


def test_a_parameter_without_a_gradient_has_slope_zero():
    raw = tensor(1.0)
    assert Coordinates([raw], positive=[raw]).gradient().tolist() == [0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_that_grow_by_orders_of_magnitude_take_a_few_steps(dtype):
    """A log-normal density whose mode is 10^4: linear coordinates, of scale one at the start, take far more steps."""
    number = {}
    for positive in (True, False):
        raw = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
        number[positive] = 0

        def objective(raw=raw, positive=positive):
            number[positive] += 1
            value = (torch.nn.functional.softplus(raw).log() - 9.21).square().sum()
            value.backward()
            return value.detach()

        minimize_lbfgs(objective, [raw], max_steps=200, tolerance=1e-9, positive=[raw] if positive else ())
        torch.testing.assert_close(raw.detach().log(), torch.full((2,), 9.21, dtype=dtype), rtol=1e-3, atol=0)
    assert number[True] <= 12
    assert number[True] <= 0.6 * number[False]


def test_a_step_to_infinity_is_one_to_step_back_from():
    raw = torch.nn.Parameter(tensor(0.0))

    def objective():
        value = torch.nn.functional.softplus(raw)
        loss = (value - 3).square().sum() + 1e-9 / value.sum()
        loss.backward()
        return loss.detach()

    coordinates = Coordinates([raw], positive=[raw])
    coordinates.set(np.array([800.0]))
    assert torch.isinf(raw).all()
    objective()
    assert not np.isfinite(coordinates.gradient()).all()
    coordinates.set(np.array([0.0]))
    minimize_lbfgs(objective, [raw], max_steps=50, tolerance=1e-12, positive=[raw])
    torch.testing.assert_close(torch.nn.functional.softplus(raw.detach()), tensor(3.0), rtol=1e-4, atol=0)
