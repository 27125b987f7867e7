"""LMC models under natural gradients: steps and gradients are gpytorch's, and no step lowers the bound."""

import itertools

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import VariationalELBO
from gpytorch.variational import LMCVariationalStrategy, NaturalVariationalDistribution, VariationalStrategy

import gpext
from gpext import designs
from gpext.likelihoods import (
    BernoulliLogitLikelihood,
    LinearMixing,
    MixedLikelihood,
    MultinomialLogitLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
    Weighted,
)
from gpext.variational import SiteVariationalStrategy
from tests.members import F64
from tests.sparse_models import inputs, randomise

Q, T = 2, 3
X = inputs(20, 2)
TASKS = torch.arange(20) % T
ALL = (torch.arange(20)[:, None] + torch.arange(T)) % 4
ONE = torch.arange(20) % 5


class LMC(gpytorch.models.ApproximateGP):
    def __init__(self, *, strategy=SiteVariationalStrategy, jitter_val=None, coefficients=None):
        Z = inputs(6, 2, seed=1).repeat(Q, 1, 1)
        q = NaturalVariationalDistribution(6, batch_shape=torch.Size([Q]), mean_init_std=0.0).double()
        base = strategy(self, Z, q, learn_inducing_locations=True)
        super().__init__(LMCVariationalStrategy(base, num_tasks=T, num_latents=Q, jitter_val=jitter_val))
        self.base = base
        batch = torch.Size([Q])
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
        self.covar_module = gpytorch.kernels.ScaleKernel(
            gpytorch.kernels.RBFKernel(batch_shape=batch), batch_shape=batch
        )
        self.double()
        self.mean_module.initialize(constant=torch.tensor([0.1, -0.2]))
        if coefficients is None:
            coefficients = torch.tensor([[1.0, 0.5, -0.7], [0.2, -0.9, 0.4]])
        self.variational_strategy.initialize(lmc_coefficients=coefficients.double())

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))

    @property
    def natural(self):
        q = self.base._variational_distribution
        return q.natural_vec, q.natural_mat


