"""log p(y | f) of user-defined likelihoods, and errors for those without a slope in f."""

import gpytorch
import pytest
import torch

from gpext.inference import EP, KL, Laplace, Taylor
from gpext.likelihoods import BernoulliLogitLikelihood
from tests.members import F64, rbf_prior, tensor

LABELS = tensor(0.0, 0.0, 1.0, 1.0, 1.0)
PRIOR = rbf_prior(torch.linspace(0, 2, 5, dtype=F64))[0]


class Step(gpytorch.likelihoods.Likelihood):
    """The class is the sign of f, nine times out of ten: a valid likelihood without a slope."""

    def forward(self, f):
        return torch.distributions.Bernoulli(0.1 + 0.8 * (f > 0).to(f))


class Detached(gpytorch.likelihoods.Likelihood):
    def forward(self, f):
        return torch.distributions.Bernoulli(logits=f.detach())


@pytest.mark.parametrize("likelihood", [Step(), Detached()], ids=["step", "detached"])
@pytest.mark.parametrize("rule", [KL(), Laplace(), Taylor()], ids=lambda rule: type(rule).__name__)
def test_a_density_without_a_slope_in_f_is_refused_by_rules_that_follow_it(rule, likelihood):
    """With a slope of zero such rules would take the prior for the posterior."""
    with pytest.raises(ValueError, match=f"of {type(likelihood).__name__} on f: compute.*EP"):
        rule.infer(PRIOR, likelihood, LABELS)


def test_moments_need_no_slope():
    result = EP().infer(PRIOR, Detached(), LABELS)
    expected = EP().infer(PRIOR, BernoulliLogitLikelihood(), LABELS)
    torch.testing.assert_close(result.posterior.mean, expected.posterior.mean)
    torch.testing.assert_close(result.log_evidence, expected.log_evidence)
    assert EP().infer(PRIOR, Step(), LABELS).posterior.mean[-1] > 0
