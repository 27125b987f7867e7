"""Ordinal likelihoods: densities, derivatives and integrals against mpmath."""

import mpmath
import pytest
import torch
from gpytorch.constraints import Interval
from gpytorch.priors import GammaPrior, NormalPrior

from gpext.likelihoods import OrdinalLogitLikelihood, OrdinalProbitLikelihood
from tests.members import F64, tensor

KINDS = [OrdinalLogitLikelihood, OrdinalProbitLikelihood]
CUTPOINTS = (-3.0, -1.0, -0.999, 2.0)  # a narrow class between two wide ones


@pytest.fixture(params=KINDS)
def likelihood(request):
    likelihood = request.param(5).double()
    likelihood.cutpoints = tensor(*CUTPOINTS)
    return likelihood


def log_prob(likelihood, k, f, scale=1):
    """log[G(b_k - f) - G(b_{k-1} - f)] in mpmath's working precision."""
    cumulative = (
        mpmath.ncdf if isinstance(likelihood, OrdinalProbitLikelihood) else (lambda x: 1 / (1 + mpmath.exp(-x)))
    )
    cutpoints = [-mpmath.inf, *map(mpmath.mpf, likelihood.cutpoints.tolist()), mpmath.inf]
    below, above = (cutpoints[k + 1] - f) * scale, (cutpoints[k] - f) * scale
    if below + above > 0:
        below, above = -above, -below
    return mpmath.log(cumulative(below) - (cumulative(above) if above > -mpmath.inf else 0))


@pytest.mark.slow
@pytest.mark.parametrize("f", [-300.0, -40.0, -1.0, -0.9995, 0.25, 40.0, 300.0])
def test_log_prob_and_derivatives_agree_with_mpmath(likelihood, f):
    labels = torch.arange(5)
    latent = torch.full((5,), f, dtype=F64, requires_grad=True)
    value = likelihood.log_prob(labels, latent)
    (slope,) = torch.autograd.grad(value.sum(), latent, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), latent)
    step = mpmath.mpf(10) ** -15
    with mpmath.workdps(420 if abs(f) < 100 else 200):
        for k in range(5):
            low, middle, high = (log_prob(likelihood, k, f + i * step) for i in (-1, 0, 1))
            assert value[k].item() == pytest.approx(float(middle), rel=1e-12, abs=1e-300)
            assert slope[k].item() == pytest.approx(float((high - low) / (2 * step)), rel=1e-11, abs=1e-16)
            assert bend[k].item() == pytest.approx(float((high - 2 * middle + low) / step**2), rel=1e-9, abs=1e-15)


@pytest.mark.slow
@pytest.mark.parametrize(("mean", "variance"), [(0.0, 1.0), (-20.0, 4.0), (3.0, 400.0), (25.0, 2.0**-10)])
def test_integrals_agree_with_mpmath(likelihood, mean, variance):
    labels = torch.arange(5)
    m, v = torch.full((5,), mean, dtype=F64), torch.full((5,), variance, dtype=F64)
    expected, log_density = likelihood.expected_log_density(labels, m, v), likelihood.log_density(labels, m, v)
    sd = mpmath.sqrt(variance)
    points = sorted({mean + k * sd for k in (-24, -16, -8, -4, -1, 0, 1, 4, 8, 16, 24)} | {-3.0, -1.0, 2.0})
    with mpmath.workdps(25):
        for k in range(5):
            reference = mpmath.quad(
                lambda f, k=k: log_prob(likelihood, k, f) * mpmath.npdf(f, mean, sd) if abs(f) < 400 else 0, points
            )
            assert expected[k].item() == pytest.approx(float(reference), rel=1e-9)
            if isinstance(likelihood, OrdinalProbitLikelihood):
                with mpmath.workdps(80):
                    reference = log_prob(likelihood, k, mpmath.mpf(mean), 1 / mpmath.sqrt(1 + mpmath.mpf(variance)))
            else:
                reference = mpmath.log(
                    mpmath.quad(
                        lambda f, k=k: mpmath.exp(log_prob(likelihood, k, f)) * mpmath.npdf(f, mean, sd), points
                    )
                )
            assert log_density[k].item() == pytest.approx(float(reference), rel=1e-9)


