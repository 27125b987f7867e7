r"""Draws from the posterior of a Pyro program, chain by chain, with what the program computes from them.

A latent GP at new inputs is Gaussian given f at the inputs of the program, and its posterior is the average over draws
of f and of the hyperparameters theta on which the joint prior of both depends:

    p(f_* | y) = 1/S sum_s p(f_* | f_s, theta_s)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from gpytorch.distributions import MultivariateNormal, base_distributions
from pyro import poutine
from pyro.infer import MCMC
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from pyro.ops.stats import effective_sample_size
from torch import Tensor

from gpext.callers import warn_caller
from gpext.distributions import BatchMixture
from gpext.distributions.drawing import drawn_from
from gpext.inference import InferenceWarning
from gpext.posteriors import DensePrior
from gpext.progress import Progress
from gpext.samplers.exporting import to_arviz
from gpext.samplers.split_r_hat import split_r_hat
from gpext.samplers.targets.latent_posterior import conditional

if TYPE_CHECKING:
    import arviz

_FEWEST = 4  # draws for halves of a chain to have a variance
_ENOUGH = 20  # draws to say that they are worth few
_POOR = 0.1  # effective draws a draw: with fewer, means are known no better than from a tenth of the draws


@dataclass(frozen=True)
class PosteriorDraws:
    """Draws of every site of a program, by name, in constrained space; deterministic sites included.

    Attributes:
        samples: (chains, draws, *shape of the site), by name.
        diagnostics: of each chain, from its kernel.
        message: one sentence on how it went.

    Example:
        >>> import torch
        >>> draws = PosteriorDraws({"a": torch.tensor([[1.0, 3.0]])}, [])
        >>> draws.samples["a"].mean()
        tensor(2.)
    """

    samples: dict[str, Tensor] = field(repr=False)
    diagnostics: list[dict[str, object]] = field(repr=False)
    message: str = ""

    def to_arviz(self) -> arviz.InferenceData:
        """Return the draws for ArviZ: its diagnostics, tables and plots; a `DataTree` from ArviZ 1.0 on.

        Raises:
            ImportError: ArviZ is not installed.
        """
        return to_arviz({"posterior": self.samples})

    @torch.no_grad()
    def predict(
        self,
        name: str,
        joint: MultivariateNormal | Callable[[dict[str, Tensor]], MultivariateNormal],
        *,
        jitter: float = 0.0,
        num_draws: int = 200,
    ) -> BatchMixture:
        """Return the posterior of a latent GP at new inputs, value by value (..., S): the average of Gaussians above.

        Args:
            name: of the site f (..., N), see :func:`gpext.ppl.latent_gp`.
            joint: the prior (..., N + S) of f at the inputs of the program, in their order, and then at the new ones;
                or a function that returns it for the sites of one draw, by name, where it depends on them.
            jitter: as of the site.
            num_draws: average over at most so many draws, evenly spaced; each costs a Cholesky where `joint` is a
                function.

        Raises:
            TypeError: `joint` is, or returns, no MultivariateNormal.
            ValueError: no such site, no draw to average over, or a prior of no more values than the site has.

        Example:
            >>> inputs = torch.cat([x, test_x])  # doctest: +SKIP
            >>> f = draws.predict(  # doctest: +SKIP
            ...     "f", lambda sites: MultivariateNormal(mean(inputs), sites["scale"] * kernel(inputs))
            ... )
        """
        latent = self._site(name).flatten(0, 1).double()
        if num_draws < 1:
            raise ValueError(f"num_draws must be at least 1; got {num_draws}.")
        chosen = torch.arange(0, len(latent), -(-len(latent) // num_draws), device="cpu")
        if not callable(joint) or isinstance(joint, MultivariateNormal):
            mean, variance = conditional(latent[chosen], *_split(joint, name, latent.size(-1), jitter))
            return _average(mean, variance, self.samples[name].dtype)
        flat = {site: values.flatten(0, 1) for site, values in self.samples.items()}
        parts = []
        for index in chosen.tolist():
            prior = joint({site: values[index] for site, values in flat.items()})
            parts.append(conditional(latent[index], *_split(prior, name, latent.size(-1), jitter)))
        means, variances = zip(*parts, strict=True)
        return _average(torch.stack(means), torch.stack(variances), self.samples[name].dtype)

    def summary(self) -> str:
        """Return a table: of each site its shape, the range of its values' means, and its least known value.

        The last two columns are the smallest effective sample size and the largest split R-hat of its values; nan of
        what does not move, and of fewer than four draws.
        """
        rows = [("site", "shape", "mean", "sd", "least ESS", "R-hat")]
        for name, draws in self.samples.items():
            flat = _values(draws).flatten(0, 1)
            mean, deviation = flat.mean(0), flat.std(0)
            shape = str(tuple(draws.shape[2:]))
            scores = f"{_least_effective(draws):.1f}", f"{split_r_hat(_values(draws)):.3f}"
            rows.append((name, shape, _range(mean), _range(deviation), *scores))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join([self.message, *lines] if self.message else lines)

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
        progress: show a bar on a terminal, or lines in the log "gpext".

    Warns of fewer than one effective draw in ten, and names the site.

    Raises:
        TypeError: no kernel.
        ValueError: fewer than one draw or chain, or a negative warm-up.

    Example:
        >>> import pyro, torch
        >>> def program():
        ...     pyro.sample("z", pyro.distributions.Normal(torch.zeros(()), 1.0))
        >>> draw = torch.Generator().manual_seed(0)
        >>> kernel = pyro.infer.NUTS(program)
        >>> draws = sample_posterior(kernel, num_samples=5, warmup=5, progress=False, generator=draw)
        >>> draws.samples["z"].shape
        torch.Size([1, 5])
    """
    if not isinstance(kernel, MCMCKernel):
        raise TypeError(f"expected a kernel of a program, such as NUTS(model); got {type(kernel).__name__}.")
    if num_samples < 1 or num_chains < 1:
        raise ValueError(f"expected at least one draw and one chain; got {num_samples} and {num_chains}.")
    if warmup < 0:
        raise ValueError(f"warmup must not be negative; got {warmup}.")
    started = time.perf_counter()
    name = type(kernel).__name__
    bar = Progress(name, num_chains * (warmup + num_samples), shown=progress)

    chains: list[dict[str, Tensor]] = []
    diagnostics: list[dict[str, object]] = []

    def after_step(running: MCMCKernel, _params: dict[str, Tensor], stage: str, index: int) -> None:
        bar.update(numbers={"stage": stage, **running.logging()})
        if stage.startswith("Sample") and index == num_samples - 1:
            diagnostics.append(running.diagnostics())  # Pyro's `MCMC.diagnostics` fails of fewer than four draws

    with bar, drawn_from(generator):
        for _ in range(num_chains):
            unused = copy(kernel)  # Pyro's kernels do not start twice
            mcmc = MCMC(unused, num_samples=num_samples, warmup_steps=warmup, hook_fn=after_step, disable_progbar=True)
            mcmc.run()
            draws = mcmc.get_samples()
            chains.append(draws | _deterministic_sites(kernel.model, draws, num_samples))
    samples = {name: torch.stack([chain[name] for chain in chains]) for name in chains[0]}
    message, is_poor = _concluded(name, samples, time.perf_counter() - started)
    if is_poor:
        warn_caller(message, InferenceWarning)
    return PosteriorDraws(samples, diagnostics, message)


