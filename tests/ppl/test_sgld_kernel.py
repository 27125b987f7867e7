"""SGLDKernel: its draws against a conjugate posterior, in Pyro's own MCMC and beside latent GPs."""

import pyro
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from pyro import distributions as dist
from pyro.infer import MCMC

from gpext import likelihoods, ppl
from gpext.inference import InferenceWarning
from tests.statistics import block_means, misfit

F64 = torch.float64
Y = torch.tensor([0.3, -1.2, 2.0], dtype=F64)
MEAN, VARIANCE = torch.tensor([0.5, -1.0], dtype=F64), torch.tensor([2.0, 0.5], dtype=F64)


def program():
    """A Gaussian pair, and a positive number with a conjugate posterior."""
    mu = pyro.sample("mu", dist.Normal(MEAN, VARIANCE.sqrt()).to_event(1))
    pyro.sample("seen", dist.Normal(mu, 1.0).to_event(1), obs=Y[:2])
    rate = pyro.sample("rate", dist.Gamma(torch.tensor(6.0, dtype=F64), 2.0))
    pyro.sample("waited", dist.Exponential(rate), obs=Y[2])


@pytest.mark.slow
def test_draws_are_of_the_posterior():
    """Two Gaussians and the logarithm of a Gamma(7, rate 4); the width that steps of 0.15 add is 2 %."""
    precision = 1 / VARIANCE + 1
    preconditioner = torch.cat([1 / precision, torch.tensor([0.15], dtype=F64)])  # mu, then rate
    kernel = ppl.SGLDKernel(program, step_size=0.15, preconditioner=preconditioner)
    generator = torch.Generator().manual_seed(0)
    with pytest.warns(InferenceWarning, match="neighbouring draws are nearly the same"):
        draws = ppl.sample_posterior(
            kernel, num_samples=400, warmup=60, num_chains=6, generator=generator, progress=False
        )
    mu, log_rate = draws.samples["mu"], draws.samples["rate"].log()
    found = torch.cat([mu, mu.square(), log_rate.unsqueeze(-1), log_rate.exp().unsqueeze(-1)], -1)
    mean = (MEAN / VARIANCE + Y[:2]) / precision
    seven = torch.tensor(7.0, dtype=F64)
    log_mean = (torch.digamma(seven) - torch.tensor(4.0, dtype=F64).log()).view(1)
    expected = torch.cat([mean, mean.square() + 1 / precision, log_mean, torch.tensor([7 / 4], dtype=F64)])
    assert misfit(block_means(found, 4), expected) < 1  # blocks of a hundred draws, which are correlated over some 26


def test_in_pyros_own_mcmc_with_a_latent_gp_and_in_single_precision():
    x = torch.linspace(0, 1, 5)
    K = torch.exp(-0.5 * (x.unsqueeze(-1) - x) ** 2) + 1e-3 * torch.eye(5)
    model = ppl.latent_model(MultivariateNormal(torch.zeros(5), K), likelihoods.BernoulliLogitLikelihood(), x.round())
    pyro.set_rng_seed(0)
    mcmc = MCMC(ppl.SGLDKernel(model), num_samples=10, warmup_steps=2, disable_progbar=True)
    mcmc.run()
    latent = next(iter(mcmc.get_samples().values()))
    assert latent.shape == (10, 5)
    assert bool((latent.std(0) > 0).all())


def test_a_seed_decides():
    runs = [
        ppl.sample_posterior(
            ppl.SGLDKernel(program), num_samples=4, warmup=0, generator=torch.Generator().manual_seed(s), progress=False
        ).samples["mu"]
        for s in (1, 1, 2)
    ]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_bad_input():
    with pytest.raises(ValueError, match="step_size must be positive; got 0"):
        ppl.SGLDKernel(program, step_size=0)
    with pytest.raises(ValueError, match="expected a preconditioner"):
        ppl.SGLDKernel(program, preconditioner=torch.ones(2)).setup(0)
    wild = ppl.SGLDKernel(lambda: pyro.sample("mu", dist.Normal(MEAN, 1.0).to_event(1)), step_size=1e40)
    with pytest.raises(FloatingPointError, match="NaN or infinite"):
        ppl.sample_posterior(wild, num_samples=50, warmup=0, progress=False)
