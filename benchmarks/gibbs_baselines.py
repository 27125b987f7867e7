"""The other samplers of the Gibbs benchmark, on the same whitened latent: Pyro's NUTS, HMC and random walk.

Also the noise scale of a Student-t model by the scale mixture of [JVV11], plain and with its parameter expansion.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from pyro.infer import HMC, MCMC, NUTS
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from pyro.infer.mcmc.rwkernel import RandomWalkKernel
from torch import Tensor

from gpext.inference.gibbs import draw_latent
from gpext.posteriors import DensePrior
from gpext.ppl import latent_model
from gpext.sites import GaussianSites

HMC_STEPS = 10  # leapfrog steps, the maximum in the paper's Table 5
_PILOT = 200  # steps of NUTS that find the step size of HMC: Pyro's own adaptation keeps the length of the path
_SHARE = 0.7  # of that step size: at the full step size some chains never move


def _hmc(model: Callable[[], None]) -> HMC:
    pilot = NUTS(model, adapt_mass_matrix=False)
    MCMC(pilot, num_samples=1, warmup_steps=_PILOT, disable_progbar=True).run()
    options = {"adapt_step_size": False, "adapt_mass_matrix": False}
    return HMC(model, step_size=_SHARE * float(pilot.step_size), num_steps=HMC_STEPS, **options)


KERNELS: dict[str, Callable[[Callable[[], None]], MCMCKernel]] = {
    "NUTS": NUTS,
    "HMC": _hmc,
    "MH": partial(RandomWalkKernel, init_step_size=0.05),
}


@dataclass(frozen=True)
class Sampled:
    """Draws of f, and the time of sampling without the warm-up."""

    latent: Tensor  # (chains, draws, N)
    seconds: float


def sample_by_pyro(
    name: str,
    prior: MultivariateNormal,
    likelihood: Likelihood,
    targets: Tensor,
    *,
    num_samples: int,
    num_chains: int,
    warmup: int,
    seed: int,
) -> Sampled:
    """Run one of :data:`KERNELS`, one chain after another."""
    torch.manual_seed(seed)
    dense = DensePrior.of(prior.mean, prior.covariance_matrix, 0.0)
    chains, seconds = [], 0.0
    for _ in range(num_chains):
        began: list[float] = []

        def watch(kernel: MCMCKernel, params: object, stage: str, i: int, began: list[float] = began) -> None:
            if stage == "Sample" and not began:
                began.append(time.perf_counter())

        kernel = KERNELS[name](latent_model(prior, likelihood, targets))
        mcmc = MCMC(kernel, num_samples=num_samples, warmup_steps=warmup, disable_progbar=True, hook_fn=watch)
        mcmc.run()
        seconds += (time.perf_counter() - began[0]) * num_samples / max(num_samples - 1, 1)
        chains.append(dense.mean + dense.square_root.times(mcmc.get_samples()["f_whitened"]))
    return Sampled(torch.stack(chains), seconds)


def noise_by_scale_mixture(
    prior: DensePrior,
    targets: Tensor,
    deg_free: float,
    *,
    expanded: bool,
    num_samples: int,
    num_chains: int,
    warmup: int,
    seed: int,
) -> Sampled:
    """Return draws of log s of Student-t noise, p(log s) uniform, by Gibbs with the noise variances of the data.

    y_i ~ N(f_i, a^2 U_i), U_i ~ Inv-chi^2(nu, t^2), s = a t; a stays 1 unless the model is expanded [JVV11 Sec. 5].
    """
    generator = torch.Generator().manual_seed(seed)
    shape = torch.Size((num_chains, targets.size(-1)))

    def chi_square(count: float, shape: tuple[int, ...]) -> Tensor:
        return 2 * torch._standard_gamma(torch.full(shape, count / 2, dtype=torch.float64), generator=generator)

    f = prior.draw(shape, generator=generator)
    a2, t2 = (torch.ones(num_chains, 1, dtype=torch.float64) for _ in range(2))
    draws, began = [], time.perf_counter()
    for sweep in range(warmup + num_samples):
        if sweep == warmup:
            began = time.perf_counter()
        residual = (targets - f).square()
        u = (deg_free * t2 + residual / a2) / chi_square(deg_free + 1, tuple(shape))
        t2 = chi_square(shape[1] * deg_free, (num_chains, 1)) / (deg_free * (1 / u).sum(-1, keepdim=True))
        precision = 1 / (a2 * u)
        posterior = prior.condition(GaussianSites(precision * targets, precision))
        before = prior.draw(shape, generator=generator)
        f = draw_latent(posterior, before, generator=generator)
        if expanded:
            a2 = ((targets - f).square() / u).sum(-1, keepdim=True) / chi_square(shape[1], (num_chains, 1))
        if sweep >= warmup:
            draws.append(0.5 * (a2 * t2).log())
    return Sampled(torch.stack(draws, 1), time.perf_counter() - began)