def _concluded(kernel: str, samples: dict[str, Tensor], seconds: float) -> tuple[str, bool]:
    """Return one sentence on how it went, and whether the draws are worth few."""
    num_chains, num_draws = next(iter(samples.values())).shape[:2]
    text = f"{kernel}, {num_chains} {'chain' if num_chains == 1 else 'chains'} of {num_draws} draws in {seconds:.1f} s"
    effective = {name: _least_effective(draws) for name, draws in samples.items()}
    known = {name: number for name, number in effective.items() if number == number}
    if not known:
        return f"{text}.", False
    worst = min(known, key=lambda name: known[name])
    text += f", least effective sample size {known[worst]:.1f}, of {worst!r}"
    is_poor = known[worst] < _POOR * num_chains * num_draws and num_chains * num_draws >= _ENOUGH
    if is_poor:
        text += ": neighbouring draws are nearly the same. Draw more, or give the kernel a longer warm-up"
    return f"{text}.", is_poor


def _values(draws: Tensor) -> Tensor:
    """Return draws of a site (C, S, ...) as (C, S, values), float64."""
    return draws.double().reshape(*draws.shape[:2], -1)


def _least_effective(draws: Tensor) -> float:
    """Return the smallest effective sample size of the values of a site (C, S, ...); nan if none moves, or S < 4."""
    flat = _values(draws)
    if flat.size(1) < _FEWEST:
        return float("nan")
    moving = flat[..., flat.flatten(0, 1).std(0) > 0]
    if not moving.size(-1):
        return float("nan")
    return float(effective_sample_size(moving, chain_dim=0, sample_dim=1).min())


def _split(joint: MultivariateNormal, name: str, size: int, jitter: float) -> tuple[DensePrior, Tensor, Tensor, Tensor]:
    """Return the prior of the first values, and of the others mean, cross covariance and variance, float64.

    Raises:
        TypeError: it is no MultivariateNormal.
        ValueError: there are no others.
    """
    if not isinstance(joint, MultivariateNormal):
        raise TypeError(f"expected the joint prior of {name!r}, a MultivariateNormal; got {type(joint).__name__}.")
    mean, covariance = joint.mean.double(), joint.covariance_matrix.double()
    if mean.size(-1) <= size:
        raise ValueError(
            f"expected the joint prior of the {size} values of {name!r} and of new ones, in this order; got one of "
            f"{mean.size(-1)}."
        )
    prior = DensePrior.of(mean[..., :size], covariance[..., :size, :size], jitter)
    variance = covariance.diagonal(dim1=-2, dim2=-1)[..., size:]
    return prior, mean[..., size:], covariance[..., :size, size:], variance


def _average(mean: Tensor, variance: Tensor, dtype: torch.dtype) -> BatchMixture:
    mean, variance = torch.broadcast_tensors(mean.to(dtype), variance.to(dtype))
    return BatchMixture(base_distributions.Normal(mean, variance.sqrt()))


def _range(values: Tensor) -> str:
    """Return the least and the largest value, or the one there is."""
    least, most = float(values.min()), float(values.max())
    return f"{least:.4g}" if values.numel() == 1 else f"{least:.4g} .. {most:.4g}"


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
