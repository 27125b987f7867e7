"""KL beyond the general laws: options, initial values, extreme data and bad input."""

import math
from dataclasses import replace

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from scipy.optimize import brentq, minimize

from gpext.bounds import Bohning, Jaakkola, LogSumExp, PiecewiseQuadratic, ProductOfSigmoids, Quadrature
from gpext.inference import CAVI, KL, Laplace, Status, Taylor, kl
from gpext.inference.problem import Problem
from gpext.likelihoods import (
    BernoulliLogitLikelihood,
    LaplaceLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)
from gpext.quadrature import log_expectation
from tests.latent_cases import CASES
from tests.members import F64


def test_jaakkolas_bound_is_cavi():
    likelihood, prior, y = CASES["bernoulli_logit"].problem(30, outputscale=4.0)
    kl, cavi = KL(Jaakkola(), tolerance=1e-9).infer(prior(), likelihood, y), CAVI().infer(prior(), likelihood, y)
    torch.testing.assert_close(kl.log_evidence, cavi.log_evidence, rtol=1e-10, atol=1e-9)
    torch.testing.assert_close(kl.sites.precision, cavi.sites.precision, rtol=1e-5, atol=1e-7)


def test_bounds_of_one_log_sum_exp_are_below_its_expectation():
    likelihood, prior, y = CASES["multinomial"].problem(12)
    exact = KL().infer(prior(), likelihood, y).log_evidence
    for bound in (LogSumExp(), ProductOfSigmoids(), ProductOfSigmoids(Bohning())):
        result = KL(bound).infer(prior(), likelihood, y)
        assert result.status is Status.CONVERGED, result.message
        assert result.log_evidence < exact


def test_stick_breaking_serves_every_bound_of_the_softplus():
    likelihood, prior, y = CASES["stick_breaking"].problem(12)
    exact = KL().infer(prior(), likelihood, y).log_evidence
    for bound in (PiecewiseQuadratic(20), Jaakkola(), Bohning()):
        assert KL(bound).infer(prior(), likelihood, y).log_evidence < exact
    assert KL(Quadrature()).infer(prior(), likelihood, y).log_evidence == exact


def test_sites_that_make_this_prior_improper_begin_without_their_negative_precisions(monkeypatch):
    likelihood, prior, y = CASES["student_t"].problem(20)
    expected = KL(tolerance=1e-9).infer(prior(), likelihood, y)
    sites = replace(expected.sites, precision=expected.sites.precision - 100 * (torch.arange(20) == 3))
    assert not bool(Problem.of(prior(), likelihood, y, 0.0).condition(sites).positive_definite)
    monkeypatch.setattr(kl, "independent_sites", None)  # the next start, which costs most of an inference
    found = KL(tolerance=1e-9).infer(prior(), likelihood, y, start=sites)
    torch.testing.assert_close(found.log_evidence, expected.log_evidence)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bernoulli_logit", "ordinal_probit", "stock_bernoulli", "poisson"])
def test_a_prior_of_enormous_variance(name):
    likelihood, prior, y = CASES[name].problem(8, outputscale=1e6, lengthscale=1e-3)
    result = KL().infer(prior(), likelihood, y)
    assert result.status is Status.CONVERGED, result.message
    assert bool((result.trace.diff() >= -1e-8 * result.log_evidence.abs()).all())


@pytest.mark.parametrize("variance", [1e4, 1e6, 5e7, 1e9])
def test_a_count_of_zero_under_a_prior_of_enormous_variance(variance):
    """With a = exp(m + v / 2): v = 1 / (r + a), m = mu - a / r. Natural-gradient steps must have the length r / a."""
    mean, r = 0.1, 1 / variance
    a = math.exp(brentq(lambda log: mean - math.exp(log) / r + 0.5 / (r + math.exp(log)) - log, -20, 0))
    prior = MultivariateNormal(torch.tensor([mean], dtype=F64), torch.tensor([[1 / r]], dtype=F64))
    for schedule in ("auto", "sequential"):
        result = KL(schedule=schedule).infer(prior, PoissonLikelihood().double(), torch.zeros(1, dtype=F64))
        assert result.status is Status.CONVERGED
        assert result.num_steps < 100
        assert result.posterior.mean.item() == pytest.approx(mean - a / r, rel=1e-6)
        assert result.posterior.variance.item() == pytest.approx(1 / (r + a), rel=1e-6)


