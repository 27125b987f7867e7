"""The outlier report of a datum agrees with its site and its leave-one-out prediction."""

import dataclasses
import math
from types import SimpleNamespace

import gpytorch
import pytest
import scipy.special
import scipy.stats
import torch

from gpext.inference import CAVI, EP, KL, Laplace, OutlierReport, Taylor, outlier_report
from gpext.inference.expansion import DenseBlocksWarning
from gpext.inference.outliers import sorted_by
from gpext.likelihoods import (
    BernoulliLogitLikelihood,
    BetaLikelihood,
    MultinomialLogitLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)
from gpext.posteriors import precision_blocks
from tests.latent_cases import CASES
from tests.members import F64, student_t


def problem(kind=StudentTLikelihood):
    """A smooth curve with one datum far off and one slightly off, and a Student-t likelihood."""
    _, prior, y = CASES["student_t"].problem(20, lengthscale=2.0)
    y = torch.sin(prior.x[:, 0]) + 0.05 * y
    y[4] += 12
    y[11] -= 2.5
    return prior(), student_t(kind), y


def test_the_two_that_are_off_come_first():
    report = outlier_report(EP().infer(*problem()))
    assert report.index[:2].tolist() == [4, 11]
    assert report.index.sort().values.tolist() == list(range(20))
    assert bool((report.tail_probability[report.index].diff() >= 0).all())
    assert report.kind[[4, 11]].tolist() == ["negative", "negative"]
    assert (report.kind == "regular").sum() == 18
    assert report.tail_probability.argsort()[:2].tolist() == [4, 11]
    assert abs(report.relative_precision[4].item()) < 0.02  # given up
    positive = report.precision[report.precision > 0]
    assert report.relative_precision.median().item() == pytest.approx(1.0, abs=0.1)
    torch.testing.assert_close(report.relative_precision * positive.median(), report.precision)


