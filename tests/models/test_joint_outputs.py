"""Joint models of outputs of several kinds: a Hadamard multitask kernel under a MixedLikelihood."""

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal

import gpext
from gpext.inference import EP, KL, Laplace
from gpext.likelihoods import BernoulliLogitLikelihood, MixedLikelihood, PoissonLikelihood, StudentTLikelihood
from gpext.models import LatentGP
from gpext.variational import CollapsedBound, SiteVariationalStrategy
from tests.members import F64

# linear_operator builds sparse matrices for the IndexKernel, of which torch warns once.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

GENERATOR = torch.Generator().manual_seed(0)
RULES = {"EP": EP(tolerance=1e-10), "KL": KL(tolerance=1e-10), "Laplace": Laplace(tolerance=1e-10)}
PLACES = torch.linspace(0, 2, 9, dtype=F64)
# (x, task); some outputs of some places are missing
X = torch.cartesian_prod(PLACES, torch.arange(3, dtype=F64))[torch.rand(27, generator=GENERATOR) < 0.7]
TASK = X[:, 1].long()
NEW = torch.tensor([0.35, 1.6], dtype=F64)


def families():
    return [PoissonLikelihood(), BernoulliLogitLikelihood(), StudentTLikelihood().double()]


def targets():
    count = torch.poisson(torch.ones(len(X), dtype=F64), generator=GENERATOR)
    label = (torch.rand(len(X), generator=GENERATOR) < 0.5).double()
    real = torch.randn(len(X), dtype=F64, generator=GENERATOR)
    return torch.stack([count, label, real], -1).gather(-1, TASK[:, None]).squeeze(-1)


Y = targets()


class Kernels(gpytorch.Module):
    """The prior over (x, task): a kernel of x times one of tasks, of covariance B."""

    def __init__(self, covar_factor, var):
        super().__init__()
        self.mean_module = gpytorch.means.ConstantMean()
        self.of_x = gpytorch.kernels.RBFKernel()
        self.of_task = gpytorch.kernels.IndexKernel(num_tasks=3, rank=1)
        self.double()
        self.of_task.initialize(covar_factor=covar_factor.unsqueeze(-1).double(), var=var.double())

    def forward(self, x):
        covariance = self.of_x(x[..., :1]).mul(self.of_task(x[..., 1:].long()))
        return MultivariateNormal(self.mean_module(x), covariance)


class Joint(LatentGP):
    def __init__(self, likelihood, kernels, rule=None, *, x=X, y=Y):
        super().__init__(x, y, likelihood, rule)
        self.kernels = kernels

    def forward(self, x):
        return self.kernels(x)


VAR, FACTOR = torch.tensor([0.8, 1.5, 0.6]), torch.tensor([0.9, -0.7, 1.1])


def at(task):
    return torch.stack([NEW, torch.full_like(NEW, task)], -1)


