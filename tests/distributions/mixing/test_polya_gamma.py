"""The Polya-Gamma distribution: density, transform, cumulants and draws against its series."""

import math

import mpmath
import pytest
import torch
from scipy import stats

from gpext.distributions import PolyaGamma, Scaled
from gpext.distributions.mixing.cornish_fisher import cornish_fisher
from gpext.distributions.mixing.jacobi import MANY, series_ratio
from gpext.distributions.mixing.jacobi_strips import NUM_STRIPS, TILTS_PER_UNIT, density, strips
from gpext.distributions.mixing.sech_cumulants import sech_cumulants
from tests import accelerator
from tests.members import polya_gamma

F64 = torch.float64


def tensor(*values):
    return torch.tensor(values, dtype=F64)


def scaled_distance(law, num_draws, seed):
    draws = law.sample((num_draws,), generator=torch.Generator().manual_seed(seed))
    return stats.kstest(law.cdf(draws).numpy(), "uniform").statistic * math.sqrt(num_draws)


@pytest.mark.slow
@pytest.mark.parametrize("count", [0.05, 0.3, 1.0, 2.6, 17.0, 63.5, 64.0, 1e3, 1e6])
@pytest.mark.parametrize("tilt", [0.0, 1e-8, 1.0, -3.9, 4.1, 30.0, 1e4])
def test_draws_follow_the_law(count, tilt):
    law = PolyaGamma(tensor(count).squeeze(), tensor(tilt).squeeze())
    assert scaled_distance(law, 4000, seed=3) < 2.6


