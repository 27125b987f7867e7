"""gpytorch's own suite for every likelihood; replacements of gpytorch classes keep their parameters."""

import math
import subprocess
import sys
import unittest

import gpytorch
import pytest
import torch
from gpytorch.constraints import GreaterThan, Interval
from gpytorch.distributions import MultivariateNormal
from gpytorch.priors import GammaPrior
from gpytorch.test.base_likelihood_test_case import BaseLikelihoodTestCase
from scipy import special

from gpext import likelihoods
from gpext.distributions import log_normalizer
from tests.members import MEMBERS, PowerPhi, pseudo_huber_phi, tensor


def _suite(name, member):
    class Suite(BaseLikelihoodTestCase, unittest.TestCase):
        seed = 1

        def create_likelihood(self, **kwargs):
            return member.make().float()

        def _create_targets(self, batch_shape=()):
            return member.targets(*batch_shape, 5).float()

        def _create_marginal_input(self, batch_shape=()):
            # the suite compares with few Monte Carlo samples: a moderate variance keeps counts and hinges comparable
            factor = 0.4 * torch.randn(*batch_shape, 5, 5)
            covariance = factor @ factor.mT + 0.1 * torch.eye(5)
            return MultivariateNormal(0.5 * torch.randn(*batch_shape, 5), covariance)

    Suite.__name__ = Suite.__qualname__ = f"Test{name.title().replace('_', '')}"
    return Suite


globals().update({f"Test{name.title().replace('_', '')}": _suite(name, member) for name, member in MEMBERS.items()})

STOCK = {
    "student_t": (likelihoods.StudentTLikelihood, gpytorch.likelihoods.StudentTLikelihood),
    "laplace": (likelihoods.LaplaceLikelihood, gpytorch.likelihoods.LaplaceLikelihood),
}


@pytest.mark.parametrize("batch_shape", [torch.Size(), torch.Size([2])])
@pytest.mark.parametrize(("ours", "theirs"), STOCK.values(), ids=STOCK.keys())
def test_parameters_and_state_are_those_of_gpytorchs_class(ours, theirs, batch_shape):
    a, b = ours(batch_shape=batch_shape), theirs(batch_shape=batch_shape)
    assert isinstance(a, theirs)
    assert {n: p.shape for n, p in a.named_parameters()} == {n: p.shape for n, p in b.named_parameters()}
    for one, other in ((a, b), (b, a)):
        for parameter in one.parameters():
            torch.nn.init.normal_(parameter)
        other.load_state_dict(one.state_dict(), strict=True)
        assert torch.equal(a.noise, b.noise)
    assert [type(c) for c in a.constraints()] == [type(c) for c in b.constraints()]


@pytest.mark.parametrize(
    ("kind", "name", "kwargs"),
    [
        (likelihoods.StudentTLikelihood, "noise", {}),
        (likelihoods.StudentTLikelihood, "deg_free", {}),
        (likelihoods.LaplaceLikelihood, "noise", {}),
        (likelihoods.Matern32Likelihood, "noise", {}),
        (likelihoods.NegativeBinomialLogitLikelihood, "total_count", {}),
        (likelihoods.NegativeBinomialLogLikelihood, "dispersion", {}),
    ],
)
def test_priors_and_constraints_are_registered(kind, name, kwargs):
    prior, constraint = GammaPrior(2.0, 1.0), Interval(0.5, 8.0)
    likelihood = kind(**{f"{name}_prior": prior, f"{name}_constraint": constraint}, **kwargs)
    assert next(p for p in likelihood.named_priors() if p[0] == f"{name}_prior")[2] is prior
    setattr(likelihood, name, 4.0)
    torch.testing.assert_close(getattr(likelihood, name), torch.tensor([4.0]))
    getattr(likelihood, f"raw_{name}").data.fill_(50.0)
    assert getattr(likelihood, name).item() <= 8.0
    _, module, _, closure, setter = next(p for p in likelihood.named_priors() if p[0] == f"{name}_prior")
    setter(module, torch.tensor(3.0))
    torch.testing.assert_close(closure(module), torch.tensor([3.0]))


