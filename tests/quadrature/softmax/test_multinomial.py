"""The multinomial distribution under a Gaussian softmax, for giant counts and wide Gaussians, against mpmath."""

import mpmath
import pytest
import torch

from gpext.quadrature import log_multinomial_density
from gpext.quadrature.softmax import gumbel, multinomial
from tests.members import tensor


def column(*values):
    return tensor(*values).unsqueeze(-1)


def log_probability_of_two(counts, mean, variance):
    """log P(y) of two classes with mpmath, over f - g in units of the peak's width, however large the counts."""
    y, n = mpmath.mpf(counts[0]), mpmath.mpf(sum(counts))
    m, v = mpmath.mpf(mean[0]) - mean[1], mpmath.mpf(variance[0]) + variance[1]
    coefficient = mpmath.loggamma(n + 1) - mpmath.loggamma(y + 1) - mpmath.loggamma(n - y + 1)

    def log_density(d):
        return (
            coefficient
            - y * mpmath.log1p(mpmath.exp(-d))
            - (n - y) * mpmath.log1p(mpmath.exp(d))
            - (d - m) ** 2 / (2 * v)
        )

    low, high = m - n * v - 1, m + n * v + 1
    for _ in range(200):
        middle = (low + high) / 2
        slope = y / (1 + mpmath.exp(middle)) - (n - y) / (1 + mpmath.exp(-middle)) - (middle - m) / v
        low, high = (middle, high) if slope > 0 else (low, middle)
    step = 0.5 / mpmath.sqrt(1 / v + n / (4 * mpmath.cosh(low / 2) ** 2))
    total = sum(mpmath.exp(log_density(low + k * step) - log_density(low)) for k in range(-24, 25))
    return log_density(low) + mpmath.log(total * step) - mpmath.log(2 * mpmath.pi * v) / 2


@pytest.mark.parametrize("total", [1e3, 1e8, 1e12])
@pytest.mark.parametrize("variance", [(1e-6, 1e-4), (0.5, 2.0), (3.0, 1e4), (1e6, 1e6)])
def test_giant_counts_agree_with_one_integral(total, variance):
    mean, counts = (0.3, -0.4), (round(0.3 * total), round(0.7 * total))
    with mpmath.workdps(40):
        expected = float(log_probability_of_two(counts, mean, variance))
    m, v = column(*mean).requires_grad_(), column(*variance).requires_grad_()
    value = log_multinomial_density(column(*counts), m, v)
    assert value.item() == pytest.approx(expected, rel=1e-11, abs=1e-9)
    # Nothing changes if all latents move together.
    (slope,) = torch.autograd.grad(value, m)
    assert slope.sum().item() == pytest.approx(0, abs=1e-6 * (1 + float(slope.abs().max())))


def test_the_number_of_nodes_depends_on_neither_the_count_nor_the_width(monkeypatch):
    evaluated = []

    def counting(y, u, m, v):
        evaluated.append(u.numel() * m.size(-1))
        return gumbel.log_kernel(y, u, m, v)

    monkeypatch.setattr(multinomial, "log_kernel", counting)
    for variance in (1e-8, 1e3, 1e12):
        for total in (1.0, 1e12):
            for counts in ((0.2, 0.3, 0.5), (0.0, 0.5, 0.5), (1 / total, 0.0, 1.0)):
                y = (total * column(*counts)).round()
                for v in (column(1, 2, 3) * variance, column(1e-6, 1, 2) * variance, column(1e-8, variance, variance)):
                    evaluated.clear()
                    assert bool(log_multinomial_density(y, column(0.1, -0.2, 0.0), v).isfinite())
                    assert sum(evaluated) < 3000


@pytest.mark.parametrize("counts", [(0, 1, 1), (0, 3, 1), (2, 1, 0)])
def test_a_narrow_latent_among_wide_ones(counts, monkeypatch):
    """Equal and clustered nodes share the factors, but have no node in common."""
    m, v = column(3.0, 0.0, -40.0), column(1e-4, 4e4, 1e4)
    clustered_value = log_multinomial_density(column(*counts), m, v)
    monkeypatch.setattr(multinomial, "_LONGEST_SUM", 1e9)
    torch.testing.assert_close(clustered_value, log_multinomial_density(column(*counts), m, v), rtol=0, atol=1e-11)
