"""Site strategies on data that depend on linear functions of f: steps and gradients are those of dense algebra."""

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import VariationalELBO

import gpext
from gpext import designs
from gpext.inference import KL
from gpext.likelihoods import BernoulliLogitLikelihood, MultinomialLogitLikelihood, PoissonLikelihood
from gpext.mlls import AugmentedELBO
from gpext.variational import CollapsedBound, DesignInputs
from tests.members import F64
from tests.sparse_models import SparseGP, inputs, pair, randomise

GENERATOR = torch.Generator().manual_seed(0)
X, Z = inputs(12, 2), inputs(5, 2, seed=1)
PAIRS = torch.randint(12, (30, 2), generator=GENERATOR)
PAIRS = PAIRS[PAIRS[:, 0] != PAIRS[:, 1]]
DESIGNS = {
    "pairs": designs.pairs(PAIRS, 12),
    "sums": designs.sums(torch.tensor([0, 0, 1, 2, 1, 2, 2, 3, 3, 3, 3, 0]), torch.rand(12, generator=GENERATOR)),
    "averages": designs.averages(torch.tensor([0, 1] * 6)),
}
CASES = {
    "logit": (BernoulliLogitLikelihood, lambda n: (torch.arange(n) % 2).double(), None),
    "poisson": (PoissonLikelihood, lambda n: (torch.arange(n) % 4).double(), None),
    "softmax": (lambda: MultinomialLogitLikelihood(3), lambda n: torch.arange(n) % 3, 3),
}


