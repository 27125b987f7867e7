"""The multinomial likelihood: density, curvature and predictions against SciPy, autograd and integrals."""

import math

import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator import to_linear_operator
from linear_operator.operators import DiagLinearOperator
from scipy import stats

from gpext.likelihoods import BernoulliLogitLikelihood, MultinomialLogitLikelihood, multinomial
from gpext.quadrature import log_multinomial_density
from tests.members import F64, tensor
from tests.statistics import misfit


def gaussian(mean, variance):
    return MultivariateNormal(mean, DiagLinearOperator(variance))


def test_counts_have_the_multinomial_density():
    y, f = torch.tensor([[2, 0, 3], [1, 4, 0]]), torch.randn(3, 2, dtype=F64)
    expected = stats.multinomial.logpmf(y.numpy(), 5, f.softmax(0).T.numpy())
    for total_count in (5, None):
        likelihood = MultinomialLogitLikelihood(3, total_count)
        assert likelihood.log_prob(y, f).tolist() == pytest.approx(list(expected), rel=1e-12)
    conditional = MultinomialLogitLikelihood(3, 5)(f)
    assert conditional.log_prob(y.double()).tolist() == pytest.approx(list(expected), rel=1e-12)


def test_multinomial_terms_are_the_log_density():
    likelihood, y = MultinomialLogitLikelihood(3, None), torch.tensor([[2.0, 0, 3], [0, 0, 1], [0, 0, 0]], dtype=F64)
    f = torch.randn(3, 3, dtype=F64)
    terms = likelihood.multinomial_terms(y)
    assert terms.total.tolist() == [5, 1, 0]
    value = terms.constant + (terms.counts * f).sum(-2) - terms.total * f.logsumexp(-2)
    torch.testing.assert_close(value, likelihood.log_prob(y, f))


def test_one_trial_of_counts_is_a_label():
    labels, q = torch.tensor([2, 0, 1, 1]), gaussian(torch.randn(3, 4, dtype=F64), torch.rand(3, 4, dtype=F64))
    one_hot = torch.nn.functional.one_hot(labels, 3)
    for method in ("expected_log_prob", "log_marginal"):
        expected = getattr(MultinomialLogitLikelihood(3), method)(labels, q)
        torch.testing.assert_close(getattr(MultinomialLogitLikelihood(3, None), method)(one_hot, q), expected)


def test_two_classes_are_a_logistic_regression_on_the_difference():
    mean, variance = tensor(3.0, -200.0, 0.5, 1.0).view(2, 2), tensor(1.0, 9.0, 4.0, 0.0).view(2, 2)
    y = torch.tensor([0, 1])
    m, v = mean[1] - mean[0], variance.sum(0)
    two, one = MultinomialLogitLikelihood(2), BernoulliLogitLikelihood()
    for method in ("expected_log_density", "log_density"):
        for labels in (y, 1 - y):
            expected = getattr(one, method)(labels.to(F64), m, v)
            torch.testing.assert_close(getattr(two, method)(labels, mean, variance), expected, rtol=1e-9, atol=1e-10)


