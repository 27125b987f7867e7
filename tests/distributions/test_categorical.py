"""Ordered classes: distribution function and quantiles against sums of the probabilities."""

import pytest
import torch
from gpytorch.distributions import MultivariateNormal

from gpext.distributions import OrderedCategorical
from gpext.likelihoods import OrdinalProbitLikelihood
from tests.members import F64, tensor

PROBS = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.0, 1.0, 0.0, 0.0]], dtype=F64)
ORDERED = OrderedCategorical(PROBS)


def test_the_distribution_function_adds_up():
    classes = torch.arange(4).unsqueeze(-1)
    torch.testing.assert_close(ORDERED.cdf(classes), PROBS.cumsum(-1).mT)
    torch.testing.assert_close(ORDERED.expand([3, 2]).cdf(classes[2]), PROBS.cumsum(-1)[:, 2].expand(3, 2))
    with pytest.raises(ValueError, match="support"):
        ORDERED.cdf(torch.tensor(4))


def test_a_quantile_is_the_first_class_that_is_enough():
    level = tensor(0.0, 0.05, 0.35, 0.59, 0.61, 1.0).unsqueeze(-1)
    assert ORDERED.icdf(level)[:, 0].tolist() == [0, 0, 2, 2, 3, 3]
    assert ORDERED.icdf(level)[1:, 1].tolist() == [1] * 5
    assert ORDERED.quantile(0.5).tolist() == [2, 1]


def test_predictions_of_ordered_classes_have_intervals():
    likelihood = OrdinalProbitLikelihood(3).double()
    latent = MultivariateNormal(tensor(-1.0, 2.0), torch.eye(2, dtype=F64))
    predicted = likelihood(latent)
    assert type(predicted) is type(likelihood(latent.mean)) is OrderedCategorical
    torch.testing.assert_close(predicted.cdf(torch.tensor([1, 1])), predicted.probs[:, :2].sum(-1))