@pytest.mark.parametrize("name", ["noise", "total_count"])
def test_setters_keep_float64(name):
    kind = likelihoods.Matern32Likelihood if name == "noise" else likelihoods.NegativeBinomialLogitLikelihood
    likelihood = kind().double()
    setattr(likelihood, name, 0.7)
    assert getattr(likelihood, name).item() == pytest.approx(0.7, rel=1e-14)


def test_degrees_of_freedom_below_two_with_a_constraint_of_your_own():
    likelihood = likelihoods.StudentTLikelihood(deg_free_constraint=GreaterThan(0.1)).double()
    likelihood.deg_free = tensor(1.0)
    predictive = likelihood(MultivariateNormal(tensor(0.0, 1.0), torch.eye(2, dtype=torch.float64)))
    assert bool(predictive.mean.isnan().all())
    assert bool(predictive.log_prob(tensor(0.0, 1.0)).isfinite().all())


WITHOUT_PYRO = """
import sys
sys.modules["pyro"] = None
import torch
import gpext
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from tests.members import MEMBERS
assert not any("Pyro" in base.__name__ for base in Likelihood.__mro__), Likelihood.__mro__
q = MultivariateNormal(torch.zeros(4).double(), torch.eye(4).double())
for name, member in MEMBERS.items():
    y = member.targets(4)
    print(name, *member.likelihood.log_marginal(y, q).tolist(), *member.likelihood.expected_log_prob(y, q).tolist())
    member.likelihood(q).sample()
    member.likelihood(q.mean).sample()
"""


@pytest.mark.slow
def test_results_without_pyro_are_those_with_it():
    run = subprocess.run([sys.executable, "-c", WITHOUT_PYRO], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    lines = [line.split() for line in run.stdout.splitlines() if line.split() and line.split()[0] in MEMBERS]
    assert len(lines) == len(MEMBERS)
    q = MultivariateNormal(torch.zeros(4).double(), torch.eye(4).double())
    for name, *values in lines:
        likelihood, y = MEMBERS[name].likelihood, MEMBERS[name].targets(4)
        here = torch.cat([likelihood.log_marginal(y, q), likelihood.expected_log_prob(y, q)])
        torch.testing.assert_close(tensor(*map(float, values)), here, rtol=1e-12, atol=1e-12)


def test_a_phi_that_is_a_module_is_registered_and_learned():
    likelihood = likelihoods.SuperGaussianLikelihood(PowerPhi())
    assert [name for name, _ in likelihood.named_parameters()] == ["phi.raw_power"]
    y, q = torch.zeros(4), MultivariateNormal(torch.zeros(4), torch.eye(4))
    for method in (likelihood.expected_log_prob, likelihood.log_marginal, likelihood.augmented_bound):
        (gradient,) = torch.autograd.grad(method(y, q).sum(), likelihood.phi.raw_power)
        assert bool(gradient.isfinite())
        assert float(gradient.abs()) > 1e-3


def test_a_power_law_is_normalised_at_every_power_learning_may_visit():
    """phi = (1 + r)^-p underflows through subnormal numbers, where its logarithm is coarse."""
    module = PowerPhi().double()
    for power in [1.001, *torch.linspace(1.02, 4, 12, dtype=torch.float64).tolist(), 20.0, 300.0]:
        module.raw_power.data.fill_(math.log(math.expm1(power - 1)))
        constant = log_normalizer(lambda r: module(r).log(), tensor(1.0))
        assert constant.item() == pytest.approx(-special.betaln(0.5, power - 0.5), rel=1e-11, abs=1e-11)
        (slope,) = torch.autograd.grad(constant, module.raw_power)
        expected = (special.digamma(power) - special.digamma(power - 0.5)) * -math.expm1(1 - power)
        assert slope.item() == pytest.approx(expected, rel=1e-9)


def test_a_quadratic_of_your_own_needs_a_conditional_for_predictions():
    likelihood = likelihoods.SuperGaussianLikelihood(
        pseudo_huber_phi, potential=torch.zeros_like, log_constant=torch.zeros_like
    )
    assert likelihood.log_marginal(torch.zeros(2), MultivariateNormal(torch.zeros(2), torch.eye(2))).shape == (2,)
    with pytest.raises(ValueError, match="give `conditional`"):
        likelihood(torch.zeros(2))
