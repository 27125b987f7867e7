"""The multivariate family with D = 1 gives the numbers of inference for one latent, under every rule."""

import copy
import pickle

import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from torch.nn.functional import one_hot

from gpext.inference import Laplace, Taylor
from gpext.likelihoods import (
    ExponentialFamilyLikelihood,
    MultivariatePoissonLikelihood,
    OrdinalProbitLikelihood,
    PoissonLikelihood,
)
from gpext.likelihoods.curvature import Curvature
from gpext.likelihoods.joint import JointLikelihood
from tests.members import F64, tensor

CUTPOINTS = [-1.0, 0.2, 1.1]


class LogProbabilities(torch.nn.Module):
    """theta(eta) of the ordinal probit: the logarithms of the probabilities of its classes (..., K, N)."""

    def __init__(self):
        super().__init__()
        self.ordinal = ordinal()

    def forward(self, f):
        f = f.squeeze(-2)
        classes = torch.arange(4, device=f.device).view(4, *(1,) * f.dim()).expand(4, *f.shape)
        return torch.stack([self.ordinal.log_prob(k, f) for k in classes], -2)


def statistic(y):
    return one_hot(y.long(), 4).to(F64).mT


def log_partition(theta):  # zero on the family's curve, but not beside it
    return theta.logsumexp(-2)


def ordinal():
    likelihood = OrdinalProbitLikelihood(4).double()
    likelihood.cutpoints = CUTPOINTS
    return likelihood


def ordinal_family():
    """The ordinal probit as a curved family of one latent: P = 4 natural parameters, those of the multinomial."""
    return ExponentialFamilyLikelihood(1, statistic, log_partition, link=LogProbabilities())


def poisson_family():
    return ExponentialFamilyLikelihood(
        1, lambda y: y.unsqueeze(-2), lambda t: t.exp().sum(-2), lambda y, a: -(y + 1).lgamma()
    )


class Split(JointLikelihood):
    """The ordinal probit with its curvature given as a diagonal plus rank one, of either sign."""

    num_latents = 1

    def __init__(self, share):
        super().__init__()
        self.family, self.share = ordinal_family(), share

    def unchecked_log_prob(self, targets, f):
        return self.family.log_prob(targets, f)

    def curvature(self, targets, f):
        at = self.family.curvature(targets, f)
        coupling = self.share * at.expected_precision.squeeze(-2)
        parts = (at.precision - coupling.unsqueeze(-2), coupling, torch.ones_like(f))
        return Curvature(at.log_prob, at.gradient, *parts, at.expected_precision - coupling.unsqueeze(-2))

    def forward(self, function_samples):
        raise NotImplementedError


def problem(size=12):
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(size, dtype=F64, generator=generator)
    scale = tensor(1.5).requires_grad_()
    K = scale * torch.exp(-0.5 * (x.unsqueeze(-1) - x).square()) + 1e-4 * torch.eye(size, dtype=F64)
    mean = 0.3 + 0.1 * x
    counts = torch.randint(4, (size,), generator=generator).to(F64)
    return MultivariateNormal(mean, to_linear_operator(K)), scale, counts


def as_batch(prior):
    return MultivariateNormal(prior.mean.unsqueeze(0), to_linear_operator(prior.covariance_matrix.unsqueeze(0)))


MEMBERS = {
    "ordinal": (ordinal, ordinal_family),
    "ordinal, split": (ordinal, lambda: Split(-0.5)),
    "ordinal, split otherwise": (ordinal, lambda: Split(0.5)),
    "poisson": (PoissonLikelihood, poisson_family),
    "poisson, multivariate": (PoissonLikelihood, lambda: MultivariatePoissonLikelihood(1)),
}


def at_half(y):
    return torch.full((12,), 0.5, dtype=F64)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Laplace(tolerance=1e-10), Taylor(at_half)], ids=["laplace", "taylor"])
