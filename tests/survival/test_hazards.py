"""Hazards, survival functions and their quantiles against quadrature over f, and against each other."""

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator.operators import DiagLinearOperator
from scipy import integrate, stats

import gpext
from gpext.likelihoods import (
    Censored,
    GammaLikelihood,
    GeneralizedParetoLikelihood,
    LogLogisticLikelihood,
    LogNormalLikelihood,
    Offset,
    PoissonLikelihood,
    WeibullLikelihood,
)
from gpext.survival import (
    ParametricHazard,
    PiecewiseHazard,
    event_breaks,
    parametric_hazard,
    piecewise_hazard,
    split,
)
from tests.statistics import misfit_of_gaussians, z_threshold
from tests.survival.cases import generated

BREAKS = torch.tensor([0.0, 0.5, 2.0, 3.0], dtype=torch.float64)
TIMES = torch.tensor([0.0, 0.2, 0.5, 1.0, 2.0, 3.0], dtype=torch.float64)
FAMILIES = [
    WeibullLikelihood,
    LogLogisticLikelihood,
    LogNormalLikelihood,
    GammaLikelihood,
    GeneralizedParetoLikelihood,
]


def posterior(subjects=2, seed=0, scale=0.5):
    generator = torch.Generator().manual_seed(seed)
    root = scale * torch.randn(subjects, 3, 3, generator=generator, dtype=torch.float64)
    mean = torch.randn(subjects, 3, generator=generator, dtype=torch.float64) - 1
    return PiecewiseHazard(BREAKS, mean, root @ root.mT)


def of_known_hazard(log_hazard):
    mean = torch.tensor([log_hazard], dtype=torch.float64)
    return PiecewiseHazard(BREAKS, mean, torch.zeros(1, 3, 3, dtype=torch.float64))


def test_a_known_hazard_gives_its_survival_function():
    hazard = of_known_hazard([0.0, -1.0, 1.0])
    rates = torch.tensor([0.0, -1.0, 1.0], dtype=torch.float64).exp().tolist()
    expected = [
        integrate.quad(lambda s: rates[(s > 0.5) + (s > 2)], 0, t, points=[0.5, 2.0])[0] for t in TIMES.tolist()
    ]
    expected = torch.tensor([expected], dtype=torch.float64)
    for band, value in (
        (hazard.cumulative_hazard(TIMES, num_draws=3), expected),
        (hazard.survival(TIMES, num_draws=3), torch.exp(-expected)),
        (hazard.hazard(TIMES), torch.tensor([[rates[j] for j in (0, 0, 0, 1, 1, 2)]], dtype=torch.float64)),
    ):
        for each in (band.mean, band.median, band.lower, band.upper):
            torch.testing.assert_close(each, value)


def test_quantile_times_invert_the_survival_function():
    hazard = of_known_hazard([0.0, -1.0, 1.0])
    for probability in (0.1, 0.393, 0.5, 0.9):
        time = hazard.quantile_times(probability, num_draws=2).median
        torch.testing.assert_close(
            hazard.survival(time, num_draws=2).mean, torch.full((1, 1), 1 - probability).double()
        )
    assert hazard.quantile_times(0.999, num_draws=2).median.isinf()
    uncertain = posterior(scale=1.0).quantile_times(0.5, generator=torch.Generator().manual_seed(0))
    assert bool((uncertain.lower <= uncertain.median).all())
    assert bool((uncertain.median <= uncertain.upper).all())


def test_moments_and_limits_against_quadrature():
    """One interval: S(t) = E[exp(-t e^f)] is an integral over one number, and the limits are those of f."""
    m, v, t = -0.3, 0.49, 1.7
    hazard = PiecewiseHazard(
        torch.tensor([0.0, 2.0], dtype=torch.float64), torch.tensor([[m]]).double(), torch.tensor([[[v]]]).double()
    )
    generator = torch.Generator().manual_seed(1)
    number = 200_000
    at = torch.tensor([t], dtype=torch.float64)
    f = stats.norm(m, v**0.5)

    def expected(function):
        return integrate.quad(lambda x: function(x) * f.pdf(x), m - 8, m + 8, epsabs=1e-12)[0]

    survival = hazard.survival(at, level=0.8, num_draws=number, generator=generator)
    mean = expected(lambda x: np.exp(-t * np.exp(x)))
    square = expected(lambda x: np.exp(-2 * t * np.exp(x)))
    assert abs(float(survival.mean) - mean) < z_threshold() * ((square - mean**2) / number) ** 0.5
    for found, q in ((survival.lower, 0.9), (survival.median, 0.5), (survival.upper, 0.1)):
        # The share of draws below the true quantile is binomial.
        share = f.cdf(np.log(-np.log(float(found)) / t))
        assert abs(share - q) < z_threshold(3) * (q * (1 - q) / number) ** 0.5 + 2 / number
    total = hazard.cumulative_hazard(at, num_draws=10, generator=generator).mean
    torch.testing.assert_close(float(total), t * np.exp(m + v / 2))
    band = hazard.hazard(level=0.8)
    torch.testing.assert_close(float(band.mean), np.exp(m + v / 2))
    torch.testing.assert_close(float(band.lower), np.exp(f.ppf(0.1)))
    for event in (0, 1):
        density = expected(lambda x, event=event: np.exp(event * x - t * np.exp(x)))
        square = expected(lambda x, event=event: np.exp(2 * event * x - 2 * t * np.exp(x)))
        found = hazard.log_density(at, torch.tensor([event]), num_draws=number, generator=generator)
        assert abs(float(found.exp()) - density) < z_threshold(2) * ((square - density**2) / number) ** 0.5


