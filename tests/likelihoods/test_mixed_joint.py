"""MixedLikelihood with families of several latents, against dense grids, the families alone and finite differences."""

import copy
import pickle

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator import to_linear_operator

from gpext.inference import CAVI, EP, KL, Laplace, Taylor
from gpext.likelihoods import (
    BernoulliLogitLikelihood,
    HeteroscedasticGaussianLikelihood,
    MixedLikelihood,
    MultinomialLogitLikelihood,
    PoissonLikelihood,
    StickBreakingLikelihood,
    StudentTLikelihood,
    VonMisesLikelihood,
)
from gpext.likelihoods.curvature import BlockCurvature, Curvature
from gpext.models import LatentGP
from gpext.variational import CollapsedBound, SiteVariationalStrategy
from tests.latent_cases import CASES
from tests.members import F64

RULES = {"Taylor": Taylor(), "Laplace": Laplace(tolerance=1e-11), "KL": KL(tolerance=1e-11), "EP": EP(tolerance=1e-11)}
FAMILIES = torch.tensor([0, 2, 1, 2, 0, 1, 3, 3])
TARGETS = torch.tensor([2.0, 0.4, 1.0, -2.1, 0.0, 0.0, 0.7, -1.2], dtype=F64)


def members():
    likelihoods = [PoissonLikelihood(), BernoulliLogitLikelihood(), VonMisesLikelihood(), StudentTLikelihood()]
    return [likelihood.double() for likelihood in likelihoods]