def exact_elbo(model, likelihood, design, y):
    """The ELBO of N data, from the dense covariance of q(f) at all inputs."""
    q = model.variational_strategy(X, diag=False)
    divergence = model.variational_strategy.kl_divergence()
    if isinstance(q, gpytorch.distributions.MultitaskMultivariateNormal):
        q, divergence = model.base(X, diag=False), divergence.sum()
    return likelihood.expected_log_prob(y, design(q)).sum() - divergence


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", DESIGNS)
def test_a_step_and_its_gradients_are_those_of_dense_algebra(case, name):
    """gpytorch's NGD on the ELBO of the dense h = A f moves q(u) to the same place, and autograd agrees."""
    (make, targets, tasks), design = CASES[case], DESIGNS[name]
    y, likelihood = targets(design.num_data), make().double()
    points = Z if tasks is None else Z.repeat(tasks, 1, 1)
    model, other = pair(points, num_tasks=tasks)
    model.base.update(X, y, likelihood, rate=0.1, design=design, bound="exact", gradient="exact")
    ngd = gpytorch.optim.NGD([*other.natural], num_data=design.num_data, lr=0.1)
    (-exact_elbo(other, likelihood, design, y) / design.num_data).backward()
    for (parameter, mine), theirs in zip(model.named_hyperparameters(), other.hyperparameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=1e-8, msg=parameter)
    ngd.step()
    torch.testing.assert_close(model.natural, other.natural, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("bound", ["augmented", "exact"])
def test_the_identity_changes_nothing(bound):
    y, likelihood = (torch.arange(12) % 2).double(), BernoulliLogitLikelihood()
    identity = designs.rows_of(torch.eye(12, dtype=F64))
    plain, designed = (randomise(SparseGP(Z)) for _ in range(2))
    values = [
        model.base.update(X, y, likelihood, 0.7, bound=bound, gradient=bound, **options)
        for model, options in ((plain, {}), (designed, {"design": identity}))
    ]
    torch.testing.assert_close(*values, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(designed.natural, plain.natural, rtol=1e-10, atol=1e-10)
    for mine, theirs in zip(designed.hyperparameters(), plain.hyperparameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-10)


def test_a_sum_over_minibatches_is_the_step_of_all_data():
    design, likelihood = DESIGNS["pairs"], BernoulliLogitLikelihood()
    n = design.num_data // 2 * 2
    design, y = design.take(slice(n)), (torch.arange(n) % 3 == 0).double()
    models = [randomise(SparseGP(Z)) for _ in range(3)]
    models[0].base.update(X, y, likelihood, 1.0, design=design)
    for model, part in zip(models[1:], torch.randperm(n, generator=GENERATOR).view(2, -1), strict=True):
        model.base.update(X, y[part], likelihood, 1.0, n, design=design.take(part))
    for all_data, one, two in zip(*(model.natural for model in models), strict=True):
        torch.testing.assert_close(0.5 * (one + two), all_data, rtol=1e-10, atol=1e-10)


class Full(gpext.models.LatentGP):
    def __init__(self, y, likelihood, design):
        super().__init__(X, y, likelihood, KL(tolerance=1e-10), design=design)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        self.double()

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


@pytest.mark.parametrize("case", ["logit", "poisson"])
@pytest.mark.parametrize("name", DESIGNS)
def test_inducing_points_at_all_inputs_give_full_inference(case, name):
    (make, targets, _), design = CASES[case], DESIGNS[name]
    y, likelihood = targets(design.num_data), make().double()
    full = Full(y, likelihood, design)
    model = SparseGP(X, jitter_val=1e-9)
    model.mean_module, model.covar_module = full.mean_module, full.covar_module
    with torch.no_grad():
        evidence = full.result.log_evidence
        bound = CollapsedBound(model.base, likelihood, DesignInputs(X, design), y, bound="exact")
        torch.testing.assert_close(bound.settle(tolerance=1e-12), evidence, rtol=1e-6, atol=1e-6)
        bound.commit()
        new = inputs(4, 2, seed=5)
        one, other = full.eval()(new), model.eval()(new)
        torch.testing.assert_close(other.mean, one.mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(other.covariance_matrix, one.covariance_matrix, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("bound", ["augmented", "exact"])
def test_gradients_of_the_collapsed_bound_agree_with_finite_differences(bound):
    design = DESIGNS["pairs"]
    y, likelihood = (torch.arange(design.num_data) % 2).double(), BernoulliLogitLikelihood()
    model = SparseGP(Z, learn=False)
    collapsed = CollapsedBound(model.base, likelihood, DesignInputs(X, design), y, bound=bound, block_size=7)
    collapsed.settle(tolerance=1e-3)
    collapsed.evaluate()
    for parameter in model.covar_module.parameters():
        entry = parameter.flatten()[0].item()
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                parameter.view(-1)[0] = entry + step
            values.append(collapsed.evaluate(gradient=False).item())
        with torch.no_grad():
            parameter.view(-1)[0] = entry
        slope = -(values[0] - values[1]) / 2e-5 / design.num_data
        assert parameter.grad.flatten()[0].item() == pytest.approx(slope, rel=1e-5, abs=1e-8)


def comparisons(num_items=40, number=600, dtype=F64):
    """Items on a line, a noisy preference for the middle, and its pairs."""
    x = torch.linspace(-1, 1, num_items, dtype=F64).unsqueeze(-1)
    index = torch.randint(num_items, (number, 2), generator=torch.Generator().manual_seed(3))
    index = index[index[:, 0] != index[:, 1]]
    h = -8 * (x[index[:, 0], 0] ** 2 - x[index[:, 1], 0] ** 2)
    y = torch.bernoulli(torch.sigmoid(h), generator=torch.Generator().manual_seed(4))
    return x.to(dtype), designs.pairs(index, num_items), y.to(dtype)


@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("batch_size", [None, 100])
@pytest.mark.parametrize("objective", [AugmentedELBO, VariationalELBO])
def test_fit_serves_a_design(objective, batch_size, dtype):
    x, design, y = comparisons(dtype=dtype)
    likelihood = BernoulliLogitLikelihood()
    model = SparseGP(torch.linspace(-1, 1, 9, dtype=dtype).unsqueeze(-1))
    mll = objective(likelihood, model, design.num_data)
    rounds = 8 if batch_size is None else 120
    result = gpext.fit(mll, x, y, design=design, batch_size=batch_size, max_steps=rounds, progress=False)
    assert result.status.name in ("MAX_STEPS", "CONVERGED")
    with torch.no_grad():
        q = model(x)
        loss = -VariationalELBO(likelihood, model, design.num_data)(design(q), y)
        if batch_size is None:
            assert result.objective == pytest.approx(-loss.item(), abs=1e-4)
        assert -loss.item() > -0.62  # from -0.69; the truth has -0.58
        assert abs(x[q.mean.argmax()].item()) < 0.4


def test_a_fit_with_a_design_resumes_from_a_checkpoint(tmp_path):
    x, design, y = comparisons()
    models = [SparseGP(torch.linspace(-1, 1, 9, dtype=F64).unsqueeze(-1)) for _ in range(2)]

    def train(model, steps, **options):
        mll = AugmentedELBO(BernoulliLogitLikelihood(), model, design.num_data)
        settings = {"batch_size": 100, "max_steps": steps, "tolerance": -1.0, "progress": False}
        return gpext.fit(mll, x, y, design=design, **settings, **options)

    train(models[0], 30)
    train(models[1], 10, checkpoint=tmp_path)
    train(models[1], 30, checkpoint=tmp_path)
    torch.testing.assert_close(models[1].natural, models[0].natural, rtol=0, atol=0)
    mll = AugmentedELBO(BernoulliLogitLikelihood(), models[1], design.num_data)
    other = design.take(torch.arange(design.num_data).flip(0))
    with pytest.raises(ValueError, match="data"):
        gpext.fit(mll, x, y, design=other, batch_size=100, progress=False, checkpoint=tmp_path)


def test_designs_that_cannot_be_served_are_refused():
    x, design, y = comparisons()
    model, likelihood = SparseGP(x[::5].clone()), BernoulliLogitLikelihood()
    before = [each.clone() for each in model.natural]
    with pytest.raises(ValueError, match=f"expected a target for each of the {design.num_data} rows"):
        model.base.update(x, y[:-1], likelihood, design=design)
    with pytest.raises(ValueError, match=r"a design of 40 columns, one for each; got \(39, 1\)"):
        model.base.update(x[:-1], y, likelihood, design=design)
    with pytest.raises(TypeError, match=r"expected a gpext\.designs\.Design; got Tensor"):
        model.base.update(x, y, likelihood, design=torch.eye(40))
    with pytest.raises(ValueError, match="inputs must be finite; got nan at index"):
        model.base.update(x.masked_fill(x == x[3], torch.nan), y, likelihood, design=design)
    torch.testing.assert_close(model.natural, tuple(before))
    mll = VariationalELBO(gpytorch.likelihoods.BernoulliLikelihood(), model, design.num_data)
    with pytest.raises(ValueError, match="a design is served with a gpext"):
        gpext.fit(mll, x, y, design=design, progress=False)
    with pytest.raises(ValueError, match="equally many"):
        gpext.fit(AugmentedELBO(likelihood, model, len(x)), x, y[:-1], design=design, progress=False)
    full = Full((torch.arange(2) % 2).double(), likelihood, designs.averages(torch.tensor([0, 1] * 6)))
    exact = gpext.mlls.LatentMarginalLogLikelihood(likelihood, full)
    with pytest.raises(ValueError, match="trained with the design that it was made with"):
        gpext.fit(exact, X, full.train_targets, design=DESIGNS["sums"], progress=False)
    assert gpext.fit(exact, X, full.train_targets, design=full.design, max_steps=2, progress=False).num_steps <= 2