@pytest.mark.parametrize("scale", [1e2, 1e4, 1e6])
def test_sharp_data_under_a_singular_prior_leave_the_bound_its_digits(scale):
    """All latent values are equal: log p(y) is a single integral. Counts outweigh the prior 1e6 to 1e10 times.

    The bound never exceeds it, and a converged one is next to it. At 1e10, and under some arithmetic at 1e8, rounding
    leaves half a standard deviation of the mean, which the status reports: that costs some tenths of a nat.
    """
    y = torch.full((35,), 400.0, dtype=F64)
    y[0] = 1.5e6
    prior = MultivariateNormal(torch.zeros(35, dtype=F64), to_linear_operator(torch.full((35, 35), scale, dtype=F64)))
    likelihood = PoissonLikelihood().double()
    at = float((y.sum() / 35).log())

    def log_prob(f):
        return likelihood.log_prob(y.unsqueeze(-1), f.unsqueeze(-2)).sum(-2)

    zero, knot = torch.zeros(1, dtype=F64), torch.tensor([[at]], dtype=F64)
    exact = float(log_expectation(log_prob, zero, zero + scale, knots=knot))
    result = KL().infer(prior, likelihood, y)
    if scale == 1e6 and result.status is Status.NOT_POSITIVE_DEFINITE:  # where no digits are left, and it says so
        assert result.log_evidence == -torch.inf
        return
    assert result.status in (Status.CONVERGED, Status.STALLED)
    slack = 1e-4 if result.status is Status.CONVERGED else 0.5
    assert exact - slack < float(result.log_evidence) < exact + 1e-9 * abs(exact)


def test_counts_of_a_thousand_next_to_zero():
    likelihood, prior, _ = CASES["poisson"].problem(4, outputscale=400.0)
    y = torch.tensor([1000.0, 0.0, 0.0, 1e5], dtype=F64)
    for rule in (KL(), KL(schedule="sequential"), Laplace()):
        result = rule.infer(prior(), likelihood, y)
        assert result.status in (Status.CONVERGED, Status.STALLED), result.message  # terms of 1e6 cancel
        assert result.posterior.mean[0].exp().item() == pytest.approx(1000, rel=0.01)


@pytest.mark.parametrize("count", [1e6, 1e12])
def test_counts_a_million_million_times_what_the_prior_expects(count):
    """Independent data, each against its optimum by search; at the initial value exp(f) is far too small."""
    y = torch.tensor([0.0, count, 3.0], dtype=F64)
    mean, scale = -3.0, 5.0
    prior = MultivariateNormal(torch.full_like(y, mean), scale**2 * torch.eye(3, dtype=F64))

    def loss(at, target):
        m, log_sd = at
        gain = target * m - math.exp(m + 0.5 * math.exp(2 * log_sd)) - math.lgamma(target + 1)
        spread = math.exp(2 * log_sd) / scale**2
        return -gain + 0.5 * (spread + ((m - mean) / scale) ** 2 - 1 - math.log(spread))

    best = [
        minimize(loss, (math.log(t + 0.5), -0.5 * math.log(t + 0.5)), (t,), "Nelder-Mead", options={"xatol": 1e-12})
        for t in y.tolist()
    ]
    result = KL().infer(prior, PoissonLikelihood(), y)
    assert result.status is Status.CONVERGED, result.message
    assert result.log_evidence.item() == pytest.approx(-sum(found.fun for found in best), abs=1e-5 + 1e-15 * count)
    means = torch.tensor([found.x[0] for found in best], dtype=F64)
    torch.testing.assert_close(result.posterior.mean, means, rtol=0, atol=1e-4)