CASES = {
    "all": (PoissonLikelihood, ALL.double(), None),
    "one": (PoissonLikelihood, ONE.double(), TASKS),
    "families": (
        lambda: MixedLikelihood([PoissonLikelihood(), BernoulliLogitLikelihood(), StudentTLikelihood()], TASKS),
        torch.where(TASKS == 1, (ONE > 2).long(), ONE).double(),
        TASKS,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_and_its_gradients_are_those_of_gpytorch(case):
    make, y, tasks = CASES[case]
    mine, theirs = randomise(LMC()), randomise(LMC(strategy=VariationalStrategy))
    likelihoods = [make().double() for _ in range(2)]
    mixing = LinearMixing(
        likelihoods[0],
        mine.variational_strategy.lmc_coefficients,
        tasks,
        jitter=mine.variational_strategy.jitter_val,
    )
    value = mine.base.update(X, y, mixing, rate=0.1, gradient="exact")
    options = {} if tasks is None else {"task_indices": tasks}
    loss = -VariationalELBO(likelihoods[1], theirs, len(X))(theirs(X, **options), y)
    torch.testing.assert_close(-value, loss.detach(), rtol=1e-9, atol=1e-9)
    loss.backward()
    for (name, a), b in zip(mine.named_hyperparameters(), theirs.hyperparameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-8, msg=name)
    for a, b in zip(likelihoods[0].parameters(), likelihoods[1].parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-8)
    gpytorch.optim.NGD([*theirs.natural], num_data=len(X), lr=0.1).step()
    torch.testing.assert_close(mine.natural, theirs.natural, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("case", CASES)
def test_full_steps_never_lower_the_bound(case):
    """Latents that all explain the same data overshoot together at rate 1, where steps are shortened."""
    make, y, tasks = CASES[case]
    same = torch.tensor([[1.5, 1.0, 1.0], [1.5, 1.0, 1.0]])
    model, likelihood = LMC(coefficients=same), make().double()
    mixing = LinearMixing(likelihood, model.variational_strategy.lmc_coefficients, tasks)
    values = [model.base.update(X, y, mixing, rate=1.0, gradient="exact").item() for _ in range(12)]
    assert all(after >= before - 1e-9 for before, after in itertools.pairwise(values))
    assert values[-1] > values[0]


def test_unsafeguarded_steps_would_overshoot():
    """The law above is not empty: the plain step of length one from the prior lowers the bound."""
    same = torch.full((Q, T), 1.5)
    model, likelihood = LMC(coefficients=same, strategy=VariationalStrategy), StudentTLikelihood().double()
    likelihood.noise = 0.01
    mll = VariationalELBO(likelihood, model, len(X))
    ngd = gpytorch.optim.NGD([*model.natural], num_data=len(X), lr=1.0)
    losses = []
    for _ in range(2):
        ngd.zero_grad()
        try:
            loss = -mll(model(X), ALL.double())
        except gpytorch.utils.errors.NotPSDError:
            losses.append(float("inf"))
            break
        losses.append(loss.item())
        loss.backward()
        ngd.step()
    assert losses[1] > losses[0]


@pytest.mark.parametrize("batch_size", [None, 10])
@pytest.mark.parametrize("case", CASES)
def test_fit_trains_the_mixing_with_the_rest(case, batch_size):
    make, y, tasks = CASES[case]
    model, likelihood = LMC(), make().double()
    mll = VariationalELBO(likelihood, model, len(X))
    options = {} if tasks is None else {"task_indices": tasks}
    before = mll(model(X, **options), y).item()
    start = model.variational_strategy.lmc_coefficients.detach().clone()
    result = gpext.fit(mll, X, y, batch_size=batch_size, max_steps=20, progress=False, **options)
    after = mll(model.train()(X, **options), y).item()
    assert after > before + 0.1
    if batch_size is None:
        assert result.objective == pytest.approx(after, abs=1e-6)
    assert not torch.equal(model.variational_strategy.lmc_coefficients, start)


def test_one_latent_for_each_task_is_the_independent_model():
    """With the identity for coefficients the bound is the sum of those of separate models."""
    eye = LinearMixing(PoissonLikelihood(), torch.eye(2, dtype=F64))
    y, mean, variance = ALL[:, :2], torch.randn(2, 20, dtype=F64), torch.rand(2, 20, dtype=F64)
    separate = PoissonLikelihood().expected_log_density(y.mT, mean, variance).sum(0)
    torch.testing.assert_close(eye.expected_log_density(y, mean, variance), separate)
    torch.testing.assert_close(eye.log_prob(y, mean), PoissonLikelihood().log_prob(y.mT, mean).sum(0))
    single = LinearMixing(PoissonLikelihood(), torch.eye(2, dtype=F64), TASKS % 2)
    chosen = mean.gather(0, (TASKS % 2)[None])[0], variance.gather(0, (TASKS % 2)[None])[0]
    torch.testing.assert_close(single.log_density(ONE, mean, variance), PoissonLikelihood().log_density(ONE, *chosen))


def test_a_design_of_mixed_latents():
    """Comparisons within a task: the design acts on every latent, and the bound rises."""
    index = torch.tensor([[0, 3], [4, 7], [8, 2], [5, 11]])
    tasks = torch.tensor([0, 1, 2, 2])
    model = LMC()
    mixing = LinearMixing(BernoulliLogitLikelihood(), model.variational_strategy.lmc_coefficients, tasks)
    y, design = torch.tensor([1.0, 0.0, 1.0, 1.0]), designs.pairs(index, len(X))
    values = [model.base.update(X, y, mixing, design=design, gradient="exact").item() for _ in range(4)]
    assert values == sorted(values)
    assert values[-1] > values[0]


def test_targets_are_taken_with_their_tasks():
    likelihood = LinearMixing(Weighted(PoissonLikelihood(), torch.rand(20) + 1), torch.ones(Q, T), TASKS)
    joined = likelihood.take(ONE, torch.tensor([3, 7]))
    assert joined.shape == (2, 3)
    assert joined[:, 2].tolist() == [0, 1]
    f = torch.randn(Q, 20)
    torch.testing.assert_close(likelihood.log_prob(joined, f[:, [3, 7]]), likelihood.log_prob(ONE, f)[[3, 7]])
    assert LinearMixing(PoissonLikelihood(), torch.ones(Q, T))(f).rate.shape == (20, T)


def test_bad_input_is_refused():
    ones = torch.ones(Q, T)
    with pytest.raises(ValueError, match=r"a matrix; got shape \(2,\)"):
        LinearMixing(PoissonLikelihood(), torch.ones(2))
    with pytest.raises(ValueError, match="tasks must be from 0 to 2; got 3 at index 1"):
        LinearMixing(PoissonLikelihood(), ones, torch.tensor([0, 3]))
    with pytest.raises(TypeError, match="task_indices must be whole numbers"):
        LinearMixing(PoissonLikelihood(), ones, torch.tensor([0.0]))
    with pytest.raises(TypeError, match="are 2 numbers: with them give task_indices"):
        LinearMixing(Weighted(PoissonLikelihood()), ones)
    with pytest.raises(TypeError, match="one latent function"):
        LinearMixing(MultinomialLogitLikelihood(3), ones)
    with pytest.raises(ValueError, match=r"expected targets \(..., N, 3\), one for each task; got shape \(20,\)"):
        LinearMixing(PoissonLikelihood(), ones).check(ONE)
    with pytest.raises(ValueError, match="holds the tasks of 20 data"):
        LinearMixing(PoissonLikelihood(), ones, TASKS).check(ONE[:5])
    with pytest.raises(ValueError, match="targets must be counts"):
        LinearMixing(PoissonLikelihood(), ones, TASKS).check(-1.0 * ONE)
    with pytest.raises(NotImplementedError, match="integral over Q latents"):
        LinearMixing(PoissonLikelihood(), ones).log_density(ALL, torch.zeros(Q, 20), torch.ones(Q, 20))
    with pytest.raises(ValueError, match="expected a q\\(u\\) for each"):
        LMC().base.update(X, ALL.double(), LinearMixing(PoissonLikelihood(), torch.ones(3, T)))
    plain = VariationalELBO(BernoulliLogitLikelihood(), gpytorch.models.ApproximateGP(LMC().base), 20)
    with pytest.raises(ValueError, match="this one has none"):
        gpext.fit(plain, X, (ONE > 2).double(), task_indices=TASKS, progress=False)