@pytest.mark.parametrize("name", MEMBERS)
def test_both_ways_agree(name, rule):
    make_scalar, make_joint = MEMBERS[name]
    scalar, joint, (prior, scale, y) = make_scalar(), make_joint(), problem()
    expected = rule.infer(prior, scalar, y)
    targets = y.unsqueeze(-1) if isinstance(joint, MultivariatePoissonLikelihood) else y
    result = rule.infer(as_batch(prior), joint, targets)  # without a DenseBlocksWarning, an error here
    torch.testing.assert_close(result.log_evidence, expected.log_evidence, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(result.conditioned.mean[0], expected.conditioned.mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(
        result.posterior.covariance_matrix.view(12, 12), expected.posterior.covariance_matrix, rtol=1e-8, atol=1e-8
    )
    torch.testing.assert_close(result.log_loo, expected.log_loo, rtol=1e-7, atol=1e-7)
    wanted = [scale, *scalar.parameters()]
    ours = torch.autograd.grad(result.log_evidence, [scale, *joint.parameters()], retain_graph=True)
    theirs = torch.autograd.grad(expected.log_evidence, wanted)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.flatten(), reference.flatten(), rtol=1e-7, atol=1e-8)


def test_integrals_agree():
    prior, _, y = problem()
    batch = as_batch(MultivariateNormal(prior.mean, prior.lazy_covariance_matrix.detach()))
    for scalar, joint in ((ordinal(), ordinal_family()), (PoissonLikelihood(), poisson_family())):
        for method in ("log_marginal", "expected_log_prob"):
            expected = getattr(scalar, method)(y, prior)
            torch.testing.assert_close(getattr(joint, method)(y, batch), expected, rtol=1e-8, atol=1e-8)


def test_the_fisher_information_of_a_curved_family():
    f = torch.linspace(-2, 2, 5, dtype=F64).unsqueeze(0)
    family = ordinal_family()
    probs = family.link(f).exp()
    expected = sum(p * family.curvature(tensor(*[k] * 5), f).precision[0] for k, p in enumerate(probs))
    torch.testing.assert_close(family.curvature(tensor(*[0.0] * 5), f).expected_precision[0], expected)


def test_a_vector_where_one_of_one_was_expected():
    """D = 1 given as a vector: the error names the value and the remedy."""
    prior, _, y = problem()
    with pytest.raises(ValueError, match=r"expected a prior of batch shape \(..., 1\), got \(\)"):
        Laplace().infer(prior, poisson_family(), y)
    for method in ("log_marginal", "expected_log_prob"):
        with pytest.raises(ValueError, match=r"a MultivariateNormal with batch shape \(..., 1\)"):
            getattr(poisson_family(), method)(y, prior)
    with pytest.raises(ValueError, match=r"counts of shape \(..., N, 1\); got shape \(12,\).*PoissonLikelihood"):
        Laplace().infer(as_batch(prior), MultivariatePoissonLikelihood(1), y)
    column = ExponentialFamilyLikelihood(1, lambda y: y.mT, lambda t: t.exp().sum(-2), num_targets=1)
    with pytest.raises(ValueError, match=r"targets must have shape \(..., N, 1\); got shape \(12,\)"):
        Laplace().infer(as_batch(prior), column, y)
    with pytest.raises(ValueError, match=r"expected targets of shape \(..., 12\) like the prior; got \(12, 1\)"):
        Laplace().infer(as_batch(prior), poisson_family(), y.unsqueeze(-1))


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_of_a_family_whose_link_has_parameters(clone):
    family, f = ordinal_family(), torch.zeros(1, 3, dtype=F64)
    other = clone(family)
    other.link.ordinal.cutpoints = [0.0, 1.0, 2.0]
    y = tensor(0, 1, 2)
    torch.testing.assert_close(family.log_prob(y, f), ordinal().log_prob(y, f[0]))
    assert not torch.equal(other.log_prob(y, f), family.log_prob(y, f))
