"""The reference sampler against a posterior in closed form, and what it returns."""

import gpytorch
import pyro
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from pyro import distributions as dist
from pyro.infer import NUTS

from gpext import ppl
from tests.members import F64, tensor
from tests.statistics import block_means, misfit

Y = tensor(0.3, -1.0, 2.0)
K = 0.5 * torch.eye(3, dtype=F64) + 0.8


def gaussian_model(noise=0.4):
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double().requires_grad_(False)
    likelihood.noise = noise
    return ppl.latent_model(MultivariateNormal(torch.ones(3, dtype=F64), K), likelihood, Y)


def test_nuts_on_the_whitened_latent_samples_the_posterior():
    generator = torch.Generator().manual_seed(0)
    draws = ppl.sample_posterior(
        NUTS(gaussian_model()), num_samples=200, warmup=60, num_chains=2, generator=generator, progress=False
    )
    f = draws.samples["f"]
    assert f.shape == draws.samples["f_whitened"].shape == (2, 200, 3)
    gain = K @ torch.linalg.inv(K + 0.4 * torch.eye(3, dtype=F64))
    mean, covariance = 1 + gain @ (Y - 1), K - gain @ K
    moments = torch.cat([f, (f - mean).square()], -1)
    assert misfit(block_means(moments, 20), torch.cat([mean, covariance.diagonal()])) < 1
    assert len(draws.diagnostics) == 2
    assert draws.diagnostics[0]["divergences"] == []


def test_independent_draws_are_worth_their_number():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 500, 2, generator=generator, dtype=F64)
    draws = ppl.PosteriorDraws({"x": x}, [])
    assert bool(((draws.effective_sample_size("x") / 2000 - 1).abs() < 0.25).all())
    torch.testing.assert_close(draws.standard_error("x"), 1 / draws.effective_sample_size("x").sqrt(), rtol=0.1, atol=0)
    with pytest.raises(ValueError, match="no site named 'g'; the program has 'x'"):
        draws.standard_error("g")


def test_sites_are_in_constrained_space_with_what_the_program_computes():
    def program():
        scale = pyro.sample("scale", dist.Gamma(2.0, 2.0))
        pyro.deterministic("twice", 2 * scale)
        f = ppl.latent_gp("f", MultivariateNormal(torch.zeros(2), scale * torch.eye(2)))
        pyro.sample("y", dist.Normal(f, 1.0).to_event(1), obs=torch.ones(2))

    generator = torch.Generator().manual_seed(0)
    samples = ppl.sample_posterior(NUTS(program), num_samples=4, warmup=4, generator=generator).samples
    assert set(samples) == {"scale", "twice", "f", "f_whitened"}
    assert bool((samples["scale"] > 0).all())
    torch.testing.assert_close(samples["twice"], 2 * samples["scale"])
    torch.testing.assert_close(samples["f"], samples["scale"].sqrt().unsqueeze(-1) * samples["f_whitened"])


@pytest.mark.parametrize("sizes", [{"num_samples": 0}, {"num_samples": 5, "num_chains": 0}])
def test_no_draws_are_refused(sizes):
    with pytest.raises(ValueError, match="at least one draw and one chain"):
        ppl.sample_posterior(NUTS(gaussian_model()), warmup=1, **sizes)


def test_a_program_is_no_kernel_and_a_warmup_not_negative():
    with pytest.raises(TypeError, match=r"such as NUTS\(model\); got partial"):
        ppl.sample_posterior(gaussian_model(), num_samples=2, warmup=1)
    with pytest.raises(ValueError, match="warmup must not be negative; got -1"):
        ppl.sample_posterior(NUTS(gaussian_model()), num_samples=2, warmup=-1)
