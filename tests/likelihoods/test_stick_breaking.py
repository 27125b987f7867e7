"""The stick-breaking likelihood, against its binary choices."""

import mpmath
import numpy as np
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from scipy.special import expit

from gpext.likelihoods import BernoulliLogitLikelihood, StickBreakingLikelihood
from tests.members import F64, tensor


def test_classes_are_pieces_of_the_stick():
    f = tensor(0.5, -1.0, 2.0).unsqueeze(-1)
    p = f.sigmoid().squeeze(-1)
    pieces = torch.stack([p[0], (1 - p[0]) * p[1], (1 - p[0]) * (1 - p[1]) * p[2], (1 - p).prod()])
    torch.testing.assert_close(StickBreakingLikelihood(4)(f).probs[0], pieces)
    log_prob = StickBreakingLikelihood(4).log_prob(torch.arange(4), f.expand(3, 4))
    torch.testing.assert_close(log_prob, pieces.log())


def test_integrals_are_those_of_the_binary_choices_by_mpmath():
    mean, variance = (0.5, -30.0, 2.0), (1.0, 4.0, 16.0)
    likelihood, labels = StickBreakingLikelihood(4), torch.arange(4)
    m, v = (tensor(*values).unsqueeze(-1).expand(3, 4) for values in (mean, variance))

    def integrals(j, sign):
        s = mpmath.sqrt(variance[j])
        points = sorted({mean[j] + k * s for k in (-20, -10, -4, 0, 4, 10, 20)} | {0.0})

        def density(f):
            return mpmath.npdf(f, mean[j], s)

        log = mpmath.quad(lambda f: -mpmath.log1p(mpmath.exp(-sign * f)) * density(f), points)
        return log, mpmath.log(mpmath.quad(lambda f: density(f) / (1 + mpmath.exp(-sign * f)), points))

    choices = [[(1, 0)], [(-1, 0), (1, 1)], [(-1, 0), (-1, 1), (1, 2)], [(-1, 0), (-1, 1), (-1, 2)]]
    for index, method in enumerate(("expected_log_density", "log_density")):
        value = getattr(likelihood, method)(labels, m, v)
        for k in range(4):
            expected = float(sum(integrals(j, sign)[index] for sign, j in choices[k]))
            assert value[k].item() == pytest.approx(expected, rel=1e-9)


def test_a_latent_sees_only_the_data_that_come_to_it():
    mean = torch.zeros(3, 4, dtype=F64, requires_grad=True)
    value = StickBreakingLikelihood(4).expected_log_density(torch.arange(4), mean, torch.ones(3, 4, dtype=F64))
    (gradient,) = torch.autograd.grad(value.sum(), mean)
    assert (gradient != 0).int().tolist() == [[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1]]
    assert StickBreakingLikelihood(4).softplus_terms(torch.arange(4)).weight.shape == (1, 3, 4)


def test_two_classes_are_the_binary_likelihood_of_the_first():
    mean, variance = torch.randn(1, 5, dtype=F64), torch.rand(1, 5, dtype=F64)
    y = torch.tensor([0, 1, 1, 0, 1])
    for method in ("expected_log_density", "log_density"):
        expected = getattr(BernoulliLogitLikelihood(), method)((1 - y).to(F64), mean[0], variance[0])
        torch.testing.assert_close(getattr(StickBreakingLikelihood(2), method)(y, mean, variance), expected)


@pytest.mark.parametrize("interleaved", [True, False])
def test_predictions_see_the_correlation_of_the_latents_of_a_datum(interleaved):
    mean, V = tensor((0.4, 1.2), (-1.0, 0.5)), tensor((2.0, 1.7), (1.7, 3.0))
    covariance = torch.block_diag(V, 0.1 * V)
    if not interleaved:
        covariance = covariance[[0, 2, 1, 3]][:, [0, 2, 1, 3]]
    q = MultitaskMultivariateNormal(mean, covariance, interleaved=interleaved)
    z, w = np.polynomial.hermite_e.hermegauss(120)
    z = np.stack(np.meshgrid(z, z), -1).reshape(-1, 2)
    w = np.outer(w, w).ravel() / (2 * np.pi)
    likelihood = StickBreakingLikelihood(3)
    for i, scale in enumerate((1.0, 0.1)):
        p = expit(mean[i].numpy() + z @ np.linalg.cholesky(scale * V.numpy()).T)
        pieces = np.stack([p[:, 0], (1 - p[:, 0]) * p[:, 1], (1 - p[:, 0]) * (1 - p[:, 1])])
        expected = torch.from_numpy(pieces @ w)
        torch.testing.assert_close(likelihood(q).probs[i], expected, rtol=1e-7, atol=0.0)
        for label in range(3):
            log_marginal = likelihood.log_marginal(torch.full((2,), label), q)[i]
            torch.testing.assert_close(log_marginal, expected[label].log(), rtol=1e-7, atol=1e-7)
