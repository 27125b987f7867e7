"""Nested lattices: their points, known integrals, and the error that they claim."""

import math

import pytest
import torch

from gpext.quadrature.lattices import integrate_on_lattices

F64 = torch.float64


def total(log_function, *, logarithm):
    """Return the argument of `integrate_on_lattices` for functions f (Q, N) given by their logarithms."""
    if logarithm:
        return lambda x: log_function(x).logsumexp(0)
    return lambda x: log_function(x).exp().sum(0)


def rule(log_function, variables, *, logarithm, tolerance=1e-10):
    sums = total(log_function, logarithm=logarithm)
    cpu = torch.device("cpu")
    return integrate_on_lattices(sums, variables, logarithm=logarithm, tolerance=tolerance, device=cpu)


@pytest.mark.parametrize("variables", [1, 2, 3])
@pytest.mark.parametrize("logarithm", [False, True])
def test_gaussians_of_several_widths_and_centres(variables, logarithm):
    widths, centres = torch.tensor([0.7, 1.0, 1.5], dtype=F64), torch.tensor([0.3, 0.0, -1.0], dtype=F64)

    def log_density(x):
        return -0.5 * ((x.unsqueeze(1) - centres.unsqueeze(-1)) / widths.unsqueeze(-1)).square().sum(-1)

    found = rule(log_density, variables, logarithm=logarithm)
    value = found.value if logarithm else found.value.log()
    expected = variables * (widths * math.sqrt(2 * math.pi)).log()
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)
    assert found.error <= (1e-7 if variables == 3 else 1e-10)  # three variables use up the points


@pytest.mark.parametrize("variables", [2, 3])
def test_no_point_is_used_twice_and_each_stands_for_its_cell(variables):
    found = rule(lambda x: -x.square().sum(-1, keepdim=True), variables, logarithm=True)
    assert len(found.points.unique(dim=0)) == len(found.points)
    radius = found.points.norm(dim=-1).max().item()
    ball = math.pi * radius**2 if variables == 2 else 4 / 3 * math.pi * radius**3
    assert len(found.points) * math.exp(found.log_weight) == pytest.approx(ball, rel=0.1)


def test_the_claimed_error_covers_the_true_one():
    sharp = torch.linspace(0.5, 4, 8, dtype=F64)

    def log_function(x):  # a logistic edge of growing steepness in a Gaussian: the integral is one half of its own
        return torch.nn.functional.logsigmoid(x[:, :1] * sharp) - 0.5 * x.square().sum(-1, keepdim=True)

    for tolerance in (1e-4, 1e-6, 1e-8):
        for variables in (2, 3):
            found = rule(log_function, variables, logarithm=False, tolerance=tolerance)
            true = (found.value - 0.5 * (2 * math.pi) ** (variables / 2)).abs() / (1 + found.value)
            assert true.max() <= tolerance


def test_a_ball_that_is_too_small_grows():
    found = rule(lambda x: -0.5 * (x / 2.2).square().sum(-1, keepdim=True), 2, logarithm=True)
    assert found.points.norm(dim=-1).max() > 11
    assert found.value.item() == pytest.approx(math.log(2 * math.pi * 2.2**2), abs=1e-9)


def test_what_too_few_points_cannot_do_is_said():
    found = rule(lambda x: -0.5 * (x / 0.01).square().sum(-1, keepdim=True), 3, logarithm=True)
    assert found.error > 1e-2
