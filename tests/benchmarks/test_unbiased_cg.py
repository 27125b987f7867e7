"""The smallest benchmark of solves with a random end: it runs once, and its predictions agree with draws."""

from collections import defaultdict
from types import SimpleNamespace

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal

from benchmarks import unbiased_cg, unbiased_cg_parts, unbiased_cg_problems
from gpext.mlls import UnbiasedMarginalLogLikelihood
from gpext.operators import UnbiasedSolver
from tests.statistics import misfit

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def data(monkeypatch):
    def load(name, *, max_train, test_fraction):
        x = torch.randn(max_train, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        return SimpleNamespace(train_x=x, train_y=(2 * x.sum(-1)).sin())

    for module in (unbiased_cg, unbiased_cg_problems):
        monkeypatch.setattr(module, "load", load)


def test_every_part_has_its_table_and_nothing_is_run_twice(tmp_path, capsys, monkeypatch):
    arguments = ["--quick", "--output", str(tmp_path / "rows.jsonl"), "--figures", str(tmp_path)]
    assert unbiased_cg.main(arguments) == 0
    printed = capsys.readouterr().out
    assert all(method in printed for method in (*unbiased_cg_parts.CG_METHODS, *unbiased_cg_parts.LAWS))
    assert all(method in printed for method in (*unbiased_cg_parts.GRADIENT_METHODS, "stock inv_quad", "kept"))
    assert (tmp_path / "unbiased_cg_conditioning.png").stat().st_size > 1000
    assert (tmp_path / "unbiased_cg_schedules.png").stat().st_size > 1000
    for name in ("cg", "estimator", "schedule", "solution_draws", "gradient_draws", "preconditioned", "keeping"):
        monkeypatch.setattr(unbiased_cg_parts, name, None)
    unbiased_cg.main(arguments)
    assert capsys.readouterr().out == printed


def test_the_error_that_is_predicted_is_that_of_gradients():
    """In a model whose raw parameters are logarithms."""
    problem = unbiased_cg_problems.Problem.concrete(40, 0.1)
    tapes = defaultdict(lambda: unbiased_cg_parts.Tape(problem.product))
    predicted = unbiased_cg_parts.schedule(problem, "default", 0.3, False, 25, tapes)

    class Model(gpytorch.models.ExactGP):
        def __init__(self):
            super().__init__(problem.x, problem.y, gpytorch.likelihoods.GaussianLikelihood().double())
            self.mean_module = gpytorch.means.ZeroMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()).double()

        def forward(self, x):
            return MultivariateNormal(self.mean_module(x), self.covar_module(x))

    model = Model().train()
    model.covar_module.outputscale, model.likelihood.noise = 1.0, 0.1
    model.covar_module.base_kernel.lengthscale = unbiased_cg_problems.LENGTHSCALE
    solver = UnbiasedSolver(rank=0, tolerance=0.3, generator=torch.Generator().manual_seed(0))
    mll = UnbiasedMarginalLogLikelihood(model.likelihood, model, solver=solver)
    raws = [
        (model.covar_module.raw_outputscale, model.covar_module.outputscale),
        (model.covar_module.base_kernel.raw_lengthscale, model.covar_module.base_kernel.lengthscale),
        (model.likelihood.noise_covar.raw_noise, model.likelihood.noise),
    ]
    by_log = []  # d log value / d raw
    for raw, value in raws:
        (slope,) = torch.autograd.grad(value.log().sum(), [raw])
        by_log.append(slope.flatten())
    found = []
    for _ in range(300):
        gradients = torch.autograd.grad(40 * mll(model(problem.x), problem.y), [raw for raw, _ in raws])
        found.append(torch.cat([g.flatten() / s for g, s in zip(gradients, by_log, strict=True)]))
    draws = torch.stack(found)
    squares = (draws - problem.gradient).square().sum(-1) / problem.gradient.square().sum() / 100
    assert misfit(squares.unsqueeze(-1), predicted["total"] ** 2) < 1