def test_a_start_from_the_answer_needs_no_step():
    likelihood, prior, y = CASES["student_t"].problem(20)
    first = KL().infer(prior(), likelihood, y)
    again = KL().infer(prior(), likelihood, y, start=first.sites)
    assert again.num_steps == 0
    assert "no step needed" in again.message
    torch.testing.assert_close(again.log_evidence, first.log_evidence)


def test_a_start_that_is_no_posterior_is_left_for_a_cold_one():
    likelihood, prior, y = CASES["bernoulli_logit"].problem(20)
    first = KL().infer(prior(), likelihood, y)
    bad = type(first.sites)(first.sites.shift, -100 * torch.ones_like(first.sites.precision))
    for rule in (KL(), CAVI(), Laplace()):
        cold = rule.infer(prior(), likelihood, y)
        torch.testing.assert_close(rule.infer(prior(), likelihood, y, start=bad).log_evidence, cold.log_evidence)


def test_a_batch_decides_for_each_posterior_alone():
    likelihood, prior, y = CASES["student_t"].problem(15)
    ys = torch.stack([y, 30 * y, torch.zeros_like(y)])
    together = KL().infer(prior(), likelihood, ys)
    assert together.status is Status.CONVERGED
    for i in range(3):
        alone = KL().infer(prior(), likelihood, ys[i])
        torch.testing.assert_close(together.log_evidence[i], alone.log_evidence, rtol=1e-8, atol=1e-7)


@pytest.mark.parametrize("name", ["bernoulli_logit", "poisson", "student_t", "multinomial"])
def test_the_root_mean_square_bounds_the_evidence(name):
    likelihood, prior, y = CASES[name].problem(40)
    exact = KL(tolerance=1e-8).infer(prior(), likelihood, y)
    steps = {}
    for norm in ("max", "rms"):
        for tolerance in (1e-1, 1e-2, 1e-3):
            result = KL(tolerance=tolerance, norm=norm).infer(prior(), likelihood, y)
            assert result.status is Status.CONVERGED
            left = float((exact.log_evidence - result.log_evidence).detach())
            assert -1e-8 < left < 3 * exact.sites.shift.numel() * tolerance**2
            steps[norm, tolerance] = result.num_steps
    assert steps["rms", 1e-3] <= steps["max", 1e-3]


def test_a_batch_has_the_root_mean_square_of_each_posterior():
    likelihood, prior, y = CASES["student_t"].problem(15)
    rule = KL(tolerance=1e-3, norm="rms")
    exact = KL().infer(prior(), likelihood, y)
    together = rule.infer(prior(), likelihood, torch.stack([y, 30 * y]), start=None)
    assert together.log_evidence.shape == (2,)
    assert abs(float((together.log_evidence[0] - exact.log_evidence).detach())) < 3 * 15 * 1e-6


def test_errors_say_what_to_do():
    likelihood, prior, y = CASES["bernoulli_logit"].problem(10)
    p = prior()
    with pytest.raises(TypeError, match=r"Quadrature\(\)"):
        KL(Quadrature)
    with pytest.raises(TypeError, match="Quadrature"):
        KL(PiecewiseQuadratic()).infer(p, PoissonLikelihood(), y)
    with pytest.raises(TypeError, match="multinomial"):
        KL(LogSumExp()).infer(p, BernoulliLogitLikelihood(), y)
    with pytest.raises(TypeError, match="MultinomialLogitLikelihood"):
        KL().infer(p, gpytorch.likelihoods.SoftmaxLikelihood(num_classes=2, mixing_weights=False), y)
    with pytest.raises(ValueError, match="schedule"):
        KL(schedule="both").infer(p, likelihood, y)
    with pytest.raises(ValueError, match="norm must be 'max' or 'rms'; got 'mean'"):
        KL(norm="mean")
    with pytest.raises(ValueError, match="shape"):
        KL().infer(p, likelihood, y[:-1])
    with pytest.raises(ValueError, match=r"\{0, 1\}"):
        KL().infer(p, likelihood, y + 1)
    several, latents, classes = CASES["multinomial"].problem(10)
    with pytest.raises(ValueError, match="num_latents = 3"):
        KL().infer(p, several, classes)
    sticks, two, labels = CASES["stick_breaking"].problem(10)
    for rule in (Laplace(), Taylor()):
        with pytest.raises(TypeError, match=r"StickBreakingLikelihood has no method curvature.*KL\(\) serves it"):
            rule.infer(two(), sticks, labels)
    with pytest.raises(ValueError, match="sequential"):
        KL(schedule="sequential").infer(latents(), several, classes)