@pytest.mark.parametrize("rule", RULES)
def test_uncorrelated_tasks_are_separate_models(rule):
    kernels = Kernels(torch.zeros(3), VAR)
    joint = Joint(MixedLikelihood(families(), TASK), kernels, RULES[rule]).eval()
    total = torch.zeros((), dtype=F64)
    for task, likelihood in enumerate(families()):
        own = task == TASK
        alone = Joint(likelihood, kernels, RULES[rule], x=X[own], y=Y[own]).eval()
        with torch.no_grad():
            total = total + alone.result.log_evidence
            one, other = joint(at(task)), alone(at(task))
            torch.testing.assert_close(one.mean, other.mean, rtol=1e-6, atol=1e-8)
            torch.testing.assert_close(one.covariance_matrix, other.covariance_matrix, rtol=1e-6, atol=1e-8)
            mine, theirs = joint.likelihood(one, family=task), likelihood(other)
            torch.testing.assert_close(mine.mean, theirs.mean, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(joint.result.log_evidence, total, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("rule", RULES)
def test_gaussian_outputs_of_different_noise_are_conjugate(rule):
    noises = torch.tensor([0.2, 0.5, 0.05], dtype=F64)
    members = [gpytorch.likelihoods.GaussianLikelihood().double() for _ in noises]
    for member, noise in zip(members, noises, strict=True):
        member.noise = noise
    kernels = Kernels(FACTOR, VAR)
    model = Joint(MixedLikelihood(members, TASK), kernels, RULES[rule]).eval()
    with torch.no_grad():
        joint = kernels(torch.cat([X, at(1)]))
        n, mu, K = len(X), joint.mean, joint.covariance_matrix
        S = K[:n, :n] + noises[TASK].diag()
        evidence = torch.distributions.MultivariateNormal(mu[:n], S).log_prob(Y)
        torch.testing.assert_close(model.result.log_evidence, evidence, rtol=1e-7, atol=1e-7)
        gain = torch.linalg.solve(S, K[:n, n:]).mT
        torch.testing.assert_close(model(at(1)).mean, mu[n:] + gain @ (Y - mu[:n]), rtol=1e-6, atol=1e-7)


def test_a_missing_output_is_known_by_the_others():
    """Counts inform the label of a place where no label was seen, as far as the tasks are correlated."""
    kernels = Kernels(torch.tensor([1.5, 1.5, 0.0]), torch.full((3,), 0.01))
    x = torch.cat([torch.stack([PLACES, torch.zeros_like(PLACES)], -1), torch.tensor([[0.0, 1.0]], dtype=F64)])
    counts = torch.cat([torch.arange(9.0, dtype=F64), torch.zeros(1, dtype=F64)])
    families_of = MixedLikelihood(families(), x[:, 1].long())
    both = Joint(families_of, kernels, x=x, y=counts).eval()
    labels = Joint(BernoulliLogitLikelihood(), kernels, x=x[9:], y=counts[9:]).eval()
    with torch.no_grad():
        variances = [model(at(1)).variance for model in (both, labels)]
        assert bool((variances[0] < 0.5 * variances[1]).all())
        rising = both.likelihood(both(at(1)), family=1).probs
        assert rising[1] > rising[0] + 0.1


def test_all_parameters_are_trained_and_gradients_agree_with_finite_differences():
    model = Joint(MixedLikelihood(families(), TASK), Kernels(FACTOR, VAR), Laplace(tolerance=1e-10))
    mll = gpext.mlls.LatentMarginalLogLikelihood(model.likelihood, model)

    def value():
        return mll(model(X), Y)

    value().backward()
    for name, parameter in model.named_parameters():
        if "index" in name:
            continue
        entry, slopes = parameter.data.flatten()[0].item(), []
        for step in (1e-5, -1e-5):
            parameter.data.view(-1)[0] = entry + step
            slopes.append(value().item() / 2e-5)
        parameter.data.view(-1)[0] = entry
        assert parameter.grad.flatten()[0].item() == pytest.approx(slopes[0] - slopes[1], rel=1e-4, abs=1e-7), name
    before = value().item()
    assert gpext.fit(mll, X, Y, max_steps=5, progress=False).objective > before


class Sparse(gpytorch.models.ApproximateGP):
    def __init__(self, kernels):
        super().__init__(SiteVariationalStrategy(self, X.clone(), learn_inducing_locations=False, jitter_val=1e-9))
        self.kernels = kernels

    def forward(self, x):
        return self.kernels(x)


def test_a_sparse_model_with_all_inputs_is_the_joint_model():
    kernels, likelihood = Kernels(FACTOR, VAR), MixedLikelihood(families(), TASK)
    exact, sparse = Joint(likelihood, kernels, RULES["KL"]).eval(), Sparse(kernels)
    with torch.no_grad():
        bound = CollapsedBound(sparse.variational_strategy, likelihood, X, Y, bound="exact")
        torch.testing.assert_close(bound.settle(tolerance=1e-12), exact.result.log_evidence, rtol=1e-6, atol=1e-6)
        bound.commit()
        torch.testing.assert_close(sparse.eval()(at(2)).mean, exact(at(2)).mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_float32(rule):
    kernels = Kernels(FACTOR, VAR)
    double = Joint(MixedLikelihood(families(), TASK), kernels, RULES[rule]).result.log_evidence
    likelihood = MixedLikelihood(families(), TASK).float()
    single = Joint(likelihood, kernels.float(), RULES[rule], x=X.float(), y=Y.float()).result.log_evidence
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), double, rtol=1e-3, atol=1e-3)