@pytest.mark.parametrize("rule", [KL(), Laplace(), CAVI(), EP(), EP(power=0.5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_rule_has_one(rule, dtype):
    prior, likelihood, y = problem()
    prior = gpytorch.distributions.MultivariateNormal(prior.mean.to(dtype), prior.covariance_matrix.to(dtype))
    result = rule.infer(prior, likelihood.to(dtype), y.to(dtype))
    report = outlier_report(result)
    assert report.index[0] == 4
    for name in ("precision", "relative_precision", "log_loo", "tail_probability"):
        values = getattr(report, name)
        assert (values.shape, values.dtype, values.requires_grad) == ((20,), dtype, False), name
        assert bool(values.isfinite().all()), name
    assert torch.equal(report.precision, result.sites.precision.detach())
    assert ("negative" in report.kind) == (not isinstance(rule, CAVI))


def test_near_zero_is_as_near_as_asked():
    result = EP().infer(*problem())
    every = outlier_report(result).relative_precision
    half = every[every > 0].median().item()
    report = outlier_report(result, near_zero=half)
    positive = report.precision > 0
    near = positive & (report.relative_precision < half)
    assert 0 < int(near.sum()) < int(positive.sum())
    assert (report.kind == "near zero").tolist() == near.tolist()
    assert dataclasses.replace(report, near_zero=0.0).kind[near.numpy()].tolist() == ["regular"] * int(near.sum())
    for bad in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="near_zero must be finite"):
            outlier_report(EP().infer(*problem()), near_zero=bad)


@pytest.mark.parametrize("kind", [StudentTLikelihood, gpytorch.likelihoods.StudentTLikelihood])
def test_tails_agree_with_integration(kind):
    prior, likelihood, y = problem(kind)
    result = EP().infer(prior, likelihood, y)
    mean, variance = result.conditioned.leave_one_out
    u = torch.linspace(-9, 9, 20001, dtype=F64)
    weight = torch.exp(-0.5 * u.square()).unsqueeze(-1)
    f = mean + u.unsqueeze(-1) * variance.sqrt()
    noise = scipy.stats.t(likelihood.deg_free.item())
    standard = ((y - f) / likelihood.noise.detach().sqrt()).detach().numpy()
    tails = [(weight * torch.from_numpy(tail(standard))).sum(0) / weight.sum() for tail in (noise.cdf, noise.sf)]
    expected = 2 * torch.minimum(*tails)
    torch.testing.assert_close(result.loo_tail, expected, rtol=1e-8, atol=1e-11)


def test_a_count_belongs_to_both_tails():
    _, prior, y = CASES["poisson"].problem(10)
    result = EP().infer(prior(), PoissonLikelihood(), y)
    mean, variance = (values.numpy() for values in result.conditioned.leave_one_out)
    nodes, weights = scipy.special.roots_hermitenorm(80)
    weights = weights / weights.sum()
    for i, count in enumerate(y.tolist()):
        rate = scipy.stats.poisson(torch.from_numpy(mean[i] + nodes * math.sqrt(variance[i])).exp().numpy())
        tails = (weights @ rate.cdf(count), weights @ rate.sf(count - 1))
        assert result.loo_tail[i].item() == pytest.approx(min(1.0, 2 * min(tails)), rel=1e-7)


def test_of_two_classes_the_rare_one_has_twice_its_probability():
    _, prior, y = CASES["bernoulli_logit"].problem(10)
    result = KL().infer(prior(), BernoulliLogitLikelihood(), y)
    expected = (2 * result.log_loo.exp()).clamp(max=1)
    torch.testing.assert_close(result.loo_tail, expected, rtol=1e-8, atol=1e-10)


def test_gpytorchs_beta_has_tails():
    likelihood, prior, y = CASES["stock_beta"].problem(10)
    result = EP().infer(prior(), likelihood, y)
    mean, variance = result.conditioned.leave_one_out
    nodes, weights = scipy.special.roots_hermitenorm(120)
    given = likelihood.forward(mean + torch.from_numpy(nodes).unsqueeze(-1) * variance.sqrt())
    a, b = given.concentration1.detach().numpy(), given.concentration0.detach().numpy()
    below = weights @ scipy.stats.beta(a, b).cdf(y.numpy()) / weights.sum()
    expected = 2 * torch.minimum(torch.from_numpy(below), torch.from_numpy(1 - below))
    torch.testing.assert_close(result.loo_tail, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["ordinal_logit", "ordinal_probit"])
def test_an_ordered_class_belongs_to_both_tails(name):
    likelihood, prior, y = CASES[name].problem(10)
    result = EP().infer(prior(), likelihood, y)
    mean, variance = result.conditioned.leave_one_out
    mass = torch.stack([likelihood.log_density(0 * y + k, mean, variance).exp() for k in range(likelihood.num_classes)])
    below, above = (
        sum(mass[k] * keep(k) for k in range(likelihood.num_classes)) for keep in (lambda k: k <= y, lambda k: k >= y)
    )
    expected = (2 * torch.minimum(below, above)).clamp(max=1)
    torch.testing.assert_close(result.loo_tail, expected.detach(), rtol=1e-8, atol=1e-10)


class Binomial(gpytorch.likelihoods.Likelihood):
    def forward(self, f):
        return torch.distributions.Binomial(10, logits=f)


def test_without_a_distribution_function_there_is_no_tail():
    _, prior, y = CASES["poisson"].problem(6)
    report = outlier_report(KL().infer(prior(), Binomial(), y.clamp(max=10)))
    assert bool(report.tail_probability.isnan().all())
    assert bool(report.log_loo.isfinite().all())
    assert bool(report.relative_log_loo.isfinite().all())
    assert "over expectation" in str(report)


def test_several_latents_are_judged_by_the_least():
    _, prior, y = CASES["multinomial"].problem(8)
    result = KL().infer(prior(), MultinomialLogitLikelihood(3), y)
    report = outlier_report(result)
    torch.testing.assert_close(report.precision, result.sites.precision.detach().amin(-2))
    assert report.relative_precision.shape == report.log_loo.shape == report.index.shape == (8,)
    assert len(str(report).splitlines()) == 10


def test_a_batch_is_each_alone():
    prior, likelihood, y = problem()
    ys = torch.stack([y, -3 * y])
    together = outlier_report(EP().infer(prior, likelihood, ys))
    for i in range(2):
        alone = outlier_report(EP().infer(prior, likelihood, ys[i]))
        assert torch.equal(together.index[i], alone.index)
        torch.testing.assert_close(together.relative_precision[i], alone.relative_precision, rtol=1e-4, atol=1e-4)
        assert together.kind[i].tolist() == alone.kind.tolist()
    first = str(together).splitlines()[1]
    assert first.split()[:2] == ["1,", "4"]  # the least of both posteriors
    assert str(together).splitlines()[-1].startswith("40 data: ")


def test_a_datum_without_a_cavity_comes_last_and_sites_of_zero_are_near_zero():
    prior, likelihood, y = problem()
    result = KL().infer(prior, likelihood, y)
    report = outlier_report(result)
    unknown = dataclasses.replace(result)
    for name, values in (("log_loo", report.log_loo), ("loo_tail", report.tail_probability)):
        # as if one datum alone kept the posterior proper
        unknown.__dict__[name] = torch.where(torch.arange(20) == 4, torch.nan, values)
    assert outlier_report(unknown).index.tolist() == [*report.index[1:].tolist(), 4]
    zero, nan = torch.zeros(1), torch.full((1,), torch.nan)
    assert OutlierReport(torch.arange(1), zero, nan, zero, nan, nan, 0.1).kind.tolist() == ["near zero"]


def test_the_table_shows_the_most_surprising():
    report = outlier_report(EP().infer(*problem()))
    lines = str(report).splitlines()
    assert len(lines) == 22
    assert lines[1].split()[0] == "4"
    assert lines[1].endswith("negative")
    assert lines[-1] == "20 data: 2 negative, 0 near zero, 18 regular"
    likelihood, prior, y = CASES["stock_gaussian"].problem(30)
    longer = outlier_report(EP().infer(prior(), likelihood, y))
    assert len(str(longer).splitlines()) == 22  # no more than 20 data
    assert str(longer).splitlines()[-1].startswith("30 data: ")


def test_a_large_count_is_no_surprise_because_it_is_large():
    n, moved = 60, 52
    x = torch.linspace(0, 6, n, dtype=F64)
    f = 2.5 + 2.5 * torch.sin(2 * x)
    y = f.exp().round()
    y[moved] = 4  # where 1.3 are expected: a log mass above those of the largest counts
    K = 6 * torch.exp(-((x[:, None] - x) ** 2)) + 1e-6 * torch.eye(n)
    prior = gpytorch.distributions.MultivariateNormal(torch.full((n,), 2.0, dtype=F64), K)
    report = outlier_report(Laplace().infer(prior, PoissonLikelihood(), y))
    assert report.log_loo[moved] > report.log_loo.min()
    assert report.index[0] == moved
    assert bool((report.tail_probability[report.index].diff() >= 0).all())


def test_what_rounding_has_left_of_tail_probabilities_does_not_sort():
    log_loo, tail = torch.tensor([-60.0, -90.0, -30.0, -1.0]), torch.tensor([3e-13, 0.0, 1e-12, 0.5])
    report = dataclasses.replace(
        outlier_report(EP().infer(*problem())), log_loo=log_loo, tail_probability=tail, relative_log_loo=tail
    )
    assert report.surprise.argsort(stable=True)[-1] == 3
    assert len(set(report.surprise[:3].tolist())) == 1
    assert sorted_by(report.surprise, log_loo).tolist() == [1, 0, 2, 3]


@pytest.mark.parametrize("name", ["multinomial", "stick_breaking"])
def test_classes_are_compared_with_what_their_prediction_expects(name):
    """The expectation is a sum over the classes; a rare class of two weighs more than one of many."""
    likelihood, prior, y = CASES[name].problem(12)
    result = KL().infer(prior(), likelihood, y)
    mean, variance = result.conditioned.leave_one_out
    log_p = torch.stack([likelihood.log_density(0 * y + k, mean, variance) for k in range(3)])
    torch.testing.assert_close(log_p.exp().sum(0), torch.ones(12, dtype=F64))
    torch.testing.assert_close(result.expected_log_loo, (log_p.exp() * log_p).sum(0).detach())
    report = outlier_report(result)
    torch.testing.assert_close(report.relative_log_loo, result.log_loo.detach() - result.expected_log_loo)
    assert bool((report.relative_log_loo[report.index].diff() >= 0).all())
    assert "over expectation" in str(report)


def test_flat_and_narrow_predictions_of_angles_are_compared_as_such():
    """The mean over draws estimates the expectation, here an integral over the circle."""
    likelihood, prior, y = CASES["von_mises"].problem(10)
    result = Laplace().infer(prior(), likelihood, y)
    mean, covariance = result.conditioned.leave_one_out
    angles = torch.linspace(-math.pi, math.pi, 41, dtype=F64)[:-1]
    log_p = torch.stack([likelihood.joint_log_density(0 * y + a, mean, covariance) for a in angles]).detach()
    expected = (log_p.exp() * log_p).sum(0) * (2 * math.pi / 40)
    variance = (log_p.exp() * log_p.square()).sum(0) * (2 * math.pi / 40) - expected.square()
    z = (result.expected_log_loo - expected).sum() / (variance / 8).sum().sqrt()
    assert abs(z.item()) < 4.5
    again = dataclasses.replace(result)
    assert torch.equal(result.expected_log_loo, again.expected_log_loo)


def test_without_a_conditional_the_log_density_sorts():
    likelihood, prior, y = CASES["family_gaussian"].problem(8)
    with pytest.warns(DenseBlocksWarning):
        result = Laplace().infer(prior(), likelihood, y)
    report = outlier_report(result)
    least = torch.linalg.eigvalsh(precision_blocks(result.sites).movedim(-1, 0))[:, 0]
    torch.testing.assert_close(report.precision, least.detach())
    assert bool(report.relative_log_loo.isnan().all())
    assert bool((report.log_loo[report.index].diff() >= 0).all())
    assert "nan" in str(report)


# Over such wide latents the integral may have a relative error, and warns.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:an integral over the latents of a datum has a relative error")
@pytest.mark.parametrize("name", ["beta", "dirichlet", "several_counts"])
def test_a_prediction_wider_than_numbers_leaves_the_log_density(name):
    """A draw of f at a variance of 1e6 makes a proportion that underflows, or a rate that overflows."""
    likelihood, _, y = CASES[name].problem(2)
    mean = torch.zeros(likelihood.num_latents, 2, dtype=F64)
    prior = gpytorch.distributions.MultivariateNormal(mean, 1e6 * torch.eye(2, dtype=F64).expand(len(mean), 2, 2))
    report = outlier_report(KL().infer(prior, likelihood, y))
    assert bool(report.relative_log_loo.isnan().all())
    torch.testing.assert_close(report.surprise, report.log_loo)


def test_proportions_that_underflow_in_float32_do_not_in_float64():
    mean = torch.zeros(2, 1)
    prior = gpytorch.distributions.MultivariateNormal(mean, torch.full((2, 1, 1), 100.0))
    report = outlier_report(Taylor().infer(prior, BetaLikelihood(), torch.tensor([0.3])))
    assert bool(report.relative_log_loo.isfinite().all())


def test_a_cavity_that_is_not_finite_has_no_density():
    likelihood, prior, y = CASES["multinomial"].problem(4)
    result = KL().infer(prior(), likelihood, y)
    mean, variance = result.conditioned.leave_one_out
    broken = torch.where(torch.arange(4) == 2, torch.nan, mean)
    result = dataclasses.replace(result, conditioned=SimpleNamespace(leave_one_out=(broken, variance)))
    assert result.log_loo.isnan().tolist() == [False, False, True, False]
