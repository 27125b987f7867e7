"""A Poisson likelihood of several outputs, against as many Poisson models."""

import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator

from gpext.distributions import LatentNormal
from gpext.inference import KL, Laplace, Taylor
from gpext.likelihoods import MultivariatePoissonLikelihood, PoissonLikelihood
from tests.members import F64, rbf_prior


def data(size=9):
    generator = torch.Generator().manual_seed(0)
    return torch.poisson(torch.tensor([1.0, 4.0, 0.3], dtype=F64).expand(size, 3), generator=generator)


def priors(size=9):
    x = torch.linspace(0, 3, size, dtype=F64).unsqueeze(-1)
    alone = [rbf_prior(x, lengthscale=s, mean=0.2 * s)[0] for s in (0.5, 1.0, 2.0)]
    means = torch.stack([p.mean.detach() for p in alone])
    return MultivariateNormal(means, torch.stack([p.covariance_matrix.detach() for p in alone])), alone


@pytest.mark.parametrize("rule", [Laplace(), Taylor(), KL(tolerance=1e-9)])
def test_is_as_many_poisson_models(rule):
    together, alone = priors()
    y = data()
    result = rule.infer(together, MultivariatePoissonLikelihood(3), y)
    separate = [rule.infer(p, PoissonLikelihood(), y[:, d]) for d, p in enumerate(alone)]
    torch.testing.assert_close(
        result.log_evidence, sum(r.log_evidence for r in separate).detach(), rtol=1e-8, atol=1e-8
    )
    mean = torch.stack([r.conditioned.mean for r in separate])
    torch.testing.assert_close(result.conditioned.mean, mean.detach(), rtol=1e-6, atol=1e-6)


def test_densities_are_sums_over_the_outputs():
    likelihood, y = MultivariatePoissonLikelihood(3), data(5)
    f, v = torch.randn(3, 5, dtype=F64), torch.rand(3, 5, dtype=F64)
    each = PoissonLikelihood()
    torch.testing.assert_close(likelihood.log_prob(y, f), each.log_prob(y.mT, f).sum(0))
    torch.testing.assert_close(likelihood.log_density(y, f, v), each.log_density(y.mT, f, v).sum(0))
    torch.testing.assert_close(likelihood.expected_log_density(y, f, v), each.expected_log_density(y.mT, f, v).sum(0))
    torch.testing.assert_close(likelihood.forward(f).log_prob(y), likelihood.log_prob(y, f))
    predicted = likelihood.marginal(MultivariateNormal(f, torch.diag_embed(v)))
    torch.testing.assert_close(predicted.log_prob(y), likelihood.log_density(y, f, v), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(predicted.mean, (f + 0.5 * v).exp().mT, rtol=1e-6, atol=1e-6)


def test_correlated_latents_count_as_such():
    likelihood, y = MultivariatePoissonLikelihood(2), data(3)[:, :2]
    mean = torch.tensor([[0.2, 1.0, -0.3], [0.5, 0.0, 0.1]], dtype=F64)
    covariance = torch.tensor([[0.4, 0.25], [0.25, 0.6]], dtype=F64).unsqueeze(-1).expand(2, 2, 3)
    grid = torch.linspace(-6, 6, 401, dtype=F64)
    f = torch.cartesian_prod(grid, grid)
    for i in range(3):
        density = torch.distributions.MultivariateNormal(mean[:, i], covariance[..., i]).log_prob(f)
        log_p = likelihood.log_prob(y[i].expand(len(f), 1, 2), f.unsqueeze(-1)).squeeze(-1)
        exact = torch.logsumexp(density + log_p, 0) + 2 * (grid[1] - grid[0]).log()
        found = likelihood.joint_log_density(y[i : i + 1], mean[:, i : i + 1], covariance[..., i : i + 1])
        torch.testing.assert_close(found.squeeze(), exact, rtol=1e-6, atol=1e-6)
    alone = torch.diag_embed(torch.tensor([0.4, 0.6], dtype=F64)).unsqueeze(-1).expand(2, 2, 3)
    by_hand = likelihood.log_density(y, mean, torch.tensor([[0.4], [0.6]], dtype=F64).expand(2, 3))
    torch.testing.assert_close(likelihood.joint_log_density(y, mean, alone), by_hand)


def test_curvature_is_that_of_autograd():
    likelihood, y = MultivariatePoissonLikelihood(3), data(4)
    f = torch.randn(3, 4, dtype=F64)
    found = likelihood.curvature(y, f)
    for i in range(4):

        def log_p(column, i=i):
            return likelihood.log_prob(y[i : i + 1], column.unsqueeze(-1)).sum()

        torch.testing.assert_close(found.gradient[:, i], torch.func.grad(log_p)(f[:, i]))
        hessian = torch.func.hessian(log_p)(f[:, i])
        torch.testing.assert_close(torch.diag(found.precision[:, i]), -hessian)


def test_bad_input():
    with pytest.raises(ValueError, match=r"counts of shape \(\.\.\., N, 3\); got shape \(9,\).*unsqueeze"):
        MultivariatePoissonLikelihood(3).check(data()[:, 0])
    with pytest.raises(ValueError, match="targets must be counts"):
        MultivariatePoissonLikelihood(3).check(data() - 1)
    with pytest.raises(ValueError, match="at least 1"):
        MultivariatePoissonLikelihood(0)


@pytest.mark.parametrize("size", [1e-14, 0.0])
def test_predictions_of_vanishing_functions_keep_their_variances(size):
    f = LatentNormal(torch.zeros(2, 3, dtype=F64), to_linear_operator(torch.full((2, 3), size, dtype=F64).diag_embed()))
    variance = MultivariatePoissonLikelihood(2)(f).base_dist.latent_variance
    torch.testing.assert_close(variance, torch.full((3, 2), size, dtype=F64), rtol=1e-12, atol=0)
