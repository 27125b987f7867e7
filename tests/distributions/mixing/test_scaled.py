"""A scaled distribution is that of the product, against the transformed density."""

import pytest
import torch

from gpext.distributions import InverseGaussian, Scaled


def test_scaled_is_the_law_of_the_product():
    mean, shape = torch.tensor([0.5, 3.0], dtype=torch.float64), torch.tensor([1.0, 2.0], dtype=torch.float64)
    law, exact = Scaled(InverseGaussian(mean, shape), 4.0), InverseGaussian(4 * mean, 4 * shape)
    w = torch.tensor([0.7, 30.0], dtype=torch.float64)
    for name in ("log_prob", "cdf"):
        torch.testing.assert_close(getattr(law, name)(w), getattr(exact, name)(w))
    torch.testing.assert_close(law.icdf(0.3), exact.icdf(0.3))
    torch.testing.assert_close(law.mean, exact.mean)
    torch.testing.assert_close(law.variance, exact.variance)
    with pytest.raises(ValueError, match="factor must be positive; got 0"):
        Scaled(exact, 0.0)
