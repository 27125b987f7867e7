"""Square roots of singular matrices with their pseudo-inverses, against the Moore-Penrose conditions."""

import pytest
import torch

from gpext.posteriors import SquareRoot

F64 = torch.float64


def covariance(*batch, rank=5, size=5):
    root = torch.randn(*batch, size, rank, dtype=F64, generator=torch.Generator().manual_seed(0))
    return root @ root.mT


@pytest.mark.parametrize("rank", [5, 3])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_is_a_root_with_a_pseudo_inverse(batch, rank):
    K = covariance(*batch, rank=rank)
    root = SquareRoot.of(K)
    assert (root.inverse_scale is None) is (rank == 5)
    R = root.matrix
    torch.testing.assert_close(R @ R.mT, K)
    inverse = root.solve(torch.eye(5, dtype=F64).expand(K.shape))
    torch.testing.assert_close(inverse.mT @ inverse, torch.linalg.pinv(K, rtol=1e-10), rtol=1e-6, atol=1e-6)
    v = torch.randn(*batch, 5, dtype=F64)
    torch.testing.assert_close(root.times(v), (R @ v.unsqueeze(-1)).squeeze(-1))


def test_one_matrix_and_many_vectors():
    root = SquareRoot.of(covariance())
    v = torch.randn(4, 5, dtype=F64)
    torch.testing.assert_close(root.times(v), torch.stack([root.matrix @ row for row in v]))


def test_refuses_what_is_not_positive_semidefinite():
    with pytest.raises(ValueError, match="positive semidefinite; got a smallest eigenvalue of -1, the largest being 3"):
        SquareRoot.of(torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=F64))
