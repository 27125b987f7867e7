"""The multinomial bounds: their targets, and the best alpha of the product of sigmoids against a grid."""

import pytest
import torch

from gpext.bounds import (
    Jaakkola,
    LogSumExp,
    MultinomialTerms,
    PiecewiseQuadratic,
    ProductOfSigmoids,
    Quadrature,
)

F64 = torch.float64


def marginals(num_classes, n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mean = 2 * torch.randn(num_classes, n, generator=generator, dtype=F64)
    return mean, (2 * torch.rand(num_classes, n, generator=generator, dtype=F64)).square()


class Softmax:
    def multinomial_terms(self, labels):
        counts = torch.nn.functional.one_hot(labels, 3).mT.double()
        return MultinomialTerms(torch.zeros(len(labels), dtype=F64), counts, torch.ones(len(labels), dtype=F64))


def test_labels_are_counts_of_one():
    mean, variance = marginals(4, 6)
    labels = torch.tensor([0, 3, 2, 2, 1, 0])
    as_counts = torch.nn.functional.one_hot(labels, 4)
    ours = LogSumExp()(labels, mean, variance)
    by_hand = mean[labels, torch.arange(6)] - torch.logsumexp(mean + 0.5 * variance, 0)
    torch.testing.assert_close(ours, by_hand, rtol=1e-14, atol=0)
    torch.testing.assert_close(LogSumExp()(as_counts, mean, variance), ours, rtol=1e-14, atol=1e-14)


def test_counts_without_variance_give_the_multinomial_distribution():
    mean, _ = marginals(3, 5)
    counts = torch.tensor([[0, 2, 5], [1, 1, 1], [4, 0, 0], [0, 0, 0], [2, 3, 9]])
    bound = LogSumExp()(counts, mean, torch.zeros_like(mean))
    for row, logits, value in zip(counts, mean.T, bound, strict=True):
        exact = torch.distributions.Multinomial(int(row.sum()), logits=logits).log_prob(row.double())
        torch.testing.assert_close(value, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bound", [LogSumExp(), ProductOfSigmoids()])
def test_bind_takes_the_terms_of_the_likelihood(bound):
    mean, variance = marginals(3, 4)
    labels = torch.tensor([2, 0, 1, 1])
    bound_to_terms = bound.bind(Softmax(), labels)
    torch.testing.assert_close(bound_to_terms(mean, variance), bound(labels, mean, variance), rtol=1e-14, atol=0)
    with pytest.raises(TypeError, match=r"multinomial and categorical logit.*for object use"):
        bound.bind(object(), labels)


def test_bad_targets_are_refused():
    mean, variance = marginals(3, 2)
    for labels in (torch.tensor([0, 3]), torch.tensor([-1, 0]), torch.tensor([0.5, 1.0])):
        with pytest.raises(ValueError, match=r"labels must be integers in 0\.\.2"):
            LogSumExp()(labels, mean, variance)
    with pytest.raises(ValueError, match=r"counts must be \(\.\.\., N, K = 3\)"):
        LogSumExp()(torch.ones(2, 4), mean, variance)
    with pytest.raises(ValueError, match="nonnegative integers; got values from -1 to 1"):
        LogSumExp()(torch.tensor([[1, 1, -1], [0, 0, 0]]), mean, variance)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("inner", [PiecewiseQuadratic(20), PiecewiseQuadratic(3), Jaakkola(), Quadrature()])
@pytest.mark.parametrize("num_classes", [2, 3, 12])
def test_alpha_is_the_best_one(num_classes, inner, scale):
    mean, variance = marginals(num_classes, 20)
    mean, variance = scale * mean, scale**2 * variance
    best = ProductOfSigmoids(inner).expected_log_sum_exp(mean, variance)
    grid = torch.linspace(-6, 8, 141, dtype=F64).view(-1, 1, 1) * max(scale, 1.0)
    others = grid.squeeze(1) + inner.expected_softplus(mean - grid, variance).sum(-2)
    # A bound that jumps has several minima where the variances vanish; they differ by at most its gaps.
    slack = num_classes * inner.largest_gap if isinstance(inner, PiecewiseQuadratic) else 1e-12 * scale
    assert bool((best <= others.amin(0) + slack).all())


def test_product_of_sigmoids_is_the_tighter_one_where_variances_are_large():
    mean, variance = marginals(4, 30)
    wide = variance + 9
    assert bool((ProductOfSigmoids()(torch.zeros(30), mean, wide) > LogSumExp()(torch.zeros(30), mean, wide)).all())


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_distant_means_neither_overflow_nor_lose_the_maximum(dtype):
    mean = torch.tensor([[1e6, -1e6, 3e4], [0, 1e6, 3e4], [-1e6, 0, -3e4]], dtype=dtype)
    variance = torch.tensor([[1e-12, 1.0, 0.0], [1.0, 1e-8, 0.0], [4.0, 100.0, 0.0]], dtype=dtype)
    bound = ProductOfSigmoids().expected_log_sum_exp(mean, variance)
    assert bound.dtype == dtype
    torch.testing.assert_close(bound, mean.amax(0), rtol=1e-6, atol=1.4)  # 2 log 2 at a tie of two


def test_marginals_without_classes_are_refused():
    for bound in (LogSumExp(), ProductOfSigmoids()):
        with pytest.raises(ValueError, match=r"\(\.\.\., K, N\) of K classes; got \(2,\)"):
            bound(torch.zeros(2), torch.zeros(2), torch.ones(2))