# ---- cutpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_classes", [2, 3, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_cutpoints_start_equally_spread_about_zero_and_can_be_set(kind, num_classes):
    likelihood = kind(num_classes)
    expected = 2 * torch.arange(num_classes - 1.0) - (num_classes - 2)
    torch.testing.assert_close(likelihood.cutpoints, expected, rtol=0, atol=1e-5)
    values = torch.linspace(-0.3, 4, num_classes - 1)
    likelihood.cutpoints = values.tolist()
    torch.testing.assert_close(likelihood.cutpoints, values)
    other = kind(num_classes)
    other.load_state_dict(likelihood.state_dict(), strict=True)
    assert torch.equal(other.cutpoints, likelihood.cutpoints)


@pytest.mark.parametrize("wrong", [(1.0, 0.0, 2.0), (0.0, 0.0, 1.0), (0.0, 1.0, float("nan"))])
def test_cutpoints_that_do_not_increase_are_refused(wrong):
    likelihood = OrdinalLogitLikelihood(4)
    with pytest.raises(ValueError, match=r"finite and strictly increasing; got \["):
        likelihood.cutpoints = wrong
    with pytest.raises(ValueError, match=r"4 classes have 3 cutpoints; got a value of shape \(2,\)"):
        likelihood.cutpoints = (0.0, 1.0)


def test_two_classes_are_a_binary_likelihood():
    f = torch.linspace(-5, 5, 7, dtype=F64)
    likelihood = OrdinalLogitLikelihood(2).double()
    torch.testing.assert_close(likelihood.log_prob(torch.ones(7), f), torch.nn.functional.logsigmoid(f))
    likelihood = OrdinalProbitLikelihood(2).double()
    torch.testing.assert_close(likelihood.log_prob(torch.zeros(7), f), torch.special.log_ndtr(-f))


@pytest.mark.parametrize("kind", KINDS)
def test_cutpoints_are_learned_in_order(kind):
    """Maximum likelihood at f = 0: the cumulative frequencies, whatever the start."""
    y = torch.tensor([0] * 10 + [1] * 60 + [2] * 5 + [3] * 25)
    likelihood = kind(4).double()
    optimizer = torch.optim.LBFGS(likelihood.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        value = -likelihood.log_prob(y, torch.zeros(100, dtype=F64)).sum()
        value.backward()
        return value

    optimizer.step(loss)
    frequencies = tensor(0.1, 0.6, 0.05, 0.25)
    torch.testing.assert_close(likelihood(tensor(0.0)).probs[0], frequencies, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_cutpoints_is_a_loop(kind):
    together = kind(4, batch_shape=torch.Size([2])).double()
    cutpoints = tensor(-1.0, 0.0, 2.0, -0.5, 0.25, 0.75).view(2, 3)
    together.cutpoints = cutpoints
    y = torch.arange(12).view(2, 6) % 4
    mean, variance = torch.linspace(-3, 3, 6, dtype=F64), torch.linspace(0, 2, 6, dtype=F64)
    for i in range(2):
        alone = kind(4).double()
        alone.cutpoints = cutpoints[i]
        for method in ("expected_log_density", "log_density"):
            value = getattr(together, method)(y, mean, variance)
            assert value.shape == (2, 6)
            torch.testing.assert_close(value[i], getattr(alone, method)(y[i], mean, variance))


def test_priors_and_constraints_are_registered():
    priors = {"first_cutpoint_prior": NormalPrior(0.0, 3.0), "gaps_prior": GammaPrior(2.0, 1.0)}
    likelihood = OrdinalLogitLikelihood(4, **priors, gaps_constraint=Interval(0.5, 8.0))
    assert {name: prior for name, _, prior, *_ in likelihood.named_priors()} == priors
    assert likelihood.cutpoints.sum().item() == pytest.approx(0, abs=1e-5)
    likelihood.raw_gaps.data.fill_(50.0)
    assert bool((likelihood.gaps <= 8).all())
    for name, value in (("first_cutpoint", 1.5), ("gaps", 3.0)):
        _, module, _, closure, setter = next(p for p in likelihood.named_priors() if p[0] == f"{name}_prior")
        setter(module, torch.full_like(closure(module), value))
        torch.testing.assert_close(getattr(likelihood, name), torch.full_like(closure(module), value))