@pytest.mark.parametrize("count", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("tilt", [0.0, 0.7, 12.0])
def test_density_is_the_alternating_series(count, tilt):
    law = PolyaGamma(tensor(count).squeeze(), tensor(tilt).squeeze())
    w = law.mean * tensor(0.03, 0.2, 1.0, 4.0, 12.0)
    tilting = [math.cosh(tilt / 2) ** count * math.exp(-(tilt**2) * v / 2) for v in w.tolist()]
    expected = tensor(*(2 * polya_gamma(2 * v, count) * t for v, t in zip(w.tolist(), tilting, strict=True)))
    torch.testing.assert_close(law.log_prob(w).exp(), expected, rtol=1e-11, atol=0)


def test_laplace_transform():
    count, tilt = tensor(0.4, 1.0, 5.2), tensor(0.0, 2.0, 9.0)
    law = PolyaGamma(count, tilt)
    t = torch.linspace(-9, 5, 3000, dtype=F64).unsqueeze(-1)
    weights = law.log_prob(t.exp()).exp() * t.exp() * float(t[1] - t[0])
    for s in (0.0, 0.7, 12.0):
        expected = (torch.cosh(tilt / 2) / torch.cosh((tilt.square() / 4 + s / 2).sqrt())) ** count
        # PG(0.4, 0) has mass below e^-9, the others have none
        torch.testing.assert_close((weights * torch.exp(-s * t.exp())).sum(0), expected, rtol=1e-6, atol=0)


def test_cumulants():
    for r in (0.0, 1e-16, 0.2, 0.2499, 0.2501, 1.0, 40.0, 1e8):
        with mpmath.workdps(60):
            centre = mpmath.mpf(r) if r else mpmath.mpf(10) ** -30

            def log_phi(x):
                return -mpmath.log(mpmath.cosh(mpmath.sqrt(x)))

            expected = [float((-1) ** k * mpmath.diff(log_phi, centre, k)) for k in range(1, 7)]
        found = [float(cumulant) for cumulant in sech_cumulants(tensor(r), 6)]
        assert found[:2] == pytest.approx(expected[:2], rel=1e-14)
        assert found == pytest.approx(expected, rel=1e-10)


def test_mean_and_variance_at_extreme_tilts():
    law = PolyaGamma(2.0, tensor(0.0, 1e-8, 1e4, math.inf))
    assert law.mean.tolist() == pytest.approx([0.5, 0.5, 1e-4, 0.0], rel=1e-14)
    assert law.variance.tolist() == pytest.approx([1 / 12, 1 / 12, 1e-12, 0.0], rel=1e-10)


def test_limits_are_point_masses_at_zero():
    law = PolyaGamma(tensor(0.0, 1.0, 0.0), tensor(1.0, math.inf, math.inf))
    assert law.sample((4,)).abs().max() == 0
    assert law.mean.tolist() == law.variance.tolist() == [0.0] * 3
    assert law.cdf(tensor(0.0, 0.0, 1.0)).tolist() == [1.0] * 3
    mixed = PolyaGamma(tensor(0.0, 1.0, 3.0), tensor(1.0, 1.0, math.inf)).sample((1000,))
    assert (mixed > 0).all(0).tolist() == [False, True, False]


def test_a_negative_tilt_is_the_same_as_a_positive_one():
    draws = [PolyaGamma(1.5, tensor(z)).sample((5,), generator=torch.Generator().manual_seed(0)) for z in (-2.0, 2.0)]
    assert torch.equal(*draws)


def test_error_of_the_expansion_for_large_counts():
    """The error is the one that the documentation states."""
    score = torch.linspace(-5.5, 5.5, 111, dtype=F64)
    for count, limit in ((MANY, 1.2e-7), (128, 2e-8), (1000, 1e-9)):
        for c in (0.0, 0.3, 1.0, 3.0, 10.0, 100.0):
            quantile = cornish_fisher(score, [count * k for k in sech_cumulants(tensor(c**2), 6)])
            law = Scaled(PolyaGamma(float(count), tensor(2 * c)), 2.0)
            assert float((law.cdf(quantile) - torch.special.ndtr(score)).abs().max()) < limit


def test_strips_cover_the_density():
    """No strip's bound is below the density anywhere in it, nor its squeeze above."""
    table = strips()
    rows = len(table.left) // NUM_STRIPS
    fractions = torch.linspace(0, 1, 41, dtype=F64).unsqueeze(-1)
    x = (table.left + fractions * table.width).clamp_min(1e-3)
    square = (torch.arange(rows, dtype=F64).repeat_interleave(NUM_STRIPS) / TILTS_PER_UNIT).square()
    ratio = table.weight * density(x) * torch.exp(-0.5 * square * x)
    body = table.width > 0
    assert float(ratio[:, body].max()) <= 1
    assert bool((ratio[:, body] >= table.squeeze[body] * (1 - 1e-12)).all())
    assert float(ratio[:, body].mean()) > 0.97
    tail = (table.width == 0) & (table.weight > 0)
    assert int(tail.sum()) == rows
    beyond = table.left[tail] + torch.linspace(0, 20, 200, dtype=F64).unsqueeze(-1)
    rate = math.pi**2 / 8 + 0.5 * square[tail]
    log_tail = density(beyond).log() - 0.5 * square[tail] * beyond + rate * beyond
    assert float((table.weight[tail].log() + log_tail).max()) <= 0


@pytest.mark.slow
@pytest.mark.parametrize("row", [0, 40, 127, 191])
def test_draws_at_tilts_furthest_from_the_grid_of_the_strips(row):
    c = (row + 1 - 1e-9) / TILTS_PER_UNIT
    law = PolyaGamma(1.0, tensor(2 * c).expand(3_000_000))
    draws = law.sample(generator=torch.Generator().manual_seed(row))
    assert abs(float((draws.mean() - law.mean[0]) / (law.variance[0] / len(draws)).sqrt())) < 4.5


@pytest.mark.slow
def test_few_draws_at_once_have_the_law_of_many():
    """Several proposals for each draw, and more for those of which none was accepted."""
    generator = torch.Generator().manual_seed(0)
    tilt = tensor(2 * (10 - 1e-9) / TILTS_PER_UNIT)
    few = PolyaGamma(1.0, tilt.expand(300))
    draws = torch.cat([few.sample(generator=generator) for _ in range(300)])
    uniform = PolyaGamma(1.0, tilt).cdf(draws)
    assert stats.kstest(uniform.numpy(), "uniform").statistic * math.sqrt(len(draws)) < 2.6


def test_ratio_of_the_series_is_a_probability():
    x = torch.cat([torch.logspace(-3, 1.7, 300, dtype=F64), tensor(1e3, math.inf)])
    for count in (1e-3, 0.2, 0.7, 0.999, 1.0):
        ratio = series_ratio(x, torch.full_like(x, count))
        assert bool(((ratio >= -1e-14) & (ratio <= 1 + 1e-14)).all())
        first = (2 + count) * torch.exp(-2 * (1 + count) / x)
        assert bool((ratio >= 1 - first - 1e-14).all())
    nearly = series_ratio(x, torch.full_like(x, 1 - 1e-12))
    torch.testing.assert_close(nearly, series_ratio(x, torch.ones_like(x)), rtol=0, atol=1e-10)


def test_bad_parameters_are_refused():
    with pytest.raises(ValueError, match="constraint"):
        PolyaGamma(-1.0, 0.0, validate_args=True)
    with pytest.raises(ValueError, match="constraint"):
        PolyaGamma(1.0, math.nan, validate_args=True)


@pytest.mark.parametrize("count", [1e3, 1e6])
@pytest.mark.parametrize("tilt", [0.0, 1e-8, 1e-3, 0.5, 30.0])
def test_large_counts_are_nearly_normal(count, tilt):
    law = PolyaGamma(tensor(count), tensor(tilt))
    score = torch.linspace(-4, 4, 9, dtype=F64)
    cumulants = [0.5**k * count * each for k, each in enumerate(sech_cumulants(tensor(tilt).square() / 4, 6), start=1)]
    w = cornish_fisher(score, cumulants)
    torch.testing.assert_close(law.cdf(w), torch.special.ndtr(score), rtol=0, atol=1e-9)
    peak = -(0.5 * math.log(2 * math.pi) + law.stddev.log())
    torch.testing.assert_close(law.log_prob(law.mean), peak, rtol=0, atol=1 / count)


@pytest.mark.slow
@pytest.mark.parametrize("count", [0.3, 7.0, 1e6])
@pytest.mark.parametrize("tilt", [0.0, 100.0, 1e4])
def test_quantiles_and_nothing_below_them(count, tilt):
    law = PolyaGamma(tensor(count), tensor(tilt))
    for q in (0.01, 0.5, 0.99):
        torch.testing.assert_close(law.cdf(law.icdf(q)), tensor(q), rtol=0, atol=1e-6)
    w = torch.cat([tensor(0.0), torch.logspace(-307, 10, 400, dtype=F64)])
    cdf = law.cdf(w)
    assert bool((cdf.diff() > -1e-6).all() and (cdf >= 0).all() and (cdf <= 1).all())
    assert not bool(law.log_prob(w).isnan().any())


def test_whole_numbers_and_infinite_counts():
    law = PolyaGamma(torch.tensor([1, 2]), 0.5)
    assert law.tilt.tolist() == [0.5, 0.5]
    assert law.sample((3,)).dtype == torch.get_default_dtype()
    assert bool((PolyaGamma(torch.tensor(1), torch.tensor(0)).sample((3,)) > 0).all())
    assert PolyaGamma(tensor(1.0), torch.tensor([0.5])).mean.dtype == F64
    with pytest.raises(ValueError, match="count must be finite"):
        PolyaGamma(tensor(1.0, math.inf), 0.5)


@pytest.mark.skipif(accelerator.IS_REAL, reason="counts operations of the simulated device")
@pytest.mark.parametrize("count", [1.0, 1.5])
def test_draws_on_an_accelerator_take_no_more_operations_for_being_many(monkeypatch, count):
    strips()  # made once, by separate operations
    run, seen = accelerator._run, []
    monkeypatch.setattr(accelerator, "_run", lambda *given: seen.append(1) or run(*given))

    def operations(num_draws):
        z = accelerator.sent(torch.linspace(-9, 9, num_draws, dtype=F64))
        law = PolyaGamma(torch.full_like(z, count), z)
        seen.clear()
        law.sample(generator=torch.Generator(accelerator.DEVICE).manual_seed(0))
        return len(seen)

    with accelerator.accelerated():
        # Rounds of rejection grow with the logarithm of the number, here by about a quarter; chunks of a fixed size
        # would multiply them by ten.
        assert operations(200_000) < 3 * operations(20_000)
