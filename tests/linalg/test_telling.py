"""Greedy selection: each choice is the best one given those before, by conditional variances of whole matrices."""

import pytest
import torch

from gpext.linalg.telling import most_telling

F64 = torch.float64


def covariances(values, candidates, latents, seed=0):
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(values, latents, 1 + candidates, 2 + candidates, generator=generator, dtype=F64)
    return root @ root.mT


def conditional_variance(K, given):
    """Var(f_0 | f_given) of one matrix."""
    if not given:
        return K[0, 0]
    index = torch.tensor(given) + 1
    return K[0, 0] - K[0, index] @ torch.linalg.solve(K[index][:, index], K[index, 0])


@pytest.mark.parametrize("latents", [1, 3])
def test_each_choice_lowers_the_variance_most(latents):
    K = covariances(6, 8, latents)
    found = most_telling(K, torch.ones(6, 8, dtype=torch.bool), 5)
    for of_value, chosen in zip(K, found.tolist(), strict=True):
        assert len(set(chosen)) == 5
        for step, best in enumerate(chosen):
            before = chosen[:step]
            left = {
                j: sum(conditional_variance(each, [*before, j]).log() for each in of_value)
                for j in range(8)
                if j not in before
            }
            assert min(left, key=left.get) == best


def test_others_follow_where_few_are_allowed_and_none_is_named_twice():
    allowed = torch.tensor([[False, True, False, True, False]]).repeat(4, 1)
    found = most_telling(covariances(4, 5, 1), allowed, 5)
    assert torch.equal(found.sort(-1).values, torch.arange(5).expand(4, 5))
    assert torch.equal(found[:, :2].sort(-1).values, torch.tensor([1, 3]).expand(4, 2))


def test_what_is_known_already_tells_nothing():
    x = torch.tensor([0.0, 1.0, 1.0, 1.0, 2.0], dtype=F64)  # three candidates are one and the same
    K = torch.exp(-(x.unsqueeze(-1) - x).square()).view(1, 1, 5, 5)
    assert most_telling(K, torch.ones(1, 4, dtype=torch.bool), 2).tolist() == [[0, 3]]
    zero = torch.zeros_like(K)  # nothing is uncertain: the nearest, in their order
    assert most_telling(zero, torch.ones(1, 4, dtype=torch.bool), 3).tolist() == [[0, 1, 2]]
