"""Chains spread over ranks have the draws of one process, bit for bit."""

import gpytorch
import pytest
import torch
from gpytorch.mlls import ExactMarginalLogLikelihood

from gpext.mlls import UnbiasedMarginalLogLikelihood
from gpext.parallel import Ranks
from gpext.samplers import MetropolisHastings, SGLDSampler
from tests.members import F64
from tests.parallel.processes import run

pytestmark = pytest.mark.slow

X = torch.linspace(0, 3, 30, dtype=F64).unsqueeze(-1)


class Model(gpytorch.models.ExactGP):
    def __init__(self):
        super().__init__(X, torch.sin(3 * X[:, 0]), gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), gpytorch.kernels.RBFKernel()
        self.to(F64)

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def sampler(kind, diverges=False):
    model = Model()
    if kind == "walk":
        return MetropolisHastings(ExactMarginalLogLikelihood(model.likelihood, model))
    made = SGLDSampler(UnbiasedMarginalLogLikelihood(model.likelihood, model))
    if diverges:
        gradient, taken = made.target.gradient, []

        def failing(*args, **kwargs):
            taken.append(1)
            if len(taken) > 3:
                raise FloatingPointError("there is no such model")
            return gradient(*args, **kwargs)

        made.target.gradient = failing
    return made


def drawn(kind, ranks=None, folder=None, diverges=False):
    """Draws in two parts, the second resumed from the first."""
    made = sampler(kind, diverges)
    options = {"progress": False, "ranks": ranks, "checkpoint": folder}
    warmup = {"step_size": 0.1} if kind == "sgld" else {}
    warmup["generator"] = torch.Generator().manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)
        first = made.run(3, 3, 2, **warmup, **options)
        if first.status.name == "DIVERGED":
            return first.raw, first.status.name
        return made.run(2, resume=first, **options).raw, first.status.name


def _of_rank(rank, *arguments):
    kind, folder, diverges = arguments
    return drawn(kind, Ranks(), folder, diverges and rank == 1)


@pytest.mark.parametrize("kind", ["walk", "sgld"])
def test_draws_are_those_of_one_process(kind, tmp_path):
    expected, _ = drawn(kind)
    for (found, _), error in run(_of_rank, 2, kind, str(tmp_path), False):
        assert error is None
        assert torch.equal(found, expected)
    assert torch.equal(sampler(kind).load(tmp_path).raw, expected)


def test_where_one_diverges_all_keep_the_same_draws(tmp_path):
    outcomes = [value for value, _ in run(_of_rank, 2, "sgld", str(tmp_path), True)]
    (first, status), (second, same) = outcomes
    assert status == same == "DIVERGED"
    assert torch.equal(first, second)
    assert torch.equal(first, drawn("sgld")[0][:, : first.size(1)])


def _too_many(rank):
    sampler("walk").run(3, 1, 0, ranks=Ranks(), progress=False)


def test_more_ranks_than_chains_are_refused():
    for _, error in run(_too_many, 2):
        assert error.startswith("ValueError: expected a chain for each of 2 ranks")


def _of_other(rank, fault):
    made, options = MetropolisHastings(sampler("walk").target.mll, ["covar_module.lengthscale"]), {}
    if rank == 1 and fault == "kernel":
        made.target.model.covar_module.eps = 1.0
    if rank == 1 and fault == "value":
        made.target.model.likelihood.noise = 2.0
    if rank == 1 and fault == "options":
        options = {"thinning": 2}
    made.run(3, 2, 0, ranks=Ranks(), progress=False, **options)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("kernel", "expected the same model on every rank; rank 0 has less, rank 1 covar_module.eps = 1.0"),
        ("value", "expected the same inputs"),
        ("options", "expected the same options on every rank; rank 0 has thinning=1, rank 1 thinning=2"),
    ],
)
def test_chains_of_other_models_are_not_mixed(fault, message):
    for _, error in run(_of_other, 2, fault):
        assert error.startswith(f"ValueError: {message}")