def test_draws_have_the_joint_law():
    hazard = posterior()
    draws = hazard.draws(4000, generator=torch.Generator().manual_seed(2))
    assert torch.equal(draws, hazard.draws(4000, generator=torch.Generator().manual_seed(2)))
    joint = torch.block_diag(*hazard.covariance)  # subjects are independent
    assert misfit_of_gaussians(draws.flatten(1), hazard.mean.flatten(), joint) < 1


def test_subjects_in_parts_are_as_subjects_together(monkeypatch):
    hazard, times = posterior(subjects=7), TIMES
    whole = hazard.survival(times, num_draws=50, generator=torch.Generator().manual_seed(3))
    monkeypatch.setattr("gpext.survival.piecewise._AT_ONCE", 700)
    parts = hazard.survival(times, num_draws=50, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(whole.mean, parts.mean)
    torch.testing.assert_close(whole.lower, parts.lower)


class LogHazard(gpext.models.LatentGP):
    def __init__(self, x, y, likelihood, **options):
        super().__init__(x, y, likelihood, **options)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        self.to(x)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


@pytest.mark.parametrize("sparse", [False, True])
def test_piecewise_hazard_is_the_posterior_at_every_interval(sparse, monkeypatch):
    time, event, x, _ = generated(number=25)
    breaks = event_breaks(time, event, 4)
    table = split(time, event, breaks, covariates=x)
    likelihood = Offset(PoissonLikelihood(), table.exposure.log())
    z = table.inputs[::4] if sparse else None
    model = LogHazard(table.inputs, table.counts, likelihood, inducing_inputs=z)
    with pytest.raises(RuntimeError, match="train mode"):
        piecewise_hazard(model, table, x)
    model.eval()
    monkeypatch.setattr("gpext.survival.piecewise._ROWS", 9)  # two subjects at once
    found = piecewise_hazard(model, table, x[:5])
    with torch.no_grad():
        for subject in range(5):
            expected = model(table.inputs_at(x[:5])[subject])
            torch.testing.assert_close(found.mean[subject], expected.mean)
            torch.testing.assert_close(found.covariance[subject], expected.covariance_matrix)
    assert torch.equal(found.breaks, breaks)
    with pytest.raises(ValueError, match=r"expected covariates \(S, 2\)"):
        piecewise_hazard(model, table, x[:, 0])


@pytest.mark.parametrize("family", FAMILIES)
def test_parametric_functions_against_quadrature(family):
    likelihood = family().double()
    likelihood.shape = 0.8
    m, v = torch.tensor([0.2, -1.0]).double(), torch.tensor([0.3, 0.0]).double()
    hazard = ParametricHazard(Censored(likelihood), m, v)
    times = torch.tensor([0.1, 0.8, 3.0, 20.0], dtype=torch.float64)
    survival, total, rate = hazard.survival(times), hazard.cumulative_hazard(times), hazard.hazard(times)
    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(120))
    weights = weights / weights.sum()
    f = m + v.sqrt() * nodes[:, None]  # (Q, S)
    given = likelihood.forward(f.unsqueeze(-1))
    log_s = gpext.distributions.log_survival(given, times.expand(120, 2, 4))
    h = (given.log_prob(times) - log_s).exp()
    for found, values in ((survival, log_s.exp()), (total, -log_s), (rate, h)):
        expected = (weights[:, None, None] * values).sum(0)
        torch.testing.assert_close(found.mean, expected.detach(), rtol=1e-6, atol=1e-9)
        assert bool((found.lower <= found.median).all())
        assert bool((found.median <= found.upper).all())
        torch.testing.assert_close(found.lower[1], found.upper[1])  # f is known
    predictive = likelihood.marginal(gpext.distributions.LatentNormal(m, DiagLinearOperator(v)))
    for k in range(4):
        torch.testing.assert_close(1 - predictive.cdf(times[k]), survival.mean[:, k], rtol=1e-6, atol=1e-9)
    middle = hazard.quantile_times(0.3)
    for times_of, band in ((middle.median, "median"), (middle.lower, "lower"), (middle.upper, "upper")):
        at = hazard.survival(times_of)
        torch.testing.assert_close(getattr(at, band).diagonal(), torch.full((2,), 0.7).double())
    limits = torch.tensor([[0.8, 0.8], [3.0, torch.inf]]).double()
    expected = Censored(likelihood).log_density(limits, m, v)
    found = hazard.log_density(torch.tensor([0.8, 3.0]).double(), torch.tensor([1, 0]))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [0.3, 1.0, 4.0])
