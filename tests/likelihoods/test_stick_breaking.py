import mpmath
import pytest
import torch

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
