"""Every likelihood inside Pyro: `ppl.observe` and the hooks of gpytorch's models agree with a program by hand."""

import gpytorch
import pyro
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.models.pyro import PyroGP
from pyro import poutine
from pyro.infer import TraceMeanField_ELBO
from pyro.util import check_site_shape

from gpext import ppl
from gpext.variational import SiteVariationalStrategy
from tests.latent_cases import CASES, NO_DISTRIBUTION, augmented
from tests.members import F64, MEMBERS
from tests.sparse_models import inputs
from tests.statistics import misfit

N = 12
LIKELIHOODS = {name: case for name, case in CASES.items() if not name.startswith(NO_DISTRIBUTION)}
LIKELIHOODS |= {name: augmented(name) for name in MEMBERS if name not in LIKELIHOODS}
every_likelihood = pytest.mark.parametrize("name", LIKELIHOODS)


def problem(name, *batch):
    """A likelihood, latent values for each datum of a batch, and targets (*batch, N)."""
    case = LIKELIHOODS[name]
    generator = torch.Generator().manual_seed(0)
    latents = () if case.num_latents is None else (case.num_latents,)
    f = torch.randn(*batch, *latents, N, generator=generator, dtype=F64)
    return case.make(), f, case.targets(generator, N)


def plates(*sizes):
    return pyro.plate_stack("plate", sizes)


@every_likelihood
@pytest.mark.parametrize("batch", [(), (3,)])
def test_log_density_in_a_program_is_that_of_the_likelihood(name, batch):
    likelihood, f, y = problem(name, *batch)
    y = y.expand(*batch, *y.shape)

    def program():
        with plates(*batch, N):
            pyro.sample("y", likelihood(f), obs=y)

    node = poutine.trace(program).get_trace().nodes["y"]
    node["log_prob"] = node["fn"].log_prob(y)
    check_site_shape(node, max_plate_nesting=1 + len(batch))
    torch.testing.assert_close(node["log_prob"], likelihood.log_prob(y, f), rtol=1e-9, atol=1e-11)


@every_likelihood
def test_classes_and_counts_may_be_integers(name):
    likelihood, f, y = problem(name)
    if bool((y == y.round()).all()):  # torch's log factorials of integers are float32
        torch.testing.assert_close(likelihood(f).log_prob(y.long()), likelihood.log_prob(y, f), rtol=1e-6, atol=1e-6)


@every_likelihood
def test_a_program_draws_targets_in_the_support(name):
    likelihood, f, y = problem(name)

    def program():
        with plates(N):
            return pyro.sample("y", likelihood(f))

    draw = program()
    assert draw.shape == y.shape
    likelihood.check(draw)


@pytest.mark.parametrize("name", [*LIKELIHOODS, *(name for name in CASES if name.startswith("stock"))])
@pytest.mark.parametrize("particles", [(), (5, 1)])
def test_observe_is_the_log_density_as_one_factor(name, particles):
    case = CASES[name] if name in CASES else LIKELIHOODS[name]
    generator = torch.Generator().manual_seed(0)
    y, likelihood = case.targets(generator, N), case.make()
    latents = () if case.num_latents is None else (case.num_latents,)
    f = torch.randn(*particles, *latents, N, generator=generator, dtype=F64)

    def program():
        with plates(*particles):
            ppl.observe("y", likelihood, f, y)

    trace = poutine.trace(program).get_trace()
    trace.compute_log_prob()
    log_prob = likelihood(f).log_prob(y)
    assert log_prob.shape == (*particles, N)
    torch.testing.assert_close(trace.nodes["y"]["log_prob"], log_prob.sum(-1), rtol=1e-9, atol=1e-11)


class Sparse(PyroGP):
    def __init__(self, likelihood, Z, num_data):
        super().__init__(SiteVariationalStrategy(self, Z), likelihood, num_data)
        batch = Z.shape[:-2]
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
        self.covar_module = gpytorch.kernels.ScaleKernel(
            gpytorch.kernels.RBFKernel(batch_shape=batch), batch_shape=batch
        )
        self.double()

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def sparse(name, x):
    """A PyroGP with q(u) at random, and its likelihood."""
    case = LIKELIHOODS[name]
    latents = () if case.num_latents is None else (case.num_latents,)
    model = Sparse(case.make(), x[::3].expand(*latents, -1, -1), N)
    q = model.variational_strategy._variational_distribution
    with torch.no_grad():
        q.natural_vec.copy_(torch.randn(q.natural_vec.shape, generator=torch.Generator().manual_seed(1), dtype=F64))
        q.natural_mat.mul_(3)
    return model, q


@every_likelihood
def test_the_elbo_of_pyro_is_that_of_gpytorch(name):
    x = inputs(N, 1)
    y = LIKELIHOODS[name].targets(torch.Generator().manual_seed(0), N)
    model, q = sparse(name, x)
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    elbo = TraceMeanField_ELBO(num_particles=40, vectorize_particles=True, max_plate_nesting=1)
    for _ in range(2):  # q(u) moves between them, and backward has freed the graph
        estimates = []
        for _ in range(30):
            loss = elbo.differentiable_loss(model.model, model.guide, x, y)
            loss.backward()
            estimates.append(-loss.item())
        estimates = torch.tensor(estimates, dtype=F64)
        exact = model.likelihood.expected_log_prob(y, model(x)).sum() - model.variational_strategy.kl_divergence().sum()
        assert misfit(estimates.unsqueeze(-1), exact.detach()) < 1
        with torch.no_grad():
            q.natural_vec.mul_(-1)