def test_latents_that_share_a_datum_move_together():
    likelihood, prior, y = CASES["trials"].problem(40, outputscale=30.0)
    result = KL(LogSumExp()).infer(prior(), likelihood, y)
    assert result.status is Status.CONVERGED
    assert result.num_steps < 40  # 170 if each latent moves as if the others were fixed


@pytest.mark.slow
@pytest.mark.parametrize("noise", [1e-15, 1e-17])
@pytest.mark.parametrize("rule", [KL(), KL(schedule="sequential"), CAVI()], ids=["auto", "sequential", "CAVI"])
@pytest.mark.parametrize("likelihood", [StudentTLikelihood, LaplaceLikelihood])
def test_what_rounding_leaves_nothing_of_is_no_evidence(likelihood, rule, noise):
    """Sites of 1e15 on a prior that is singular to rounding: log p(y) is at most n log p(0), and nothing raises."""
    x = torch.linspace(0, 6, 20, dtype=torch.float64)
    covariance = 0.35 * torch.exp(-0.5 * ((x[:, None] - x) / 2.5) ** 2)
    likelihood = likelihood().double()
    likelihood.noise = noise
    likelihood.requires_grad_(False)
    most = float(likelihood.log_prob(x[:1], x[:1])) * len(x)
    result = rule.infer(MultivariateNormal(torch.zeros_like(x), to_linear_operator(covariance)), likelihood, x.sin())
    assert bool(result.log_evidence.isfinite())
    assert bool(result.posterior.mean.isfinite().all())
    assert result.status is Status.NOT_POSITIVE_DEFINITE or float(result.log_evidence) < most


def several_modes(seed):
    """Student-t data of which one in five is far out, under a prior that covers them."""
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.rand(40, generator=generator, dtype=F64)
    K = 10 ** float(4 * torch.rand((), generator=generator) - 1) * torch.exp(-0.5 * (x - x.unsqueeze(-1)).square())
    y = torch.randn(40, generator=generator, dtype=F64)
    y = torch.where(torch.rand(40, generator=generator) < 0.4, y + 300 * torch.randn(40, generator=generator), y)
    likelihood = StudentTLikelihood().double()
    likelihood.initialize(deg_free=torch.tensor(2.5, dtype=F64), noise=torch.tensor(1e-2, dtype=F64))
    return MultivariateNormal(torch.zeros(40, dtype=F64), to_linear_operator(K)), likelihood, y


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_no_lower_than_cavi_where_there_are_several_optima(seed):
    problem = several_modes(seed)
    kl, cavi = KL().infer(*problem), CAVI().infer(*problem)
    assert kl.status is Status.CONVERGED
    assert float(kl.log_evidence.detach()) > float(cavi.log_evidence.detach())


@pytest.mark.slow
def test_each_posterior_of_a_batch_has_its_higher_optimum():
    problems = [several_modes(seed) for seed in range(12)]
    covariance = torch.stack([prior.covariance_matrix for prior, _, _ in problems])
    targets = torch.stack([y for _, _, y in problems])
    prior = MultivariateNormal(torch.zeros_like(targets), to_linear_operator(covariance))
    together = KL().infer(prior, problems[0][1], targets).log_evidence.detach()
    alone = torch.stack([KL().infer(*problem).log_evidence.detach() for problem in problems])
    cavi = CAVI().infer(prior, problems[0][1], targets).log_evidence.detach()
    assert bool((together > cavi).all())
    assert float((together - alone).abs().median()) < 1e-4  # a batch shares one acceleration: steps may differ
