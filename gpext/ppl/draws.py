"""Draws from the posterior of a Pyro program, chain by chain, with what the program computes from them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass

import torch
from pyro import poutine
from pyro.infer import MCMC
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from pyro.ops.stats import effective_sample_size
from torch import Tensor

from gpext.distributions.drawing import drawn_from


@dataclass(frozen=True)
class PosteriorDraws:
    """Draws of every site of a program, by name, in constrained space; deterministic sites included."""

    samples: dict[str, Tensor]  # (chains, draws, *shape of the site)
    diagnostics: list[dict[str, object]]  # what the kernel says of each chain

    def effective_sample_size(self, name: str) -> Tensor:
        """Return the number of independent draws that know the mean of a site as well, (*shape), all chains together.

        Raises:
            ValueError: no such site.
        """
        return effective_sample_size(self._site(name), chain_dim=0, sample_dim=1)

    def standard_error(self, name: str) -> Tensor:
        """Return the standard error of the mean over all draws of a site, (*shape).

        Raises:
            ValueError: no such site.
        """
        return self._site(name).flatten(0, 1).std(0) / self.effective_sample_size(name).sqrt()

    def _site(self, name: str) -> Tensor:
        if name not in self.samples:
            raise ValueError(f"no site named {name!r}; the program has {', '.join(map(repr, sorted(self.samples)))}.")
        return self.samples[name]


def sample_posterior(
    kernel: MCMCKernel,
    *,
    num_samples: int,
    warmup: int,
    num_chains: int = 1,
    generator: torch.Generator | None = None,
    progress: bool = True,
) -> PosteriorDraws:
    """Run a kernel by Pyro's MCMC, one chain after another in this process.

    `sample_posterior(NUTS(latent_model(prior, likelihood, targets)), ...)` is the reference that approximations are
    compared with; a :class:`gpext.ppl.GibbsKernel` takes the place of NUTS.

    Args:
        kernel: of a model without arguments (bind them by functools.partial); each chain starts where the kernel's
            initialisation of it says.
        num_samples: kept draws of a chain.
        warmup: draws before them, in which the kernel adapts.
        num_chains: how many.
        generator: makes the result reproducible: Pyro's own random numbers are then seeded by it, and torch's global
            generator left as it was.
        progress: show a bar on a terminal.

    Raises:
        TypeError: no kernel.
        ValueError: fewer than one draw or chain, or a negative warm-up.
    """
    if not isinstance(kernel, MCMCKernel):
        raise TypeError(f"expected a kernel of a program, such as NUTS(model); got {type(kernel).__name__}.")
    if num_samples < 1 or num_chains < 1:
        raise ValueError(f"expected at least one draw and one chain; got {num_samples} and {num_chains}.")
    if warmup < 0:
        raise ValueError(f"warmup must not be negative; got {warmup}.")
    with drawn_from(generator):
        chains, diagnostics = [], []
        for _ in range(num_chains):
            quiet = not (progress and sys.stderr.isatty())
            unused = copy(kernel)  # Pyro's kernels do not start twice
            mcmc = MCMC(unused, num_samples=num_samples, warmup_steps=warmup, disable_progbar=quiet)
            mcmc.run()
            draws = mcmc.get_samples()
            chains.append(draws | _deterministic_sites(kernel.model, draws, num_samples))
            diagnostics.append({key: v["chain 0"] for key, v in mcmc.diagnostics().items() if "chain 0" in v})
    return PosteriorDraws({name: torch.stack([chain[name] for chain in chains]) for name in chains[0]}, diagnostics)


@torch.no_grad()
def _deterministic_sites(
    model: Callable[[], object], draws: dict[str, Tensor], num_samples: int
) -> dict[str, Tensor]:  # (draws, *shape)
    """Return what the program computes at each draw."""
    kept: dict[str, list[Tensor]] = {}
    for i in range(num_samples):
        conditioned = poutine.condition(model, {name: values[i] for name, values in draws.items()})
        for name, node in poutine.trace(conditioned).get_trace().nodes.items():
            if node["type"] == "sample" and node["infer"].get("_deterministic"):
                kept.setdefault(name, []).append(node["value"])
    return {name: torch.stack(values) for name, values in kept.items()}
