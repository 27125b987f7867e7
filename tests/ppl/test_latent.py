"""Whitened latent GPs as sample sites, and the model of one GP and one likelihood."""

import pickle

import gpytorch
import pyro
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.priors import GammaPrior, NormalPrior
from linear_operator import to_linear_operator
from pyro import poutine

from gpext import ppl
from gpext.likelihoods import BernoulliLogitLikelihood, StudentTLikelihood
from tests.members import F64, rbf_prior, student_t


def gaussian(*batch, n=4, seed=0, dtype=F64):
    generator = torch.Generator().manual_seed(seed)
    factor = torch.randn(*batch, n, n, generator=generator, dtype=dtype)
    mean = torch.randn(*batch, n, generator=generator, dtype=dtype)
    return MultivariateNormal(mean, factor @ factor.mT + 0.1 * torch.eye(n, dtype=dtype))


def trace_of(program, values=None):
    trace = poutine.trace(poutine.condition(program, values or {})).get_trace()
    trace.compute_log_prob()
    return trace


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_its_mean_and_covariance_are_those_of_the_prior(batch, dtype):
    prior = gaussian(*batch, dtype=dtype)
    n = prior.event_shape[0]

    def at(v):
        return trace_of(lambda: ppl.latent_gp("f", prior, jitter=0.25), {"f_whitened": v}).nodes["f"]["value"]

    zero = torch.zeros(*batch, n, dtype=dtype)
    mean = at(zero)
    root = torch.stack([at(zero + unit) - mean for unit in torch.eye(n, dtype=dtype)], -1)
    assert mean.dtype == root.dtype == dtype
    torch.testing.assert_close(mean, prior.mean)
    torch.testing.assert_close(root @ root.mT, prior.covariance_matrix + 0.25 * torch.eye(n, dtype=dtype))


def test_the_whitened_site_is_one_standard_normal_event_and_f_adds_no_density():
    trace = trace_of(lambda: ppl.latent_gp("f", gaussian(3)))
    v = trace.nodes["f_whitened"]
    assert v["fn"].batch_shape == ()
    assert v["fn"].event_shape == (3, 4)
    expected = torch.distributions.Normal(0.0, 1.0).log_prob(v["value"]).sum()
    torch.testing.assert_close(trace.log_prob_sum(), expected)


def test_a_plate_repeats_the_site():
    def program():
        with pyro.plate("particles", 5, dim=-2):
            return ppl.latent_gp("f", gaussian())

    assert program().shape == (5, 1, 4)


def test_a_plate_that_indexes_a_batch_of_functions_holds_one_each():
    """Density and values are those of the batch as one event, in a plate of three, and of seven copies side by side."""
    prior = gaussian(3)

    def program():
        with pyro.plate("groups", 3):
            return ppl.latent_gp("f", prior, event_dim=1)

    def copies():
        with pyro.plate("particles", 7, dim=-2):
            return program()

    def whole():
        return ppl.latent_gp("f", prior)

    v = torch.randn(7, 3, 4, generator=torch.Generator().manual_seed(0), dtype=F64)
    side_by_side = trace_of(copies, {"f_whitened": v})
    assert side_by_side.nodes["f"]["value"].shape == copies().shape == (7, 3, 4)
    for i in range(7):
        one, expected = (trace_of(model, {"f_whitened": v[i]}) for model in (program, whole))
        torch.testing.assert_close(one.nodes["f"]["value"], expected.nodes["f"]["value"])
        torch.testing.assert_close(side_by_side.nodes["f"]["value"][i], expected.nodes["f"]["value"])
        torch.testing.assert_close(one.log_prob_sum(), expected.log_prob_sum())
    assert side_by_side.nodes["f_whitened"]["log_prob"].shape == (7, 3)


def test_a_batch_that_may_be_the_plates_own_is_refused_unless_it_is_said_whose_it_is():
    def program(size, batch, event_dim=None):
        with pyro.plate("groups", size):
            return ppl.latent_gp("f", gaussian(*batch), event_dim=event_dim)

    for size, batch in ((3, (3,)), (3, (2, 3))):
        with pytest.raises(ValueError, match=rf"batch shape .* plates of shape \({size},\).*event_dim=1 if"):
            program(size, batch)
    assert program(3, (3,), event_dim=2).shape == (3, 3, 4)
    assert program(5, (3,)).shape == (5, 3, 4)  # not a batch of five: several functions in each
    for wrong in (0, 3):
        with pytest.raises(ValueError, match=r"event_dim must be 1, \.\.\., 2"):
            program(3, (3,), event_dim=wrong)


def test_a_singular_covariance_is_refused_with_its_jitter():
    singular = torch.ones(3, 3, dtype=F64) - 1e-3 * torch.eye(3, dtype=F64)
    ones = MultivariateNormal(torch.zeros(3, dtype=F64), to_linear_operator(singular))
    for make in (
        lambda: ppl.latent_gp("g", ones, jitter=1e-5),
        lambda: ppl.latent_model(ones, None, None, jitter=1e-5),
    ):
        with pytest.raises(torch.linalg.LinAlgError, match="not positive-definite, with jitter=1e-05"):
            make()
    assert ppl.latent_gp("g", ones, jitter=0.1).shape == (3,)


def test_other_priors_are_refused():
    tasks = MultitaskMultivariateNormal.from_batch_mvn(gaussian(2))
    for prior in (tasks, torch.distributions.Normal(0.0, 1.0)):
        with pytest.raises(TypeError, match=f"'f' must be a gpytorch MultivariateNormal.*got {type(prior).__name__}"):
            ppl.latent_gp("f", prior)