def priors(size, latents=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.linspace(0, 2, size, dtype=F64)
    K = torch.stack([s * torch.exp(-0.5 * (x - x[:, None]) ** 2) for s in (1.2, 0.7, 0.9)[:latents]])
    mean = 0.4 * torch.randn(latents, size, dtype=F64, generator=generator)
    return MultivariateNormal(mean, to_linear_operator(K + 1e-4 * torch.eye(size, dtype=F64)))


def blocks(size, latents, generator):
    root = torch.randn(size, latents, latents, dtype=F64, generator=generator)
    return (root @ root.mT + 0.2 * torch.eye(latents, dtype=F64)).movedim(-3, -1)


def test_the_class_is_a_mixed_likelihood_of_the_largest_number_of_latents():
    assert MixedLikelihood(members(), FAMILIES).num_latents == 2
    assert MixedLikelihood([*members(), MultinomialLogitLikelihood(3)]).num_latents == 3
    assert MixedLikelihood(members()[:2]).num_latents is None


@pytest.mark.parametrize("rule", ["Laplace", "KL", "EP"])
def test_one_family_of_several_latents_is_that_likelihood(rule):
    angles = torch.tensor([0.3, -0.8, 0.9, 2.8], dtype=F64)
    prior = priors(4)
    alone = RULES[rule].infer(prior, VonMisesLikelihood(), angles)
    mixed = RULES[rule].infer(prior, MixedLikelihood([VonMisesLikelihood()], torch.zeros(4).long()), angles)
    torch.testing.assert_close(mixed.log_evidence, alone.log_evidence, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(mixed.posterior.mean, alone.posterior.mean, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        mixed.posterior.covariance_matrix, alone.posterior.covariance_matrix, rtol=1e-10, atol=1e-10
    )
    torch.testing.assert_close(mixed.log_loo, alone.log_loo, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("rule", RULES)
def test_without_data_of_several_latents_it_is_the_mixture_of_one_latent(rule):
    """The first latent has the posterior of the class of one latent, the second its prior; so has the evidence."""
    rows = FAMILIES != 2
    y, families, prior = TARGETS[rows], FAMILIES[rows], priors(8)
    mean, covariance = prior.mean[:, rows], prior.covariance_matrix[:, rows][:, :, rows]
    joint = RULES[rule].infer(
        MultivariateNormal(mean, to_linear_operator(covariance)), MixedLikelihood(members(), families), y
    )
    one_latent = [each for k, each in enumerate(members()) if k != 2]
    single = RULES[rule].infer(
        MultivariateNormal(mean[0], to_linear_operator(covariance[0])),
        MixedLikelihood(one_latent, torch.where(families == 3, 2, families)),
        y,
    )
    close = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(joint.log_evidence, single.log_evidence, **close)
    torch.testing.assert_close(joint.conditioned.mean[0], single.conditioned.mean, **close)
    torch.testing.assert_close(joint.conditioned.variance[0], single.conditioned.variance, **close)
    torch.testing.assert_close(joint.conditioned.mean[1], mean[1], **close)
    torch.testing.assert_close(joint.conditioned.variance[1], covariance[1].diagonal(), **close)
    torch.testing.assert_close(joint.log_loo, single.log_loo, rtol=1e-7, atol=1e-7)


def grid_posterior(prior, likelihood, y, width=7.0, points=61):
    """The evidence and the means (2, 2) of two data of two latents each, on a grid in four dimensions.

    The trapezoidal rule on a function that decays like a Gaussian converges geometrically.
    """
    K = torch.block_diag(*prior.covariance_matrix)
    chol = torch.linalg.cholesky(K)
    nodes = torch.linspace(-width, width, points, dtype=F64)
    z = torch.cartesian_prod(nodes, nodes, nodes, nodes)
    weights = torch.exp(-0.5 * z.square().sum(-1)) * ((nodes[1] - nodes[0]) / (2 * torch.pi) ** 0.5) ** 4
    f = (prior.mean.flatten() + z @ chol.mT).view(-1, 2, 2)  # (Q, D, N)
    weights = weights * likelihood.log_prob(y, f).sum(-1).exp()
    total = weights.sum()
    return total.log(), (weights @ f.flatten(1) / total).view(2, 2)


def test_two_data_against_a_grid_in_four_dimensions():
    """An angle and a count: EP within 0.003 nats, KL below the evidence."""
    prior, y = priors(2, seed=3), torch.tensor([0.9, 1.0], dtype=F64)
    likelihood = MixedLikelihood([PoissonLikelihood(), VonMisesLikelihood()], torch.tensor([1, 0]))
    evidence, mean = grid_posterior(prior, likelihood, y, points=41)
    ep, kl, laplace = (RULES[rule].infer(prior, likelihood, y) for rule in ("EP", "KL", "Laplace"))
    assert ep.log_evidence.item() == pytest.approx(evidence.item(), abs=3e-3)
    assert kl.log_evidence.item() < evidence.item()
    assert kl.log_evidence.item() == pytest.approx(evidence.item(), abs=0.1)
    assert laplace.log_evidence.item() == pytest.approx(evidence.item(), abs=0.1)
    torch.testing.assert_close(ep.conditioned.mean, mean, rtol=0, atol=5e-3)


def test_uncorrelated_data_under_ep_are_exact():
    """With nothing between two data the evidence of EP is the product of the exact ones."""
    covariance = torch.diag_embed(torch.tensor([[1.1, 0.6], [0.8, 1.4]], dtype=F64))
    prior = MultivariateNormal(torch.tensor([[0.3, -0.2], [0.1, 0.5]], dtype=F64), to_linear_operator(covariance))
    y = torch.tensor([0.9, 1.0], dtype=F64)
    likelihood = MixedLikelihood([PoissonLikelihood(), VonMisesLikelihood()], torch.tensor([1, 0]))
    evidence, mean = grid_posterior(prior, likelihood, y, points=41)
    found = RULES["EP"].infer(prior, likelihood, y)
    assert found.log_evidence.item() == pytest.approx(evidence.item(), abs=1e-7)
    torch.testing.assert_close(found.conditioned.mean, mean, rtol=0, atol=1e-7)


@pytest.mark.parametrize("power", [1.0, 0.5])
def test_tilted_moments_of_correlated_latents_against_a_grid(power):
    """A count that depends on the first of three correlated latents, and an angle that depends on two."""
    generator = torch.Generator().manual_seed(1)
    likelihood = MixedLikelihood(
        [PoissonLikelihood(), VonMisesLikelihood(), MultinomialLogitLikelihood(3)], torch.tensor([0, 1])
    )
    y, mean = torch.tensor([2.0, 0.7], dtype=F64), 0.5 * torch.randn(3, 2, dtype=F64, generator=generator)
    V = blocks(2, 3, generator)
    found = likelihood.joint_tilted_moments(y, mean, V, power)
    nodes = torch.linspace(-8, 8, 81, dtype=F64)
    z = torch.cartesian_prod(nodes, nodes, nodes)
    base = torch.exp(-0.5 * z.square().sum(-1)) * ((nodes[1] - nodes[0]) / (2 * torch.pi) ** 0.5) ** 3
    chol = torch.linalg.cholesky(V.movedim(-1, -3))
    f = mean.mT[:, None] + z @ chol.mT  # (N, Q, D)
    weights = base * (power * likelihood.log_prob(y, f.movedim(0, -1)).mT).exp()
    total = weights.sum(-1)
    centre = torch.einsum("nq,nqd->nd", weights, f) / total[:, None]
    off = f - centre[:, None]
    covariance = torch.einsum("nq,nqd,nqe->nde", weights, off, off) / total[:, None, None]
    torch.testing.assert_close(found.log_normalizer, total.log(), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(found.mean, centre.mT, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(found.covariance.movedim(-1, -3), covariance, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("with_blocks", [False, True])
def test_curvature_is_the_hessian_and_zero_in_latents_a_datum_does_not_depend_on(with_blocks):
    likelihoods, families, y = members(), FAMILIES, TARGETS
    if with_blocks:
        likelihoods = [*likelihoods, CASES["family_beta"].make()]
        families, y = torch.cat([families, torch.tensor([4])]), torch.cat([y, torch.tensor([0.3], dtype=F64)])
    likelihood = MixedLikelihood(likelihoods, families)
    f = torch.randn(2, len(y), dtype=F64, generator=torch.Generator().manual_seed(2))
    found = likelihood.curvature(y, f)
    assert isinstance(found, BlockCurvature if with_blocks else Curvature)
    step = 1e-4
    for d in range(2):
        moved = torch.zeros(2, 1, dtype=F64)
        moved[d] = step
        up, down = likelihood.log_prob(y, f + moved), likelihood.log_prob(y, f - moved)
        torch.testing.assert_close(found.gradient[d], (up - down) / (2 * step), rtol=1e-6, atol=1e-6)
        slopes = likelihood.curvature(y, f + moved).gradient - likelihood.curvature(y, f - moved).gradient
        torch.testing.assert_close(found.blocks[d], -slopes / (2 * step), rtol=1e-6, atol=1e-6)
    one_latent = (families != 2) & (families != 4)
    assert bool((found.gradient[1, one_latent] == 0).all())
    assert bool((found.blocks[1, :, one_latent] == 0).all() and (found.blocks[:, 1, one_latent] == 0).all())
    assert bool((found.expected_blocks[:, 1, one_latent] == 0).all())


def test_expectations_do_not_depend_on_the_other_latents():
    likelihood = MixedLikelihood(members(), FAMILIES)
    m = torch.zeros(2, 8, dtype=F64, requires_grad=True)
    v = torch.ones(2, 8, dtype=F64, requires_grad=True)
    slopes = torch.autograd.grad(likelihood.expected_log_density(TARGETS, m, v).sum(), (m, v))
    one_latent = FAMILIES != 2
    for slope in slopes:
        assert bool((slope[1, one_latent] == 0).all() and (slope[0] != 0).all())
    generator = torch.Generator().manual_seed(4)
    V, mean = blocks(8, 2, generator), torch.randn(2, 8, dtype=F64, generator=generator)
    for function in ("joint_log_density", "joint_expected_log_density"):
        found = getattr(likelihood, function)(TARGETS, mean, V)
        for k, member in enumerate(members()):
            rows = k == FAMILIES
            if k == 2:
                expected = getattr(member, function)(TARGETS[rows], mean[:, rows], V[..., rows])
            else:
                name = function.removeprefix("joint_")
                expected = getattr(member, name)(TARGETS[rows], mean[0, rows], V[0, 0, rows])
            torch.testing.assert_close(found[rows], expected, rtol=1e-12, atol=1e-12)


def test_sites_of_one_latent_data_leave_the_others_alone():
    prior = priors(8)
    likelihood = MixedLikelihood(members(), FAMILIES)
    one_latent = FAMILIES != 2
    laplace, kl, ep = (RULES[rule].infer(prior, likelihood, TARGETS) for rule in ("Laplace", "KL", "EP"))
    assert bool((kl.sites.precision[1, one_latent] == 0).all())
    assert bool((kl.sites.shift[1, one_latent] == 0).all())
    assert bool((laplace.sites.shift[1, one_latent] == 0).all())
    assert ep.sites.shift[1, one_latent].abs().max() < 1e-8


def test_take_pickle_deepcopy_state_and_float32():
    likelihood = MixedLikelihood(members(), FAMILIES)
    rows = torch.tensor([5, 1, 6])
    f = torch.randn(2, 8, dtype=F64, generator=torch.Generator().manual_seed(5))
    whole = likelihood.log_prob(TARGETS, f)
    torch.testing.assert_close(
        likelihood.log_prob(likelihood.take(TARGETS, rows), f[:, rows]), whole[rows], rtol=0, atol=1e-14
    )
    for copied in (copy.deepcopy(likelihood), pickle.loads(pickle.dumps(likelihood))):
        torch.testing.assert_close(copied.log_prob(TARGETS, f), whole, rtol=0, atol=0)
    with torch.no_grad():
        likelihood.likelihoods[3].noise = 0.05
    other = MixedLikelihood(members(), FAMILIES)
    other.load_state_dict(likelihood.state_dict())
    torch.testing.assert_close(other.log_prob(TARGETS, f), likelihood.log_prob(TARGETS, f), rtol=0, atol=0)
    for rule in RULES.values():
        double = rule.infer(priors(8), likelihood, TARGETS).log_evidence
        prior = priors(8)
        single = MultivariateNormal(prior.mean.float(), to_linear_operator(prior.covariance_matrix.float()))
        found = rule.infer(single, copy.deepcopy(likelihood).float(), TARGETS.float()).log_evidence
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), double, rtol=1e-3, atol=1e-3)


def test_batches_of_targets():
    likelihood = MixedLikelihood(members(), FAMILIES)
    y = torch.stack([TARGETS, TARGETS.flip(0)[FAMILIES.flip(0).argsort()][FAMILIES.argsort().argsort()]])
    for rule in ("Laplace", "KL", "EP"):
        batch = RULES[rule].infer(priors(8), likelihood, y).log_evidence
        alone = [RULES[rule].infer(priors(8), likelihood, each).log_evidence for each in y]
        torch.testing.assert_close(batch, torch.stack(alone), rtol=1e-8, atol=1e-8)


def test_predictions_are_of_one_family():
    likelihood, prior = MixedLikelihood(members(), FAMILIES), priors(8)
    posterior = RULES["Laplace"].infer(prior, likelihood, TARGETS).posterior
    independent = MultivariateNormal(posterior.mean.mT, to_linear_operator(torch.diag_embed(posterior.variance.mT)))
    for dist in (posterior, independent):
        assert isinstance(dist, MultitaskMultivariateNormal) == (dist is posterior)
        first = dist[..., 0] if dist is posterior else MultivariateNormal(dist.mean[0], dist.lazy_covariance_matrix[0])
        count = likelihood(dist, family=0)
        torch.testing.assert_close(count.mean, members()[0](first).mean, rtol=1e-10, atol=1e-10)
        angle = likelihood(dist, family=2)
        torch.testing.assert_close(
            angle.log_prob(torch.zeros(8, dtype=F64)),
            members()[2].log_marginal(torch.zeros(8, dtype=F64), dist),
            rtol=1e-10,
            atol=1e-10,
        )
    three = MixedLikelihood([*members(), MultinomialLogitLikelihood(3)])
    wide = MultitaskMultivariateNormal.from_batch_mvn(priors(5, 3))
    pair = MultitaskMultivariateNormal.from_batch_mvn(priors(5, 3)[:2])
    torch.testing.assert_close(
        three(wide, family=2).log_prob(torch.ones(5, dtype=F64)),
        members()[2].log_marginal(torch.ones(5, dtype=F64), pair),
        rtol=1e-8,
        atol=1e-8,
    )
    with pytest.raises(NotImplementedError, match="name one"):
        likelihood(posterior)
    with pytest.raises(ValueError, match="from 0 to 3"):
        likelihood(posterior, family=4)


def test_what_does_not_fit_is_refused():
    with pytest.raises(TypeError, match="StickBreakingLikelihood"):
        MixedLikelihood([PoissonLikelihood(), StickBreakingLikelihood(3)])
    with pytest.raises(TypeError, match="family 1 is a"):
        MixedLikelihood([VonMisesLikelihood(), StickBreakingLikelihood(3)])
    likelihood = MixedLikelihood(members(), FAMILIES)
    with pytest.raises(TypeError, match=r"KL\(\)"):
        CAVI().infer(priors(8), likelihood, TARGETS)
    wrong = TARGETS.clone()
    wrong[4] = -1.0
    with pytest.raises(ValueError, match="row 4, of family 0"):
        KL().infer(priors(8), likelihood, wrong)
    wrong[4] = torch.nan
    with pytest.raises(ValueError, match="row 4"):
        KL().infer(priors(8), likelihood, wrong)
    with pytest.raises(ValueError, match=r"num_latents = 2.*batch_shape=torch.Size\(\[2\]\)"):
        KL().infer(priors(8)[0], likelihood, TARGETS)


def test_outliers_of_a_million_and_one_datum():
    prior = priors(8)
    y = TARGETS.clone()
    y[6] = 1e6
    for rule in ("KL", "EP", "Laplace"):
        found = RULES[rule].infer(prior, MixedLikelihood(members(), FAMILIES), y)
        assert bool(found.log_evidence.isfinite())
        mean, covariance = prior.mean[:, :1], prior.covariance_matrix[:, :1, :1]
        one = MultivariateNormal(mean, to_linear_operator(covariance))
        alone = RULES[rule].infer(one, MixedLikelihood(members(), FAMILIES[:1]), TARGETS[:1])
        expected = RULES[rule].infer(
            MultivariateNormal(mean[0], to_linear_operator(covariance[0])), PoissonLikelihood(), TARGETS[:1]
        )
        torch.testing.assert_close(alone.log_evidence, expected.log_evidence, rtol=1e-9, atol=1e-9)


class Kernels(gpytorch.Module):
    """Two latents, independent of one another: of each a kernel of x times one of tasks."""

    def __init__(self):
        super().__init__()
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=torch.Size([2]))
        self.of_x = gpytorch.kernels.RBFKernel(batch_shape=torch.Size([2]))
        self.of_task = gpytorch.kernels.IndexKernel(num_tasks=4, rank=1, batch_shape=torch.Size([2]))
        self.double()
        generator = torch.Generator().manual_seed(6)
        self.of_task.initialize(
            covar_factor=torch.randn(2, 4, 1, dtype=F64, generator=generator), var=torch.full((2, 4), 0.5, dtype=F64)
        )

    def forward(self, x):
        covariance = self.of_x(x[..., :1]).mul(self.of_task(x[..., 1:].long()))
        return MultivariateNormal(self.mean_module(x), covariance)


X = torch.stack([torch.linspace(0, 2, 8, dtype=F64), FAMILIES.double()], -1)


class Joint(LatentGP):
    def __init__(self, likelihood, rule):
        super().__init__(X, TARGETS, likelihood, rule)
        self.kernels = Kernels()

    def forward(self, x):
        return self.kernels(x)


class Sparse(gpytorch.models.ApproximateGP):
    def __init__(self, kernels):
        z = X.expand(2, *X.shape).clone()
        super().__init__(SiteVariationalStrategy(self, z, learn_inducing_locations=False, jitter_val=1e-9))
        self.kernels = kernels

    def forward(self, x):
        return self.kernels(x)


hadamard = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


@hadamard
def test_a_hadamard_model_is_the_dense_problem_of_the_same_prior():
    likelihood = MixedLikelihood(members(), FAMILIES)
    for rule in ("Laplace", "KL", "EP"):
        model = Joint(likelihood, RULES[rule]).eval()
        with torch.no_grad():
            prior = model.kernels(X)
            dense = MultivariateNormal(prior.mean, to_linear_operator(prior.covariance_matrix))
            found = RULES[rule].infer(dense, likelihood, TARGETS)
            torch.testing.assert_close(model.result.log_evidence, found.log_evidence, rtol=1e-9, atol=1e-9)
            at_angle = torch.tensor([[0.3, 2.0], [1.7, 2.0]], dtype=F64)
            assert bool(likelihood(model(at_angle), family=2).concentration.isfinite().all())
            assert bool((likelihood(model(at_angle), family=1).probs > 0).all())


@hadamard
def test_natural_gradients_end_at_the_optimum_of_kl():
    likelihood = MixedLikelihood(members(), FAMILIES)
    exact = Joint(likelihood, RULES["KL"]).eval()
    sparse = Sparse(exact.kernels)
    with torch.no_grad():
        bound = CollapsedBound(sparse.variational_strategy, likelihood, X, TARGETS, bound="exact")
        torch.testing.assert_close(bound.settle(tolerance=1e-12), exact.result.log_evidence, rtol=1e-6, atol=1e-6)
        for _ in range(60):  # by minibatches' own door, on all data
            sparse.variational_strategy.update(X, TARGETS, likelihood, 0.7)
        there = exact.result.conditioned
        q = sparse.eval()(X)
        torch.testing.assert_close(q.mean, there.mean, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(q.variance, there.variance, rtol=1e-4, atol=1e-4)


def test_heteroscedastic_measurements_beside_counts():
    """Noise of its own latent: the second latent is the log scale, of which a count says nothing."""
    prior = priors(5)
    y, families = torch.tensor([0.4, 3.0, -0.2, 0.0, 1.3], dtype=F64), torch.tensor([0, 1, 0, 1, 0])
    likelihood = MixedLikelihood([HeteroscedasticGaussianLikelihood(), PoissonLikelihood()], families)
    kl = RULES["KL"].infer(prior, likelihood, y)
    ep = RULES["EP"].infer(prior, likelihood, y)
    assert kl.log_evidence.item() <= ep.log_evidence.item() + 1e-3
    assert ep.status.name == kl.status.name == "CONVERGED"
    assert bool((kl.sites.precision[1, families == 1] == 0).all())
