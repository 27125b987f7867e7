"""Moments of tilted distributions against mpmath."""

import functools
import math

import mpmath
import pytest
import torch

from gpext.quadrature import student_t_tilted_moments, tilted_moments
from tests.members import F64

# offset d = y - m, variance, degrees of freedom, squared scale, power: near, far, two-moded, narrow, nearly normal
CASES = [
    (0.0, 1.0, 4.0, 1.0, 1.0),
    (3.0, 1.0, 4.0, 0.01, 1.0),
    (5.0, 1.0, 1.0, 1e-6, 1.0),
    (4.8, 1.0, 1.0, 1e-6, 0.5),
    (8.0, 1.0, 2.1, 0.01, 0.5),
    (0.1, 1e-4, 1.0, 1.0, 1.0),
    (10.0, 4.0, 20.0, 0.1, 1.0),
    (1000.0, 1.0, 4.0, 0.01, 1.0),
    (2.0, 100.0, 1.0, 1e-6, 0.7),
    (5.0, 1.0, 0.5, 0.01, 1.0),
    (4.0, 1.0, 1e4, 0.01, 1.0),
    (1e8, 1.0, 4.0, 1.0, 1.0),
]


def exact(d, v, n, noise, power):
    """log Z and central moments by mpmath, in pieces around both modes."""
    with mpmath.workdps(40):
        d, v, n, noise, power = (mpmath.mpf(value) for value in (d, v, n, noise, power))
        sd, scale = mpmath.sqrt(v), mpmath.sqrt(noise)
        log_constant = mpmath.loggamma((n + 1) / 2) - mpmath.loggamma(n / 2) - mpmath.log(mpmath.pi * n * noise) / 2

        def log_density(x):
            log_p = log_constant - (n + 1) / 2 * mpmath.log1p((d - x) ** 2 / (n * noise))
            return power * log_p - x**2 / (2 * v) - mpmath.log(2 * mpmath.pi * v) / 2

        edges = {k * sd / 2 for k in range(-28, 29)}
        for k in range(-6, 40):
            edges |= {d + sign * scale * mpmath.mpf(2) ** k for sign in (-1, 1)} | {d}
        reach = 14 * sd + (abs(d) if n > 1000 else 0)  # a nearly normal density far out pulls the mass along
        edges = sorted(edge for edge in edges if abs(edge) <= reach)
        peak = max(log_density(edge) for edge in edges)

        @functools.cache  # all five integrals take the same nodes
        def weight(x):
            return mpmath.exp(log_density(x) - peak)

        def integral(function):
            return mpmath.quad(lambda x: function(x) * weight(x), edges, maxdegree=8)

        total = integral(lambda x: mpmath.mpf(1))
        mean = integral(lambda x: x) / total
        central = [integral(lambda x, k=k: (x - mean) ** k) / total for k in (2, 3, 4)]
        return [float(value) for value in (mpmath.log(total) + peak, mean, *central)]


def compare(found, reference, tolerance):
    sd = math.sqrt(reference[2])
    values = (found.log_normalizer, found.mean, found.variance, found.third, found.fourth)
    for k, (value, expected) in enumerate(zip(values, reference, strict=True)):
        assert value.item() == pytest.approx(expected, abs=tolerance * sd**k + 1e-15 * abs(expected)), k


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_student_t_agrees_with_mpmath(case):
    *arguments, power = case
    found = student_t_tilted_moments(*(torch.tensor(value, dtype=F64) for value in arguments), power)
    compare(found, exact(*case), 1e-9)


@pytest.mark.parametrize("case", CASES[:6] + CASES[8:11])
def test_adaptive_moments_agree_with_the_smooth_rule(case):
    d, v, n, noise, power = (torch.tensor(value, dtype=F64) for value in case)

    def log_p(f):
        return power * torch.distributions.StudentT(n, d, noise.sqrt()).log_prob(f)

    smooth = student_t_tilted_moments(d, v, n, noise, case[-1])
    adaptive = tilted_moments(log_p, torch.zeros((), dtype=F64), v, knots=d.unsqueeze(0))
    values = (smooth.log_normalizer, smooth.mean, smooth.variance, smooth.third, smooth.fourth)
    compare(adaptive, [value.item() for value in values], 1e-8)


def test_all_data_at_once_are_each_alone():
    columns = list(zip(*CASES, strict=True))[:4]
    arguments = [torch.tensor(column, dtype=F64) for column in columns]
    together = student_t_tilted_moments(*arguments, 1.0)
    for i in range(len(CASES)):
        alone = student_t_tilted_moments(*(argument[i] for argument in arguments), 1.0)
        torch.testing.assert_close(together.variance[i], alone.variance, rtol=1e-10, atol=0)
        torch.testing.assert_close(together.log_normalizer[i], alone.log_normalizer, rtol=1e-11, atol=1e-11)


def test_derivatives_in_the_parameters_agree_with_finite_differences():
    parameters = [torch.tensor(value, dtype=F64, requires_grad=True) for value in (3.0, 0.04)]
    d, v = torch.tensor([0.3, 4.0], dtype=F64), torch.tensor([1.0, 0.5], dtype=F64)

    def value(deg_free, noise):
        return student_t_tilted_moments(d, v, deg_free, noise, 0.8).log_normalizer.sum()

    assert torch.autograd.gradcheck(value, parameters, eps=1e-6, atol=1e-7)