def test_a_hopeless_class_keeps_its_log_probability():
    """log E[softmax(f)_0] ~ m_0 - m_1 + (v_0 + v_1) / 2 where class 1 is certain."""
    mean, variance = tensor(-600.0, 300.0, 0.0).unsqueeze(-1), tensor(2.0, 3.0, 1.0).unsqueeze(-1)
    value = MultinomialLogitLikelihood(3).log_density(torch.tensor([0]), mean, variance)
    assert value.item() == pytest.approx(-900 + 2.5, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_predictions_keep_the_log_probability_of_a_hopeless_class(correlation, dtype):
    mean = torch.tensor([[0.0, 50.0, -60.0], [1.0, 0.5, 0.0]], dtype=dtype).requires_grad_()
    block = 0.5 * torch.eye(3, dtype=dtype) + correlation * torch.ones(3, 3, dtype=dtype)
    q = MultitaskMultivariateNormal(mean, torch.block_diag(block, block))
    likelihood, labels = MultinomialLogitLikelihood(3), torch.tensor([[2, 1], [0, 2], [1, 0]])
    predictive = likelihood(q)
    log_prob = predictive.log_prob(labels)
    torch.testing.assert_close(log_prob, likelihood.log_marginal(labels, q), rtol=1e-5, atol=1e-6)
    assert log_prob[0, 0].item() == pytest.approx(-109.5, abs=1e-3)  # f_3 - f_2 has mean -110 and variance 1
    torch.testing.assert_close(predictive.expand((3, 2)).log_prob(labels), log_prob)
    (slope,) = torch.autograd.grad(log_prob[0, 0], mean)
    torch.testing.assert_close(slope[0], torch.tensor([0.0, -1.0, 1.0], dtype=dtype), rtol=1e-4, atol=1e-4)


def test_class_probs_are_the_mean_of_one_trial():
    q = gaussian(torch.randn(2, 3, 5, dtype=F64), torch.rand(2, 3, 5, dtype=F64))
    probs = MultinomialLogitLikelihood(3, 7).class_probs(q)
    assert probs.shape == (2, 5, 3)
    torch.testing.assert_close(probs, MultinomialLogitLikelihood(3)(q).probs)


def test_what_has_no_distribution_says_what_to_use():
    q = gaussian(torch.zeros(3, 2), torch.ones(3, 2))
    with pytest.raises(NotImplementedError, match=r"log_marginal\(targets, function_dist\).*class_probs"):
        MultinomialLogitLikelihood(3, None)(q)
    with pytest.raises(NotImplementedError, match="log_prob"):
        MultinomialLogitLikelihood(3, None)(torch.zeros(3, 2))


@pytest.mark.parametrize("total_count", [1, None])
def test_correlated_latents_are_integrated_jointly(total_count):
    """Against many draws; a motion of all latents together changes nothing."""
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(3, 3, 3, dtype=F64, generator=generator)
    V, mean = factor @ factor.mT, torch.randn(3, 3, dtype=F64, generator=generator)  # of three data
    covariance = torch.diag_embed(V.permute(1, 2, 0)).permute(2, 0, 3, 1).reshape(9, 9)  # datum by datum
    q = MultitaskMultivariateNormal(mean, to_linear_operator(covariance))
    likelihood = MultinomialLogitLikelihood(3, total_count)
    y = torch.tensor([0, 1, 2]) if total_count == 1 else torch.tensor([[2, 0, 3], [1, 4, 0], [0, 0, 1]])
    draws = torch.randn(200_000, 3, 3, dtype=F64, generator=generator)
    f = (mean + (torch.linalg.cholesky(V) @ draws.unsqueeze(-1)).squeeze(-1)).mT
    log_probs = likelihood.log_prob(y, f)
    for ours, theirs in (
        (likelihood.log_marginal(y, q).exp(), log_probs.exp()),
        (likelihood.expected_log_prob(y, q), log_probs),
        (likelihood.class_probs(q), f.softmax(-2).mT),
    ):
        assert misfit(theirs, ours) < 1
    assert likelihood.class_probs(q).sum(-1).tolist() == pytest.approx([1, 1, 1], abs=1e-9)
    together = MultitaskMultivariateNormal(
        mean, to_linear_operator(torch.block_diag(*[torch.full((3, 3), 7.0).double()] * 3))
    )
    torch.testing.assert_close(
        likelihood.log_marginal(y, together), likelihood.log_prob(y, mean.mT), rtol=1e-6, atol=1e-6
    )


def test_the_variance_of_many_trials_keeps_its_digits_in_float32():
    f, n = torch.tensor([[0.5], [0.0], [-1.0]]), 10**6
    variance = MultinomialLogitLikelihood(3, n)(gaussian(f, torch.full_like(f, 1e-6))).variance[0]
    p, v = f[:, 0].double().softmax(0), 1e-6
    slopes = torch.diag(p) - torch.outer(p, p)
    expected = n * p * (1 - p) + n * (n - 1) * v * slopes.square().sum(-1)  # to first order in v
    torch.testing.assert_close(variance.double(), expected, rtol=1e-4, atol=0.0)


def test_wrong_counts_are_refused():
    q = gaussian(torch.zeros(3, 2), torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"must sum to total_count=5; got 4 at index 1. With total_count=None"):
        MultinomialLogitLikelihood(3, 5).log_marginal(torch.tensor([[5, 0, 0], [2, 2, 0]]), q)
    with pytest.raises(ValueError, match=r"counts of shape \(..., N, 3\); got shape \(2,\). Class labels go with"):
        MultinomialLogitLikelihood(3, 5).check(torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"total_count must be at least 1; got 0\. With total_count=None"):
        MultinomialLogitLikelihood(3, 0)


def test_total_counts_are_whole_numbers():
    assert MultinomialLogitLikelihood(3, torch.tensor(6)).total_count == 6
    for bad in (torch.tensor([5, 6]), 2.5):
        with pytest.raises(TypeError, match="With total_count=None every datum has its own total"):
            MultinomialLogitLikelihood(3, bad)


@pytest.mark.parametrize("num_classes", [2, 5])
def test_the_log_probability_of_a_class_is_that_of_one_trial(num_classes):
    """However small it is, and whatever way it takes: without derivatives most come from E[softmax]."""
    generator = torch.Generator().manual_seed(num_classes)
    mean = 10 ** (3 * torch.rand(2, 1, 40, generator=generator, dtype=F64) - 1)
    mean = mean * torch.randn(2, num_classes, 40, generator=generator, dtype=F64)
    variance = 10 ** (6 * torch.rand(2, num_classes, 40, generator=generator, dtype=F64) - 3)
    targets = torch.randint(0, num_classes, (2, 40), generator=generator)
    counts = torch.nn.functional.one_hot(targets, num_classes).double().mT
    exact = log_multinomial_density(counts, mean, variance)
    assert 0.1 < float((exact > math.log(0.1)).double().mean()) < 0.9
    found = MultinomialLogitLikelihood(num_classes).log_density(targets, mean, variance)
    torch.testing.assert_close(found, exact, rtol=1e-11, atol=2e-10)
    mean.requires_grad_()
    (slope,) = torch.autograd.grad(
        MultinomialLogitLikelihood(num_classes).log_density(targets, mean, variance).sum(), mean
    )
    assert bool((slope * (2 * counts - 1) >= -1e-12).all())  # more of the class, less of the others


def test_log_probabilities_of_classes_come_from_the_softmax_but_for_small_ones(monkeypatch):
    seen = []
    real = multinomial.log_multinomial_density
    monkeypatch.setattr(
        multinomial, "log_multinomial_density", lambda y, m, v: seen.append(y.size(-1)) or real(y, m, v)
    )
    mean = torch.zeros(3, 10, dtype=F64)
    mean[0, :4] = -30.0
    likelihood, labels = MultinomialLogitLikelihood(3), torch.zeros(10, dtype=torch.long)
    value = likelihood.log_density(labels, mean, 0.01 * torch.ones(3, 10, dtype=F64))
    assert seen == [4]
    torch.testing.assert_close(value[:4], torch.full((4,), -30 - math.log(2), dtype=F64), rtol=0, atol=0.02)
