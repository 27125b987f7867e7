"""Densities of hyperparameters in unconstrained coordinates integrate to one; gradients follow the chain rule."""

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.constraints import GreaterThan, Interval, Positive
from gpytorch.priors import GammaPrior, LogNormalPrior, NormalPrior

from gpext.samplers.targets.hyperparameters import Hyperparameters
from tests.members import F64


def kernel(constraint, prior):
    module = gpytorch.kernels.RBFKernel(lengthscale_constraint=constraint).double()
    module.register_prior("lengthscale_prior", prior, "lengthscale")
    return module


@pytest.mark.slow
@pytest.mark.parametrize(
    ("constraint", "prior", "grid"),
    [
        (Positive(), LogNormalPrior(-0.5, 0.8), (-12, 30)),
        (Positive(transform=torch.exp, inv_transform=torch.log), GammaPrior(2.0, 3.0), (-14, 5)),
        (GreaterThan(1e-4), GammaPrior(2.0, 3.0), (-14, 25)),
    ],
)
def test_the_density_in_raw_space_integrates_to_one(constraint, prior, grid):
    moved = Hyperparameters(kernel(constraint, prior), None)
    assert moved.size == 1
    raw = torch.linspace(*grid, 4001, dtype=F64)
    density = []
    for value in raw:
        moved.write(value.view(1))
        density.append(float(moved.log_prior(0).exp()))
    assert np.trapezoid(density, raw.numpy()) == pytest.approx(1, abs=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("constraint", "prior"),
    [
        (Positive(), LogNormalPrior(-0.5, 0.8)),
        (Positive(transform=torch.exp, inv_transform=torch.log), GammaPrior(2.0, 3.0)),
        (GreaterThan(0.3), GammaPrior(2.0, 3.0)),
    ],
)
def test_the_density_of_a_logarithm_is_what_quadrature_says(constraint, prior):
    """p(x) for x = log(theta - a) has the same mass and mean of theta as p(theta) above a."""
    moved = Hyperparameters(kernel(constraint, prior), None, logarithms=True)
    assert [slot.coordinate for slot in moved.slots] == ["log lengthscale"]
    x = torch.linspace(-14, 4, 3001, dtype=F64)
    density, theta = [], []
    for value in x:
        moved.write(value.view(1))
        torch.testing.assert_close(moved.read(), value.view(1), rtol=0, atol=1e-6)
        density.append(float(moved.log_prior(0).exp()))
        theta.append(float(moved.constrained(value.view(1))["lengthscale"]))
    bound = float(constraint.lower_bound)
    at = bound + np.linspace(1e-9, 40, 40_001)
    direct = prior.log_prob(torch.tensor(at)).exp().numpy()
    density, theta = np.array(density), np.array(theta)
    assert np.trapezoid(density, x.numpy()) == pytest.approx(np.trapezoid(direct, at), abs=2e-4)
    assert np.trapezoid(density * theta, x.numpy()) == pytest.approx(np.trapezoid(direct * at, at), rel=1e-3)


def test_gradients_by_logarithms_follow_the_chain_rule():
    module = gpytorch.kernels.ScaleKernel(kernel(GreaterThan(0.1), LogNormalPrior(0.0, 1.0))).double()
    module.base_kernel.raw_lengthscale_constraint.lower_bound.double()
    moved = Hyperparameters(module, ["outputscale", "base_kernel.lengthscale"], logarithms=True)
    at = torch.tensor([0.4, -1.2], dtype=F64)

    def value():
        return module.outputscale.square() * module.base_kernel.lengthscale.sum().exp() + moved.log_jacobian()

    moved.write(at)
    found = moved.by_coordinates(torch.autograd.grad(value(), [slot.parameter for slot in moved.slots]))
    for j in range(2):
        ends = []
        for step in (1e-5, -1e-5):
            moved.write(at + step * torch.eye(2, dtype=F64)[j])
            ends.append(value().item())
        assert float(found[j]) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-7)


def test_what_has_another_bound_or_none_keeps_its_coordinate():
    module = gpytorch.kernels.RBFKernel(lengthscale_constraint=Interval(1.0, 3.0)).double()
    moved = Hyperparameters(module, ["lengthscale"], logarithms=True)
    assert torch.equal(moved.read(), module.raw_lengthscale.flatten())
    mean = gpytorch.means.ConstantMean().double()
    moved = Hyperparameters(mean, ["raw_constant"], logarithms=True)
    moved.write(torch.tensor([-2.0], dtype=F64))
    assert (mean.constant.item(), moved.log_jacobian().item()) == (-2.0, 0.0)


def test_a_uniform_prior_is_uniform_in_constrained_space():
    module = gpytorch.kernels.RBFKernel(lengthscale_constraint=Interval(1.0, 3.0)).double()
    moved = Hyperparameters(module, ["lengthscale"])
    raw = torch.linspace(-40, 40, 4001, dtype=F64)
    density = []
    for value in raw:
        moved.write(value.view(1))
        density.append(float(moved.log_prior(0).exp()))
    assert np.trapezoid(density, raw.numpy()) == pytest.approx(2.0, abs=1e-6)  # the length of the interval


def test_finds_what_priors_depend_on_and_keeps_apart_what_does_not():
    module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2)).double()
    module.base_kernel.register_prior(
        "ratio", NormalPrior(0.0, 1.0), lambda k: (k.lengthscale[..., 0] / k.lengthscale[..., 1]).log()
    )
    moved = Hyperparameters(module, None)
    assert [slot.name for slot in moved.slots] == ["base_kernel.lengthscale"]
    both = Hyperparameters(module, ["raw_outputscale", "base_kernel.lengthscale"])
    assert both.size == 3
    assert both.coordinates_of(module.base_kernel) == [1, 2]
    at = both.log_prior(0)
    both.write(both.read() + torch.tensor([0.0, 0.3, -0.2], dtype=F64))
    assert torch.equal(both.log_prior(0), at)
    assert not torch.equal(both.log_prior(1), at)


def test_what_is_frozen_moves_only_if_it_is_named():
    module = gpytorch.kernels.ScaleKernel(kernel(Positive(), LogNormalPrior(0.0, 1.0)))
    module.register_prior("outputscale_prior", LogNormalPrior(0.0, 1.0), "outputscale")
    module.base_kernel.requires_grad_(False)
    assert [slot.name for slot in Hyperparameters(module, None).slots] == ["outputscale"]
    assert not module.base_kernel.raw_lengthscale.requires_grad
    named = Hyperparameters(module, ["base_kernel.lengthscale"])
    before = named.log_prior(0)
    named.write(named.read() + 1)
    assert not torch.equal(named.log_prior(0), before)


def test_reads_writes_and_constrains():
    module = kernel(Positive(), LogNormalPrior(0.0, 1.0))
    moved = Hyperparameters(module, None)
    module.lengthscale = 0.7
    raw = moved.read()
    torch.testing.assert_close(moved.constrained(raw)["lengthscale"], module.lengthscale)
    batch = moved.constrained(torch.stack([raw, raw + 1]).expand(3, 2, 1))["lengthscale"]
    assert batch.shape == (3, 2, 1, 1)
    moved.write(raw + 1)
    torch.testing.assert_close(batch[0, 1], module.lengthscale)


def test_what_moves_does_not_depend_on_where_it_is_asked():
    module = kernel(Positive(), LogNormalPrior(-0.5, 0.8))
    with torch.no_grad():
        assert Hyperparameters(module, None).size == 1