def test_functions_are_monotone_in_f(family, shape):
    """Limits are values at the quantiles of f: a claim about every family."""
    likelihood = family().double()
    likelihood.shape = shape
    hazard = ParametricHazard(likelihood, torch.linspace(-3, 3, 61).double(), torch.zeros(61).double())
    times = torch.tensor([0.1, 1.0, 5.0], dtype=torch.float64)
    assert bool((hazard.survival(times).median.diff(dim=0) >= -1e-14).all())
    rates = hazard.hazard(times).median
    assert bool((rates.diff(dim=0) <= 1e-9 * rates[1:]).all())


def test_parametric_hazard_of_a_model():
    time, event, x, _ = generated(number=20)
    limits = torch.stack([time, torch.where(event == 1, time, torch.inf)], -1)
    model = LogHazard(x, limits, Censored(WeibullLikelihood()).double())
    with pytest.raises(RuntimeError, match="train mode"):
        parametric_hazard(model, model.likelihood, x)
    model.eval()
    found = parametric_hazard(model, model.likelihood, x[:3])
    with torch.no_grad():
        torch.testing.assert_close(found.mean, model(x[:3]).mean)
        torch.testing.assert_close(found.variance, model(x[:3]).variance)
    assert found.survival(time).mean.shape == (3, 20)
    with pytest.raises(TypeError, match=r"expected a likelihood of positive times"):
        ParametricHazard(PoissonLikelihood(), torch.zeros(1), torch.zeros(1))
    with pytest.raises(ValueError, match=r"none of which is negative"):
        ParametricHazard(WeibullLikelihood(), torch.zeros(1), -torch.ones(1))


def test_float32_and_one_subject():
    hazard = PiecewiseHazard(BREAKS.float(), torch.zeros(1, 3), 0.1 * torch.ones(1, 3, 3))  # of rank one
    band = hazard.survival(TIMES.float(), num_draws=20, generator=torch.Generator().manual_seed(0))
    assert band.mean.dtype == band.lower.dtype == torch.float32
    assert hazard.quantile_times(num_draws=20).median.shape == (1,)
    assert (
        ParametricHazard(WeibullLikelihood(), torch.zeros(1), torch.ones(1)).hazard(torch.ones(1)).mean.dtype
        == torch.float32
    )


def test_bad_requests_are_refused():
    hazard, weibull = posterior(), ParametricHazard(WeibullLikelihood(), torch.zeros(2), torch.zeros(2))
    for wrong in (torch.tensor([-0.1]), torch.tensor([3.1])):
        with pytest.raises(ValueError, match=r"times must be from 0 to 3; got"):
            hazard.survival(wrong)
    with pytest.raises(ValueError, match=r"times must be from 0 .* got -1 at index 1"):
        weibull.survival(torch.tensor([1.0, -1.0]))
    with pytest.raises(ValueError, match="the hazard at time 0"):
        weibull.hazard(torch.zeros(1))
    with pytest.raises(ValueError, match=r"times must be a vector \(T,\)"):
        hazard.hazard(torch.zeros(2, 2))
    for each in (hazard, weibull):
        with pytest.raises(ValueError, match="level must be between 0 and 1; got 90"):
            each.survival(torch.ones(1), level=90)
        with pytest.raises(ValueError, match="expected a time of each of 2 subjects; got 1"):
            each.log_density(torch.ones(1), torch.ones(1))
        with pytest.raises(ValueError, match=r"probabilit(y|ies) must"):
            each.quantile_times(1.0)
    with pytest.raises(TypeError, match="num_draws must be a whole number"):
        hazard.survival(torch.ones(1), num_draws=1e3)
    with pytest.raises(ValueError, match="mean must be finite"):
        PiecewiseHazard(BREAKS, torch.full((1, 3), torch.nan), torch.zeros(1, 3, 3))
    with pytest.raises(ValueError, match=r"expected a mean \(S, 3\)"):
        PiecewiseHazard(BREAKS, torch.zeros(3), torch.zeros(3, 3))
    with pytest.raises(ValueError, match="must be positive semidefinite"):
        PiecewiseHazard(BREAKS, torch.zeros(1, 3), -torch.eye(3).unsqueeze(0)).draws(1)
