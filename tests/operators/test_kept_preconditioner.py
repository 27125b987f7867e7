"""A kept preconditioner: estimates remain unbiased, and it is recomputed when it is no longer good enough."""

import copy
import pickle

import gpytorch
import pytest
import torch

from gpext.mlls import UnbiasedMarginalLogLikelihood
from gpext.operators import KeptPreconditioner, UnbiasedSolver
from tests.operators.test_unbiased_solve import gradient, problem
from tests.statistics import misfit

F64 = torch.float64


def made(calls, size=30, rank=3):
    def make():
        calls.append(size)
        return torch.ones(size, rank, dtype=F64)

    return make


def test_is_made_once_until_steps_have_grown_or_the_matrix_is_another():
    keep, calls, noise = KeptPreconditioner(growth=2.0), [], torch.ones(30, dtype=F64)
    first = keep.root(noise, made(calls))
    keep.note(5)
    keep.note(10)
    assert keep.root(noise, made(calls)) is first
    keep.note(11)
    assert keep.root(noise, made(calls)) is not first
    assert len(calls) == 2
    keep.note(20)  # the number of steps when new
    keep.root(noise, made(calls))
    assert len(calls) == 2
    keep.root(torch.ones(20, dtype=F64), made(calls, 20))
    keep.root(torch.ones(20), made(calls, 20))
    assert calls[2:] == [20, 20]
    keep.reset()
    keep.root(torch.ones(20, dtype=F64), made(calls, 20))
    assert len(calls) == 5
    with pytest.raises(ValueError, match="growth must be more than 1"):
        KeptPreconditioner(growth=1.0)


def test_copies_are_apart():
    keep, calls, noise = KeptPreconditioner(), [], torch.ones(30, dtype=F64)
    keep.root(noise, made(calls))
    keep.note(4)
    for other in (copy.deepcopy(keep), pickle.loads(pickle.dumps(keep))):
        assert torch.equal(other.root(noise, made(calls)), keep.root(noise, made(calls)))
        other.note(100)
        other.root(noise, made(calls))
    assert len(calls) == 3  # the first, and one of each copy


def test_gradients_are_unbiased_with_a_preconditioner_of_other_parameters():
    model, likelihood, x, y = problem()
    keep = KeptPreconditioner(growth=100.0)
    solver = UnbiasedSolver(rank=8, keep=keep, tolerance=0.3, generator=torch.Generator().manual_seed(0))
    mll = UnbiasedMarginalLogLikelihood(likelihood, model, solver=solver)
    gradient(mll, model, x, y)
    root = keep.root(x[:, 0], made([]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3)
    exact = gradient(gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model), model, x, y)
    draws = torch.stack([gradient(mll, model, x, y) for _ in range(200)])
    assert keep.root(x[:, 0], made([])) is root
    assert misfit(draws, exact, rounding=1e-12) < 1


def test_is_made_anew_in_use_and_spares_columns():
    model, likelihood, x, y = problem()
    keep = KeptPreconditioner(growth=1.2)
    solver = UnbiasedSolver(rank=20, keep=keep, generator=torch.Generator().manual_seed(0))
    mll = UnbiasedMarginalLogLikelihood(likelihood, model, solver=solver)
    gradient(mll, model, x, y)
    root = keep.root(x[:, 0], made([]))
    gradient(mll, model, x, y)
    assert keep.root(x[:, 0], made([])) is root
    with torch.no_grad():
        model.covar_module.kernels[0].base_kernel.raw_lengthscale.sub_(3.0)
    gradient(mll, model, x, y)  # notes that it is no longer good enough
    gradient(mll, model, x, y)
    assert keep.root(x[:, 0], made([])) is not root
