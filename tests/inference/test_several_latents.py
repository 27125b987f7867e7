"""Laplace and Taylor for several latents per datum, against a dense implementation by explicit inverses."""

import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from torch.nn.functional import one_hot

from gpext.inference import EP, KL, DenseBlocksWarning, Laplace, Status, Taylor
from gpext.likelihoods import (
    DirichletLikelihood,
    HeteroscedasticGaussianLikelihood,
    MultinomialLogitLikelihood,
    MultivariatePoissonLikelihood,
    StickBreakingLikelihood,
    VonMisesLikelihood,
)
from gpext.posteriors import LowRankPrior
from tests.latent_cases import CASES
from tests.members import F64


def problem(classes, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(size, dtype=F64, generator=generator)
    kernels = [1.5 * torch.exp(-0.5 * ((x.unsqueeze(-1) - x) / s) ** 2) for s in torch.linspace(0.5, 2, classes)]
    mean = 0.3 * torch.randn(classes, size, dtype=F64, generator=generator)
    y = torch.randint(classes, (size,), generator=generator)
    return mean, torch.stack(kernels) + 1e-3 * torch.eye(size, dtype=F64), y


def prior(mean, covariance):
    return MultivariateNormal(mean, to_linear_operator(covariance))


def blocks(probs, counts):
    """n (diag pi - pi pi') of every datum as one matrix, latent by latent."""
    latents, size = probs.shape
    W = torch.diag((counts * probs).flatten())
    for i in range(size):
        at = torch.arange(latents) * size + i
        W[at.unsqueeze(-1), at] -= counts[i] * torch.outer(probs[:, i], probs[:, i])
    return W


def dense_laplace(mean, covariance, y):
    """Multi-class Laplace [R&W Alg. 3.3], by explicit inverses."""
    classes, size = mean.shape
    K, mu = torch.block_diag(*covariance), mean.flatten()
    labels = one_hot(y, classes).to(F64).mT.flatten()
    f, ones = mu, torch.ones(size, dtype=F64)
    for _ in range(100):
        probs = f.view(classes, size).softmax(0)
        W = blocks(probs, ones)
        V = torch.linalg.inv(torch.linalg.inv(K) + W)
        f = mu + V @ (labels - probs.flatten() + W @ (f - mu))
    log_p = (labels * f.view(classes, size).log_softmax(0).flatten()).sum()
    log_det = torch.logdet(torch.eye(len(K), dtype=F64) + K @ W)
    return f.view(classes, size), V, log_p - 0.5 * (f - mu) @ torch.linalg.solve(K, f - mu) - 0.5 * log_det


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_multinomial_is_multi_class_laplace(classes):
    mean, covariance, y = problem(classes, 20)
    result = Laplace().infer(prior(mean, covariance), MultinomialLogitLikelihood(classes), y)
    assert result.status is Status.CONVERGED
    f, V, evidence = dense_laplace(mean, covariance, y)
    torch.testing.assert_close(result.conditioned.mean, f, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(result.posterior.covariance_matrix, V, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(result.log_evidence, evidence, rtol=1e-8, atol=1e-8)


def test_two_classes_with_one_latent_held_at_zero_are_the_binary_likelihood():
    from gpext.likelihoods import BernoulliLogitLikelihood

    mean, covariance, y = problem(2, 15)
    covariance = torch.stack([1e-14 * torch.eye(15, dtype=F64), covariance[1]])
    mean = torch.stack([torch.zeros(15, dtype=F64), mean[1]])
    two = Laplace().infer(prior(mean, covariance), MultinomialLogitLikelihood(2), y)
    one = Laplace().infer(prior(mean[1], covariance[1]), BernoulliLogitLikelihood(), y.to(F64))
    torch.testing.assert_close(two.log_evidence, one.log_evidence, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(two.conditioned.mean[1], one.posterior.mean, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("rule", [Laplace(tolerance=1e-11), Taylor()])
@pytest.mark.parametrize("total", [1, 7])
def test_evidence_gradient_agrees_with_finite_differences(rule, total):
    mean, covariance, y = problem(3, 10)
    if total > 1:
        generator = torch.Generator().manual_seed(1)
        y = torch.distributions.Multinomial(total, torch.rand(10, 3, generator=generator)).sample().to(F64)
    likelihood = MultinomialLogitLikelihood(3, total_count=total)
    log_scale, shift = (torch.zeros(3, dtype=F64, requires_grad=True) for _ in range(2))

    def evidence():
        scaled = log_scale.exp().view(3, 1, 1) * covariance
        return rule.infer(prior(mean + shift.unsqueeze(-1), scaled), likelihood, y).log_evidence

    evidence().backward()
    for parameter in (log_scale, shift):
        for i in range(3):
            values = []
            for offset in (-2, -1, 1, 2):
                with torch.no_grad():
                    parameter[i] += offset * 1e-3
                    values.append(evidence().item())
                    parameter[i] -= offset * 1e-3
            slope = (8 * (values[2] - values[1]) - (values[3] - values[0])) / 12e-3
            assert parameter.grad[i].item() == pytest.approx(slope, rel=1e-6, abs=1e-7)


def test_taylor_at_zero_is_one_against_all_label_regression():
    """At f = 0 all classes are equally likely: Gaussian regression of the labels [Cha13 Sec. 4.1]."""
    mean, covariance, y = problem(3, 12)
    mean = torch.zeros_like(mean)
    result = Taylor().infer(prior(mean, covariance), MultinomialLogitLikelihood(3), y)
    labels = one_hot(y, 3).to(F64).mT
    K, W = torch.block_diag(*covariance), blocks(torch.full((3, 12), 1 / 3, dtype=F64), torch.ones(12, dtype=F64))
    V = torch.linalg.inv(torch.linalg.inv(K) + W)
    expected = V @ (labels - 1 / 3).flatten()
    torch.testing.assert_close(result.conditioned.mean.flatten(), expected, rtol=1e-9, atol=1e-9)
    same = covariance[:1].expand(3, 12, 12)  # one kernel for all: the labels' regressions are independent
    coupled = Taylor().infer(prior(mean, same), MultinomialLogitLikelihood(3), y).conditioned.mean
    alone = same[0] @ torch.linalg.solve(same[0] + 3 * torch.eye(12, dtype=F64), 3 * (labels - 1 / 3).mT)
    torch.testing.assert_close(coupled, alone.mT, rtol=1e-9, atol=1e-9)


def test_a_likelihood_that_does_not_say_its_curvature_is_refused():
    mean, covariance, y = problem(2, 8)
    for rule in (Laplace(), Taylor()):
        with pytest.raises(TypeError, match=r"StickBreakingLikelihood has no method curvature.*KL\(\) serves it"):
            rule.infer(prior(mean, covariance), StickBreakingLikelihood(3), y)


def test_what_overflows_is_said_and_has_no_evidence():
    far = prior(torch.full((2, 3), 1e308, dtype=F64), torch.eye(3, dtype=F64).expand(2, 3, 3))
    result = Laplace().infer(far, DirichletLikelihood(2), torch.full((3, 2), 0.5, dtype=F64))
    assert result.status is Status.NOT_FINITE
    assert result.log_evidence.item() == -torch.inf


def test_starts_warm_from_sites_that_couple():
    mean, covariance, y = problem(3, 15)
    likelihood = MultinomialLogitLikelihood(3)
    cold = Laplace().infer(prior(mean, covariance), likelihood, y)
    warm = Laplace().infer(prior(mean, covariance), likelihood, y, start=cold.sites)
    assert warm.num_steps < cold.num_steps
    torch.testing.assert_close(warm.log_evidence, cold.log_evidence, rtol=1e-9, atol=0)  # tolerances of 1e-10


def test_float32_and_batches():
    mean, covariance, y = problem(3, 12)
    likelihood = MultinomialLogitLikelihood(3)
    exact = Laplace().infer(prior(mean, covariance), likelihood, y)
    single = Laplace().infer(prior(mean.float(), covariance.float()), likelihood, y)
    assert single.log_evidence.dtype == torch.float32
    torch.testing.assert_close(single.log_evidence.double(), exact.log_evidence, rtol=1e-4, atol=1e-3)
    scales = torch.tensor([0.5, 2.0], dtype=F64).view(2, 1, 1, 1)
    several = Laplace().infer(prior(mean.expand(2, 3, 12), scales * covariance), likelihood, y)
    for b, scale in enumerate((0.5, 2.0)):
        alone = Laplace().infer(prior(mean, scale * covariance), likelihood, y)
        torch.testing.assert_close(several.log_evidence[b], alone.log_evidence, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("rule", [Laplace(), Taylor()])
def test_a_sparse_prior_is_inferred_as_the_dense_one_it_is(rule):
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(3, 10, 4, dtype=F64, generator=generator).requires_grad_()
    rest = torch.rand(3, 10, dtype=F64, generator=generator).requires_grad_()
    y = torch.arange(10) % 3
    sparse = LowRankPrior(torch.zeros(3, 10, dtype=F64), root, rest).distribution
    dense = prior(torch.zeros(3, 10, dtype=F64), root @ root.mT + torch.diag_embed(rest))
    ours, theirs = (rule.infer(p, MultinomialLogitLikelihood(3), y) for p in (sparse, dense))
    torch.testing.assert_close(ours.log_evidence, theirs.log_evidence, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours.conditioned.blocks, theirs.conditioned.blocks, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(ours.log_loo, theirs.log_loo, rtol=1e-7, atol=1e-7)
    for a, b in zip(
        torch.autograd.grad(ours.log_evidence, [root, rest]),
        torch.autograd.grad(theirs.log_evidence, [root, rest]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::gpext.inference.DenseBlocksWarning")
@pytest.mark.parametrize("rule", [Laplace(), Taylor(), KL(tolerance=1e-8)], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("name", ["multinomial", "trials", "von_mises", "dirichlet", "family_beta"])
def test_a_batch_of_targets_shares_one_prior(rule, name):
    case = CASES[name]
    likelihood, prior, targets = case.problem(5)
    other = case.problem(5, seed=1)[2]
    both = rule.infer(prior(), likelihood, torch.stack([targets, other]))
    for k, each in enumerate((targets, other)):
        one = rule.infer(prior(), likelihood, each)
        torch.testing.assert_close(both.log_evidence[k], one.log_evidence, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(both.posterior.mean[k], one.posterior.mean, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", [KL(), EP(), Laplace()], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("likelihood", [VonMisesLikelihood(), HeteroscedasticGaussianLikelihood()])
def test_latents_may_share_one_covariance(rule, likelihood):
    """A prior with means (D, N) and a covariance (N, N) is that of the same covariance D times."""
    _, covariance, _ = problem(2, 9)
    mean, y = torch.tensor([[0.4], [-0.3]], dtype=F64).expand(2, 9), torch.linspace(-0.5, 1, 9, dtype=F64)
    shared = rule.infer(MultivariateNormal(mean, to_linear_operator(covariance[0])), likelihood, y)
    repeated = rule.infer(prior(mean, covariance[:1].expand(2, 9, 9)), likelihood, y)
    torch.testing.assert_close(shared.log_evidence, repeated.log_evidence, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(shared.posterior.mean, repeated.posterior.mean, rtol=1e-7, atol=1e-7)


def test_where_rounding_leaves_no_determinant_there_is_no_evidence():
    """Prior variances of 1e8 with a condition number beyond 1e20."""
    x = torch.linspace(0, 1, 200, dtype=F64)
    K = 1e8 * torch.exp(-2 * (x.unsqueeze(-1) - x).square())
    targets = torch.randint(3, (200,), generator=torch.Generator().manual_seed(0))
    result = Laplace().infer(
        prior(torch.zeros(3, 200, dtype=F64), K.expand(3, -1, -1)), MultinomialLogitLikelihood(3), targets
    )
    assert not bool(result.trace.isnan().any())  # the rounding differs between machines
    assert bool(result.log_evidence.isfinite()) or result.status is not Status.CONVERGED


@pytest.mark.parametrize("count", [1e10, 1e14, 1e17])
def test_leave_one_out_densities_of_giant_counts_are_right_or_nan(count):
    prior = MultivariateNormal(
        torch.zeros(1, 1, dtype=F64), to_linear_operator(torch.full((1, 1, 1), 100.0, dtype=F64))
    )
    targets = torch.tensor([[count]], dtype=F64)
    likelihood = MultivariatePoissonLikelihood(1)
    result = Laplace().infer(prior, likelihood, targets)
    assert result.status is Status.CONVERGED
    alone = likelihood.log_density(targets, torch.zeros(1, 1, dtype=F64), torch.full((1, 1), 100.0, dtype=F64))
    if count < 1e12:
        torch.testing.assert_close(result.log_loo, alone, rtol=1e-2, atol=0)
    else:
        assert bool(result.log_loo.isnan().all())


def test_ep_of_three_latents_is_near_the_evidence_of_a_product_rule_and_warns_of_its_cost():
    """One softmax datum: the cavity is the prior, and the moments are exact."""
    mean, covariance, y = problem(3, 1)
    with pytest.warns(DenseBlocksWarning, match="EP couples the latents"):
        result = EP().infer(prior(mean, covariance), MultinomialLogitLikelihood(3), y)
    assert result.status is Status.CONVERGED
    line = torch.linspace(-8, 8, 61, dtype=F64)
    z = torch.cartesian_prod(line, line, line)
    f = mean.squeeze(-1) + z * covariance[:, 0, 0].sqrt()
    log_weight = -0.5 * z.square().sum(-1) + f.log_softmax(-1)[:, int(y)]
    exact = log_weight.logsumexp(0) + 3 * ((line[1] - line[0]) / (2 * torch.pi) ** 0.5).log()
    torch.testing.assert_close(result.log_evidence.detach(), exact, rtol=0, atol=1e-6)
    weight = log_weight.softmax(0)
    torch.testing.assert_close(result.conditioned.mean.squeeze(-1), weight @ f, rtol=0, atol=1e-5)


def test_kl_starts_from_sites_that_couple_the_latents_of_a_datum():
    likelihood, prior, y = CASES["multinomial"].problem(12)
    coupled = Laplace().infer(prior(), likelihood, y)
    fresh, started = KL().infer(prior(), likelihood, y), KL().infer(prior(), likelihood, y, start=coupled.sites)
    torch.testing.assert_close(started.log_evidence, fresh.log_evidence, rtol=1e-6, atol=1e-5)
