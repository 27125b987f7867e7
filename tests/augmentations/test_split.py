"""Augmentation terms of all data, split along the data, are the terms of the parts."""

import pytest
import torch

from gpext.inference import augmented_sites
from tests.members import F64, MEMBERS


@pytest.mark.parametrize("name", MEMBERS)
@pytest.mark.parametrize("size", [1, 4, 10, 13])
def test_parts_are_the_augmentations_of_parts(name, size):
    member = MEMBERS[name]
    y = member.targets(10)
    mean, variance = torch.linspace(-2, 2, 10, dtype=F64), torch.linspace(0.1, 3, 10, dtype=F64)
    with torch.no_grad():
        parts = member.likelihood.augmentation(y).split(size, 10)
        assert len(parts) == len(y.split(size))
        for part, targets, m, v in zip(parts, y.split(size), mean.split(size), variance.split(size), strict=True):
            own = member.likelihood.augmentation(targets)
            torch.testing.assert_close(part.bound(m, v), own.bound(m, v), rtol=1e-14, atol=1e-14)
            sites, expected = augmented_sites(part, m, v), augmented_sites(own, m, v)
            torch.testing.assert_close(sites.shift, expected.shift, rtol=1e-14, atol=1e-14)
            torch.testing.assert_close(sites.precision, expected.precision, rtol=1e-14, atol=1e-14)
