"""The table of distribution functions of a Gaussian plus a Gumbel variable, and sums of fewer digits."""

import math

import pytest
import torch

from gpext.likelihoods import MultinomialLogitLikelihood
from gpext.quadrature import expected_log_sum_exp
from gpext.quadrature.softmax.gumbel import cumulative
from gpext.quadrature.softmax.gumbel_windows import COARSE, EDGES, FULL, window
from tests.members import F64, tensor

INTERVALS = range(len(EDGES) - 1)


@pytest.mark.parametrize(("precision", "error"), [(FULL, 1e-12), (COARSE, 1e-8)])
@pytest.mark.parametrize("interval", INTERVALS)
def test_the_table_agrees_with_the_integral(interval, precision, error):
    series = window(interval, precision, torch.device("cpu"))
    low, high = EDGES[interval], EDGES[interval + 1]
    s = tensor(low, low + 1e-6, 0.7 * low + 0.3 * high, 0.5 * (low + high), high)
    for share in (-0.5, 0.0, 0.31, 0.5):
        offset = torch.full_like(s, share * precision.step)
        basis = series.basis(offset, s)
        values, by_mean, by_variance = (part.mT @ series.table[:, 1:-1] for part in basis)
        nodes = precision.step * (torch.arange(values.size(-1), dtype=F64) - series.side)
        exact = cumulative(nodes.expand(len(s), -1), offset.unsqueeze(-1), s.square().unsqueeze(-1))
        for actual, expected, allowed in zip((values, by_mean, by_variance), exact, (1, 30, 1000), strict=True):
            torch.testing.assert_close(actual, expected.squeeze(1), rtol=0, atol=allowed * error)
        # outside of the window it is 0 and 1
        allowed = 10 * math.exp(-precision.above)
        assert float(values[:, 0].abs().max()) < allowed
        assert float((1 - values[:, -1]).abs().max()) < allowed


@pytest.mark.parametrize("largest", [0.0, 1e-3, 1.0, 12.0, 30.0, 1e3])
def test_fewer_digits_err_as_stated(largest):
    generator = torch.Generator().manual_seed(0)
    mean = 4 * torch.randn(26, 40, generator=generator, dtype=F64)
    variance = largest * torch.rand(26, 40, generator=generator, dtype=F64)
    found = []
    for tolerance in (1e-11, 1e-7):
        m, v = mean.clone().requires_grad_(), variance.clone().requires_grad_()
        value = expected_log_sum_exp(m, v, tolerance=tolerance)
        value.sum().backward()
        found.append((value, m.grad, v.grad))
    for full, coarse, allowed in zip(*found, (1e-7 * (1 + float(mean.abs().max())), 1e-6, 1e-6), strict=True):
        torch.testing.assert_close(coarse, full, rtol=0, atol=allowed)
    assert not torch.equal(found[0][0], found[1][0])


def test_a_likelihood_has_a_tolerance():
    mean, variance, targets = torch.zeros(3, 2, dtype=F64), torch.ones(3, 2, dtype=F64), torch.tensor([0, 2])
    coarse = MultinomialLogitLikelihood(3, tolerance=1e-7).expected_log_density(targets, mean, variance)
    full = MultinomialLogitLikelihood(3).expected_log_density(targets, mean, variance)
    assert 0 < float((coarse - full).abs().max()) < 1e-7
    with pytest.raises(ValueError, match="tolerance must be positive; got 0"):
        MultinomialLogitLikelihood(3, tolerance=0)
