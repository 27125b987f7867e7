"""The factor L of only the data with a positive precision, against dense algebra of all data."""

import pytest
import torch

from gpext.linalg.triangles import factor_whole
from gpext.posteriors import condition_dense
from gpext.posteriors.positive_factor import PositiveFactor
from gpext.sites import GaussianSites
from tests.members import F64


def problem(num_positive, n=12):
    generator = torch.Generator().manual_seed(num_positive)
    half = torch.randn(n, n, dtype=F64, generator=generator)
    root = torch.rand(n, dtype=F64, generator=generator) + 0.1
    root[torch.randperm(n, generator=generator)[num_positive:]] = 0.0
    return half @ half.mT, root, torch.randn(n, 3, dtype=F64, generator=generator)


@pytest.mark.parametrize("num_positive", [0, 1, 7, 12])
def test_agrees_with_dense_algebra(num_positive):
    K, root, columns = problem(num_positive)
    factor, ok = PositiveFactor.of(K, root)
    assert bool(ok)
    assert factor.chol.shape == (num_positive, num_positive)
    P, eye = torch.diag(root), torch.eye(len(root), dtype=F64)
    B = eye + P @ K @ P
    inverse = torch.linalg.inv(B)
    torch.testing.assert_close(factor.whole @ factor.whole.mT, B)
    torch.testing.assert_close(factor.log_det, torch.logdet(B))
    torch.testing.assert_close(factor.inverse_diagonal, inverse.diagonal())
    torch.testing.assert_close(factor.response, P @ inverse @ P)
    torch.testing.assert_close(factor.solve(columns[:, 0]), P @ inverse @ columns[:, 0])
    whitened = factor.whiten(columns)
    torch.testing.assert_close(whitened.mT @ whitened, columns.mT @ P @ inverse @ P @ columns)
    torch.testing.assert_close(factor.spread(whitened), P @ inverse @ P @ columns)
    index = root.nonzero().squeeze(-1)[::2]
    torch.testing.assert_close(factor.inverse_diagonal_at(index), inverse.diagonal()[index])
    V = K - K @ P @ inverse @ P @ K
    torch.testing.assert_close(factor.given(factor.whiten(K)), torch.where(root.unsqueeze(-1) > 0, V, 0.0))


@pytest.mark.parametrize("num_positive", [0, 5, 11])
def test_a_batch_which_has_the_factor_of_all_data_agrees(num_positive):
    K, root, columns = problem(num_positive)
    smallest = 0.1 / torch.linalg.eigvalsh(K)[-1]
    precision = torch.where(root > 0, root.square(), -smallest)
    precision[root.argmin()] = 0.0
    sites = GaussianSites(columns[:, 0], precision)
    mean = columns[:, 1]
    alone, batch = condition_dense(mean, K, sites), condition_dense(mean, K.expand(2, *K.shape), sites)
    assert alone.factor.index is not None
    assert batch.factor.index is None
    cross, there = K @ columns, columns.mT @ K @ columns
    for ours, theirs in (
        (alone.mean, batch.mean),
        (alone.variance, batch.variance),
        (alone.cavity_share, batch.cavity_share),
        (alone.covariance, batch.covariance),
        tuple(each.covariance_with(cross, each.factor.whiten(cross)) for each in (alone, batch)),
        (alone.response, batch.response),
        (alone.log_normalizer, batch.log_normalizer),
        (alone.predict(mean[:3], cross, there).mean, batch.predict(mean[:3], cross, there).mean),
        (alone.predict(mean[:3], cross, there).variance, batch.predict(mean[:3], cross, there).variance),
    ):
        torch.testing.assert_close(ours, theirs[1], rtol=1e-10, atol=1e-10)


def test_a_pivot_of_zero_is_no_success():
    """LAPACK reports success; the determinant would be zero."""
    chol, ok = factor_whole(torch.ones(3, 3, dtype=F64), torch.full((3,), 2.0**40, dtype=F64), sign=1)
    assert bool((chol.diagonal() == 0).any())
    assert not bool(ok)
