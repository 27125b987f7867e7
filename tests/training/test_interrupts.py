"""Ctrl-C anywhere in training ends it with status INTERRUPTED and leaves the best parameters so far."""

import copy

import gpytorch
import pytest
import torch
from gpytorch.mlls import ExactMarginalLogLikelihood, VariationalELBO

import gpext
from gpext import FitStatus
from gpext.inference import CAVI, EP, KL, Laplace
from gpext.likelihoods import StudentTLikelihood
from gpext.mlls import AugmentedELBO, LatentMarginalLogLikelihood
from tests.members import F64
from tests.sparse_models import SparseGP

X = torch.linspace(0, 4, 40, dtype=F64).unsqueeze(-1)
Y = torch.sin(2 * X[:, 0]) + 0.2 * torch.cos(37 * X[:, 0])


class Exact(gpytorch.models.ExactGP):
    def __init__(self):
        super().__init__(X, Y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        self.to(X)

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Latent(gpext.models.LatentGP):
    def __init__(self, rule):
        super().__init__(X, Y, StudentTLikelihood().to(F64), rule)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        self.to(X)

    forward = Exact.forward


def exact():
    model = Exact()
    return ExactMarginalLogLikelihood(model.likelihood, model)


def latent(rule):
    model = Latent(rule)
    return LatentMarginalLogLikelihood(model.likelihood, model)


def sparse(objective):
    return objective(StudentTLikelihood().to(F64), SparseGP(X[::4].clone()), len(Y))


FULL = {
    "exact": exact,
    **{type(rule).__name__: lambda rule=rule: latent(rule) for rule in (KL(), EP(), Laplace(), CAVI())},
    "collapsed": lambda: sparse(VariationalELBO),
    "augmented": lambda: sparse(AugmentedELBO),
}


def value(mll):
    """The objective per datum at the parameters as they are."""
    mll.train()
    with torch.no_grad():
        found = mll(mll.model(X), Y).item()
    mll.eval()
    return found


def train(name, mll, **options):
    bound = "augmented" if name == "augmented" else "exact"
    return gpext.fit(mll, X, Y, hyperparameters=bound, progress=False, **options)


class Interrupted:
    """Raises KeyboardInterrupt in the n-th call of a function, and counts."""

    def __init__(self, function, number):
        self.function, self.number, self.calls = function, number, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls == self.number:
            raise KeyboardInterrupt
        return self.function(*args, **kwargs)


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("step", [1, 4])
def test_a_full_batch_interrupted_in_its_callback_keeps_the_best_step(name, step):
    mll, seen = FULL[name](), []

    def callback(number, objective):
        seen.append(objective)
        if number == step:
            raise KeyboardInterrupt

    result = train(name, mll, callback=callback)
    assert result.status is FitStatus.INTERRUPTED
    assert not mll.training
    assert value(mll) >= max(seen) - 1e-6
    assert result.objective == pytest.approx(value(mll), abs=1e-6)
    assert mll.model(X[:3]).mean.isfinite().all()


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("call", [8, 13, 14, 15])  # after the checks of `fit`
def test_a_full_batch_interrupted_inside_the_model_keeps_the_best_step(name, call):
    """Wherever the interrupt comes, parameters and q belong together and are no worse than any step reported."""
    mll, seen = FULL[name](), []
    start = value(copy.deepcopy(mll))
    mll.model.forward = Interrupted(mll.model.forward, call)
    result = train(name, mll, callback=lambda _, objective: seen.append(objective))
    del mll.model.forward
    assert result.status is FitStatus.INTERRUPTED
    assert value(mll) >= max([start, *seen]) - 1e-6
    if seen:
        assert result.objective == pytest.approx(value(mll), abs=1e-6)


@pytest.mark.parametrize("objective", [VariationalELBO, AugmentedELBO])
@pytest.mark.parametrize("where", ["callback", "model", "likelihood"])
def test_minibatches_keep_the_last_step(objective, where):
    """The parameters after an interrupt inside step 8 are those of a run of seven steps."""
    mll, seen = sparse(objective), []
    expected = copy.deepcopy(mll)
    gpext.fit(expected, X, Y, batch_size=10, max_steps=7, progress=False)

    def callback(number, value):
        seen.append(value)
        if where == "callback" and number == 7:
            raise KeyboardInterrupt
        if where == "model" and number == 7:
            mll.model.forward = Interrupted(mll.model.forward, 1)
        if where == "likelihood" and number == 7:
            name = "expected_log_density" if objective is VariationalELBO else "unchecked_augmentation"
            setattr(mll.likelihood, name, Interrupted(getattr(mll.likelihood, name), 1))

    result = gpext.fit(mll, X, Y, batch_size=10, callback=callback, max_steps=30, progress=False)
    assert result.status is FitStatus.INTERRUPTED
    assert result.num_steps == 7
    for name, found in expected.state_dict().items():
        assert torch.equal(mll.state_dict()[name], found), name
