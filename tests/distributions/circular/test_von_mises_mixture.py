"""The von Mises likelihood integrated over a Gaussian: its mixture identities, and integrals against brute force."""

import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import special

from gpext.distributions.circular.von_mises_mixture import (
    compound_resultant,
    expected_log_i0,
    log_compound_density,
    log_mixing_density,
    log_ratio_density,
)

F64 = torch.float64
ANGLES = torch.tensor([-3.0, -1.0, 0.2, 1.5], dtype=F64)


def by_polar_grid(y, mean, covariance):
    """log p(y) and the resultant by the product of Gauss-Legendre in |eta| and the trapezoidal rule in arg eta."""
    m, V = mean.numpy(), covariance.numpy()
    spread = math.sqrt(np.linalg.eigvalsh(V).max())
    edges = np.unique(np.concatenate([np.linspace(0, np.hypot(*m) + 10 * spread, 60), [0.1, 0.3, 1.0, 2.0, 4.0, 8.0]]))
    node, weight = np.polynomial.legendre.leggauss(12)
    half = np.diff(edges)[:, None] / 2
    r, dr = (edges[:-1, None] + half * (node + 1)).ravel(), (half * weight).ravel()
    angle = np.arange(1500) * 2 * math.pi / 1500
    eta = r[:, None] * np.stack([np.cos(angle), np.sin(angle)])[:, None]  # (2, Q, A)
    gap = eta - m[:, None, None]
    square = np.einsum("iqa,ij,jqa->qa", gap, np.linalg.inv(V), gap)
    mass = np.exp(-0.5 * square) / (2 * math.pi * math.sqrt(np.linalg.det(V))) * (r * dr)[:, None] * angle[1]
    aligned = r[:, None] * (np.cos(angle - y) - 1)
    density = (mass * np.exp(aligned) / (2 * math.pi * special.i0e(r)[:, None])).sum()
    length = (special.i1e(r) / special.i0e(r))[:, None]
    log_i0 = (np.log(special.i0e(r)) + r)[:, None]
    resultant = [(mass * length * np.cos(angle)).sum(), (mass * length * np.sin(angle)).sum()]
    return math.log(density), resultant, (mass * log_i0).sum()