@pytest.mark.parametrize("known", [True, False])
def test_latent_model_is_prior_times_likelihood(known):
    prior, y = gaussian(), torch.tensor([0.1, 2.0, -1.0, 0.4], dtype=F64)
    likelihood = student_t()
    model = ppl.latent_model(prior if known else lambda: prior, likelihood, y, jitter=0.1)
    trace = trace_of(model)
    f, v = trace.nodes["f"]["value"], trace.nodes["f_whitened"]["value"]
    root = torch.linalg.cholesky(prior.covariance_matrix + 0.1 * torch.eye(4, dtype=F64))
    torch.testing.assert_close(f, prior.mean + root @ v)
    expected = torch.distributions.Normal(0.0, 1.0).log_prob(v).sum() + likelihood.log_prob(y, f).sum()
    torch.testing.assert_close(trace.log_prob_sum(), expected)


def test_latent_model_can_be_pickled():
    model = pickle.loads(pickle.dumps(ppl.latent_model(gaussian(), BernoulliLogitLikelihood(), torch.ones(4))))
    assert set(trace_of(model).nodes) >= {"f_whitened", "f", "y"}


class Regression(gpytorch.models.ApproximateGP):
    def __init__(self):
        super().__init__(None)
        self.mean_module = gpytorch.means.ConstantMean(constant_prior=NormalPrior(0.0, 1.0))
        self.covar_module = gpytorch.kernels.RBFKernel(lengthscale_prior=GammaPrior(3.0, 3.0))

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def test_registered_priors_of_the_gp_and_of_the_likelihood_are_sampled():
    gp = Regression().double()
    likelihood = StudentTLikelihood(noise_prior=GammaPrior(2.0, 4.0)).double()
    x, y = torch.linspace(0, 1, 5, dtype=F64), torch.linspace(0, 1, 5, dtype=F64).cos()
    model = ppl.latent_model(lambda: gp.pyro_sample_from_prior().forward(x), likelihood, y, jitter=1e-6)
    values = {
        "mean_module.mean_prior": torch.tensor(0.7, dtype=F64),
        "covar_module.lengthscale_prior": torch.tensor([[0.4]], dtype=F64),
        "noise_prior": torch.tensor([0.3], dtype=F64),
        "f_whitened": torch.linspace(-1, 1, 5, dtype=F64),
    }
    values = {name: value.requires_grad_() for name, value in values.items()}
    trace = trace_of(model, values)
    assert set(values) == {n for n, node in trace.nodes.items() if node["type"] == "sample"} - {"f", "y"}
    prior, *_ = rbf_prior(x.unsqueeze(-1), lengthscale=0.4, outputscale=1.0, mean=0.7)
    f = prior.mean + torch.linalg.cholesky(prior.covariance_matrix) @ values["f_whitened"]
    torch.testing.assert_close(trace.nodes["f"]["value"], f, rtol=1e-6, atol=1e-6)
    likelihood.noise = torch.tensor(0.3, dtype=F64)
    torch.testing.assert_close(trace.nodes["y"]["log_prob"], likelihood.log_prob(y, f).sum(), rtol=1e-6, atol=1e-6)
    trace.log_prob_sum().backward()
    for name, value in values.items():
        assert bool((value.grad != 0).any()), name


def smooth(size=30):
    """A mean, and a dense covariance that has no Cholesky factor because of rounding."""
    x = torch.linspace(0, 1, size, dtype=F64)
    return 0.1 * x, torch.exp(-2 * (x.unsqueeze(-1) - x).square())


def test_a_dense_covariance_that_needs_its_jitter():
    mean, K = smooth()
    with pytest.raises(torch.linalg.LinAlgError):  # raised by torch, before gpext
        MultivariateNormal(mean, K)
    v = torch.randn(30, generator=torch.Generator().manual_seed(0), dtype=F64)
    lazy = MultivariateNormal(mean, to_linear_operator(K))
    found, expected = (
        trace_of(lambda prior=prior: ppl.latent_gp("f", prior, jitter=1e-6), {"f_whitened": v}).nodes["f"]["value"]
        for prior in ((mean, K), lazy)
    )
    assert torch.equal(found, expected)
    with pytest.raises(torch.linalg.LinAlgError, match=r"with jitter=0 on its diagonal .* Pass a larger `jitter`"):
        ppl.latent_gp("f", (mean, K))


@pytest.mark.parametrize("as_function", [False, True])
def test_a_model_of_a_dense_covariance_is_sampled(as_function):
    prior = smooth()
    y = (torch.arange(30) % 3 == 0).to(F64)
    model = ppl.latent_model((lambda: prior) if as_function else prior, BernoulliLogitLikelihood(), y, jitter=1e-6)
    kernel = ppl.GibbsKernel(model)
    draws = ppl.sample_posterior(kernel, num_samples=4, warmup=1, progress=False)
    assert draws.samples["f"].shape == (1, 4, 30)


def test_a_pair_that_is_no_prior_is_refused():
    mean, K = smooth()
    with pytest.raises(ValueError, match=r"covariance \(..., N, N\); got \(29,\) and \(30, 30\)"):
        ppl.latent_gp("f", (mean[1:], K))
    with pytest.raises(TypeError, match=r"must be tensors \(mean, K\); got \(Tensor, list\)"):
        ppl.latent_gp("f", (mean, K.tolist()))
