"""Products of groups of rows, against the same with a copy of them."""

import pytest
import torch

from gpext.linalg import gathered
from gpext.linalg.gathered import gathered_gram, gathered_grams, gathered_sums, gathered_times
from tests.members import F64


@pytest.fixture(autouse=True, params=[8, 2**18])
def size_of_parts(request, monkeypatch):
    monkeypatch.setattr(gathered, "_AT_ONCE", request.param)


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("columns", [0, 3])
def test_they_are_those_of_the_copy(batch, columns):
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(*batch, 7, columns, generator=generator, dtype=F64, requires_grad=True)
    rows = torch.randint(7, (5, 4), generator=generator)  # some of them twice
    copy = matrix[..., rows, :]
    expected, found = copy @ copy.mT, gathered_gram(matrix, rows)
    torch.testing.assert_close(found, expected)
    into = torch.randn(expected.shape, generator=generator, dtype=F64)  # not symmetric
    for a, b in zip(*(torch.autograd.grad(each, matrix, into) for each in (found, expected)), strict=True):
        torch.testing.assert_close(a, b)
    weights = torch.randn(*batch, 5, 4, generator=generator, dtype=F64)
    times = (expected.detach() @ weights.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(gathered_times(matrix, rows, weights), times)


@pytest.mark.parametrize("batch", [(), (2,)])
def test_rows_of_the_first_of_groups_of_several_sizes(batch):
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(*batch, 7, 3, generator=generator, dtype=F64, requires_grad=True)
    groups = [(torch.randint(7, (5, size), generator=generator), s) for size, s in ((4, 1), (3, 2), (2, 2))]
    expected = [matrix[..., rows[:, :s], :] @ matrix[..., rows, :].mT for rows, s in groups]
    found = gathered_grams(matrix, groups)
    into = [torch.randn(each.shape, generator=generator, dtype=F64) for each in expected]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(torch.autograd.grad(found, matrix, into), torch.autograd.grad(expected, matrix, into))


def test_weights_of_a_batch():
    generator = torch.Generator().manual_seed(0)
    matrix, rows = torch.randn(7, 3, generator=generator, dtype=F64), torch.randint(7, (5, 4), generator=generator)
    weights = torch.randn(2, 5, 4, generator=generator, dtype=F64)
    found = gathered_times(matrix, rows, weights)
    for i in range(2):
        torch.testing.assert_close(found[i], gathered_times(matrix, rows, weights[i]))


@pytest.mark.parametrize("groups", [0, 7])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_sums_are_those_of_a_copy(batch, groups):
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(*batch, 9, 3, dtype=F64, generator=generator)
    rows = torch.randint(0, 9, (groups, 4), generator=generator)
    weights = torch.randn(*batch, groups, 4, dtype=F64, generator=generator)
    expected = (weights.unsqueeze(-1) * matrix[..., rows, :]).sum(-2)
    torch.testing.assert_close(gathered_sums(matrix, rows, weights), expected)