@pytest.mark.parametrize("kappa", [0.0, 0.3, 2.0, 9.0, 40.0, 300.0])
def test_the_mixing_densities_have_the_transforms_they_claim(kappa):
    log_w = torch.linspace(-44, 3, 6001, dtype=F64)  # g starts like 1 / sqrt(pi w): 3e-10 of its integral is omitted
    w, step = log_w.exp(), float(log_w[1] - log_w[0])
    whole = float(torch.exp(log_mixing_density(w) + log_w - kappa**2 * w).sum()) * step
    ratio = float(torch.exp(log_ratio_density(w) + log_w - kappa**2 * w).sum()) * step
    assert whole == pytest.approx(float(1 / mpmath.besseli(0, kappa)), rel=1e-9)
    expected = 0.5 if kappa == 0 else float(mpmath.besseli(1, kappa) / mpmath.besseli(0, kappa)) / kappa
    assert ratio == pytest.approx(expected, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("w", [0.002, 0.0149999, 0.0150001, 0.4, 6.0])
def test_the_mixing_densities_are_the_sums_over_zeros(w):
    with mpmath.workdps(80):
        zeros = [mpmath.besseljzero(0, k) for k in range(1, 110)]
        p = mpmath.log(mpmath.fsum(2 * j / mpmath.besselj(1, j) * mpmath.exp(-j * j * w) for j in zeros))
        g = mpmath.log(mpmath.fsum(2 * mpmath.exp(-j * j * w) for j in zeros))
        at = torch.tensor(w, dtype=F64)
        assert abs(log_mixing_density(at).item() - p) < 1e-10
        assert abs(log_ratio_density(at).item() - g) < 1e-12


@pytest.mark.parametrize(
    ("mean", "covariance"),
    [
        ([0.0, 0.0], [[1.0, 0.0], [0.0, 1.0]]),
        ([2.0, -1.0], [[0.5, 0.2], [0.2, 0.3]]),
        ([-3.0, 0.4], [[9.0, -5.0], [-5.0, 4.0]]),
        ([0.1, 0.0], [[400.0, 30.0], [30.0, 90.0]]),
        ([20.0, 30.0], [[100.0, 0.0], [0.0, 25.0]]),
    ],
)
def test_integrals_against_a_polar_grid(mean, covariance):
    m, V = torch.tensor(mean, dtype=F64), torch.tensor(covariance, dtype=F64)
    found = log_compound_density(ANGLES, m.unsqueeze(-1).expand(2, 4), V.unsqueeze(-1).expand(2, 2, 4))
    for y, value in zip(ANGLES.tolist(), found.tolist(), strict=True):
        expected, resultant, log_i0 = by_polar_grid(y, m, V)
        assert value == pytest.approx(expected, abs=1e-9)
    assert compound_resultant(m.unsqueeze(-1), V.unsqueeze(-1))[:, 0].numpy() == pytest.approx(resultant, abs=1e-9)
    assert expected_log_i0(m.unsqueeze(-1), V.unsqueeze(-1)).item() == pytest.approx(log_i0, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("variance", [1e-8, 1e-2, 1.0, 1e2, 1e4, 1e8])
@pytest.mark.parametrize("distance", [0.0, 0.5, 3.0, 100.0])
def test_densities_integrate_to_one_and_to_the_resultant(variance, distance):
    mean = torch.tensor([[0.6], [0.8]], dtype=F64) * distance * math.sqrt(variance)
    V = variance * torch.tensor([[1.0, 0.3], [0.3, 0.5]], dtype=F64).unsqueeze(-1)
    y = torch.arange(1000, dtype=F64) * 2 * math.pi / 1000
    log_p = log_compound_density(y, mean.expand(2, 1000), V.expand(2, 2, 1000))
    mass = log_p.exp() * (2 * math.pi / 1000)
    assert float(mass.sum()) == pytest.approx(1, abs=1e-9)
    resultant = torch.stack([(mass * y.cos()).sum(), (mass * y.sin()).sum()])
    torch.testing.assert_close(compound_resultant(mean, V)[:, 0], resultant, atol=1e-9, rtol=0)


def test_a_certain_parameter_gives_its_von_mises_density():
    kappa = torch.tensor([0.0, 1.0, 1e3, 1e6], dtype=F64)
    mean = torch.stack([kappa, torch.zeros_like(kappa)])
    y = torch.tensor([0.4, 0.3, 0.01, 1e-3], dtype=F64)
    found = log_compound_density(y, mean, torch.zeros(2, 2, 4, dtype=F64))
    expected = kappa * (y.cos() - 1) - torch.special.i0e(kappa).log() - math.log(2 * math.pi)
    torch.testing.assert_close(found, expected, atol=1e-8, rtol=1e-9)
    expected = torch.special.i1e(kappa) / torch.special.i0e(kappa)
    torch.testing.assert_close(compound_resultant(mean, torch.zeros(2, 2, 4, dtype=F64))[0], expected)


def test_gradients_against_finite_differences():
    generator = torch.Generator().manual_seed(0)
    mean = 3 * torch.randn(3, 2, 4, dtype=F64, generator=generator)
    root = torch.randn(3, 2, 2, 4, dtype=F64, generator=generator)

    def density(m, L, y):
        return log_compound_density(y, m, torch.einsum("...abn,...cbn->...acn", L, L))

    def resultant(m, L):
        return compound_resultant(m, torch.einsum("...abn,...cbn->...acn", L, L))

    inputs = [t.requires_grad_() for t in (mean, root, ANGLES.clone())]
    assert torch.autograd.gradcheck(density, inputs)
    assert torch.autograd.gradcheck(resultant, inputs[:2])


def test_float32_comes_back_and_batches_broadcast():
    mean, V = torch.ones(5, 2, 4), torch.eye(2).unsqueeze(-1).expand(2, 2, 4)
    y = ANGLES.float().expand(3, 1, 4)
    found = log_compound_density(y, mean, V)
    assert found.shape == (3, 5, 4)
    assert found.dtype == torch.float32
    assert compound_resultant(mean, V).shape == (5, 2, 4)


@pytest.mark.parametrize(
    "covariance", [[[1.0, 2.0], [2.0, 1.0]], [[-1.0, 0.0], [0.0, 1.0]], [[math.nan, 0.0], [0.0, 1.0]]]
)
def test_covariances_are_checked(covariance):
    V = torch.tensor(covariance, dtype=F64).unsqueeze(-1)
    for integral in (lambda m: log_compound_density(ANGLES[:1], m, V), lambda m: compound_resultant(m, V)):
        with pytest.raises(ValueError, match="not positive semidefinite, first at index"):
            integral(torch.zeros(2, 1, dtype=F64))


@pytest.mark.parametrize("kappa", [0.0, 1e-3, 1.0, 30.0, 1e3, 1e6])
def test_the_expectation_of_log_i0_at_a_point(kappa):
    m = torch.tensor([[kappa], [0.0]], dtype=F64)
    expected = float(mpmath.log(mpmath.besseli(0, mpmath.mpf(kappa))))
    assert expected_log_i0(m, torch.zeros(2, 2, 1, dtype=F64)).item() == pytest.approx(expected, rel=1e-9, abs=1e-18)
