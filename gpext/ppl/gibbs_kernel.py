r"""Gibbs within Pyro: a latent Gaussian process drawn in closed form, the rest of the program by NUTS [GWO20 Sec. 3.4].

With f the latent site, theta all others, and likelihoods that have an augmentation, one step is

    1. w ~ p(w | f, y, theta)
    2. f ~ p(f | w, y, theta), and with it v = L^-1 (f - mu)
    3. theta ~ p(theta | v, y), by a step of NUTS in the whitened program

A likelihood may depend on f through g = a f + b, elementwise, with any a and b of theta's (offsets, scales): a site
exp(nu g - tau g^2 / 2) is one in f, of shift a (nu - tau b) and precision a^2 tau. Whatever else in the program depends
on f has a factor R(f); step 2 is then a proposal, accepted with probability min(1, R(f') / R(f)). With nothing else,
R is constant and every draw is accepted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pyro import poutine
from pyro.infer.mcmc import HMC, NUTS
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from gpext.inference.gibbs import draw_latent, draw_sites
from gpext.likelihoods import AugmentedLikelihood
from gpext.ppl.latent import WHITENED, WhitenedPrior
from gpext.ppl.observe import Observation
from gpext.ppl.program_kernel import ProgramKernel
from gpext.sites import GaussianSites
from gpext.threads import factor_flops, threads_for


@dataclass(frozen=True)
class _Seen:
    """The affine function a f + b of the latent values that one observed site depends on."""

    observation: Observation
    slope: Tensor  # a, with the shape of f
    offset: Tensor  # b

    def draw_sites(self, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Return shift and precision of the sites in f at w ~ p(w | f, y)."""
        observation = self.observation
        augmentation = observation.likelihood.augmentation(observation.targets)
        sites = draw_sites(augmentation, observation.latent.detach(), generator=generator).to(torch.float64)
        a, b = self.slope.double(), self.offset.double()
        return a * (sites.shift - sites.precision * b), a.square() * sites.precision


@dataclass(frozen=True)
class _State:
    """The program at one point: f, the sites that observe it, and the rest of the density."""

    whitened: WhitenedPrior
    latent: Tensor  # f
    seen: dict[str, _Seen]
    log_rest: Tensor  # log R(f), up to a constant


class GibbsKernel(ProgramKernel):
    """A kernel for `pyro.infer.MCMC`: alternates the exact conditionals of a latent GP with NUTS on all other sites.

    Args:
        model: a Pyro program with a :func:`gpext.ppl.latent_gp` site that one or more :func:`gpext.ppl.observe` sites
            see, each as a f + b elementwise, with likelihoods that have an augmentation.
        latent: the name of that site.
        inner: makes the kernel for the other sites: NUTS, HMC, or either with options bound by functools.partial.
        generator: for the draws of w and f; Pyro's own come from torch's global generator.

    Raises:
        TypeError: when it is set up: a likelihood that observes f has no augmentation.
        ValueError: when it is set up: no such site, no likelihood observes it, or there are discrete sites; or later: a
            likelihood observes something else than a f + b.
        NotImplementedError: when it is set up: a plate draws a part of its indices.

    Example:
        >>> kernel = GibbsKernel(model, "f", inner=partial(NUTS, target_accept_prob=0.9))  # doctest: +SKIP
        >>> draws = sample_posterior(kernel, num_samples=1000, warmup=300)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Callable[..., object],
        latent: str = "f",
        *,
        inner: Callable[..., HMC] = NUTS,
        generator: torch.Generator | None = None,
    ) -> None:
        self.latent, self.inner = latent, inner
        self._site = latent + WHITENED
        super().__init__(model, generator)

    def cleanup(self) -> None:
        """Forget the last run."""
        super().cleanup()
        self._kernel: HMC | None = None
        self._num_accepted = self._num_steps = 0

    def setup(self, warmup_steps: int, *args: Any, **kwargs: Any) -> None:
        """Find a start and set up the inner kernel; see the class for the errors."""
        self._arguments = args, kwargs
        params, trace = self._start(args, kwargs)
        self._check(trace, params)
        self._state(params)  # raises if the program does not suit
        rest = {name: value for name, value in params.items() if name != self._site}
        if rest:
            self._whitened = params[self._site]
            self._kernel = self.inner(potential_fn=self._conditional_potential)
            self._kernel.initial_params = rest
            self._kernel.setup(warmup_steps)

    def sample(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the next state of the chain, in unconstrained space."""
        size = params[self._site].size(-1)
        with threads_for(factor_flops(size, number=params[self._site].numel() // size)):
            self._whitened = self._draw_whitened(params)
            rest = {name: value for name, value in params.items() if name != self._site}
            if self._kernel is not None:
                self._kernel.clear_cache()  # its potential has changed with v
                rest = self._kernel.sample(rest)
        return {self._site: self._whitened, **rest}

    def logging(self) -> OrderedDict[str, str]:
        """Return the inner kernel's numbers and the share of accepted draws of f."""
        lines = OrderedDict() if self._kernel is None else self._kernel.logging()
        lines["acc. latent"] = f"{self._acceptance:.3f}"
        return lines

    def diagnostics(self) -> dict[str, Any]:
        """Return the inner kernel's diagnostics and "latent acceptance rate"."""
        inner = {} if self._kernel is None else self._kernel.diagnostics()
        return {**inner, "latent acceptance rate": self._acceptance}

    @property
    def _acceptance(self) -> float:
        return self._num_accepted / max(self._num_steps, 1)

    def _conditional_potential(self, rest: dict[str, Tensor]) -> Tensor:
        """Return the program's potential energy in the other sites, v fixed."""
        return self._potential({self._site: self._whitened, **rest})

    def _draw_whitened(self, params: dict[str, Tensor]) -> Tensor:
        """Return v at a new f, or the current one if it is rejected."""
        state = self._state(params)
        with torch.no_grad():
            prior = state.whitened.prior
            sites = (seen.draw_sites(self.generator) for seen in state.seen.values())
            total = GaussianSites(*(torch.stack(parts).sum(0) for parts in zip(*sites, strict=True)))
            v = torch.randn(prior.mean.shape, dtype=torch.float64, device=prior.mean.device, generator=self.generator)
            f = draw_latent(prior.condition(total), state.whitened.color(v), generator=self.generator)
            proposal = state.whitened.whiten(f)
        moved = self._state({**params, self._site: proposal})
        for name, seen in moved.seen.items():
            _check_affine(name, state.seen[name], seen, moved.latent)
        self._num_steps += 1
        uniform = torch.rand((), generator=self.generator, device=proposal.device)
        if uniform.log() < moved.log_rest - state.log_rest:
            self._num_accepted += 1
            return proposal
        return params[self._site]

    def _state(self, params: dict[str, Tensor]) -> _State:
        """Run the program at unconstrained parameters and take it apart."""
        assert self.transforms is not None
        values = {name: self.transforms[name].inv(value.detach()) for name, value in params.items()}
        values[self._site].requires_grad_()
        args, kwargs = self._arguments
        with torch.enable_grad():
            trace = poutine.trace(poutine.condition(self.model, values)).get_trace(*args, **kwargs)
        f = trace.nodes[self.latent]["value"]
        seen, log_seen = {}, trace.nodes[self._site]["fn"].log_prob(values[self._site]).sum()
        for name, node in trace.nodes.items():
            if node["type"] == "sample" and "observation" in node["infer"]:
                found = _seen(name, node["infer"]["observation"], f)
                if found is not None:
                    seen[name] = found
                    log_seen = log_seen + node["fn"].log_prob(node["value"]).sum()
        if not seen:
            raise ValueError(f"no likelihood sees {self.latent!r}: the program needs a gpext.ppl.observe site of it.")
        log_rest = (trace.log_prob_sum() - log_seen).detach()
        return _State(trace.nodes[self._site]["infer"]["whitened_prior"], f.detach(), seen, log_rest)

    def _check(self, trace: poutine.Trace, params: dict[str, Tensor]) -> None:
        names = [
            name.removesuffix(WHITENED)
            for name, node in trace.nodes.items()
            if node["type"] == "sample" and "whitened_prior" in node["infer"]
        ]
        if self.latent not in names:
            known = ", ".join(map(repr, names)) if names else "none"
            raise ValueError(
                f"no latent GP site named {self.latent!r} in the program; those made by gpext.ppl.latent_gp: {known}."
            )
        nodes = trace.iter_stochastic_nodes()  # plates among them; one that draws its indices Pyro has refused before
        discrete = [name for name, node in nodes if name not in params and not site_is_subsample(node)]
        if discrete:
            raise ValueError(f"GibbsKernel has no moves for the discrete sites {discrete}.")


def _seen(name: str, observation: Observation, f: Tensor) -> _Seen | None:
    """Return the coefficients of a f + b at an observed site, None if it does not depend on f."""
    g = observation.latent
    if not g.requires_grad:
        return None
    (slope,) = torch.autograd.grad(g.sum(), f, retain_graph=True, allow_unused=True)
    if slope is None:
        return None
    if not isinstance(observation.likelihood, AugmentedLikelihood):
        raise TypeError(
            f"GibbsKernel needs a likelihood with a scale-mixture augmentation at {name!r} (a gpext SuperGaussian, "
            f"StudentT, Laplace, Matern32, BernoulliLogit, BayesianSVM or NegativeBinomial likelihood); got "
            f"{type(observation.likelihood).__qualname__}. pyro.infer.NUTS samples this program."
        )
    if g.shape != f.shape:
        raise ValueError(
            f"{name!r} must see one latent value a datum; got a latent of shape {tuple(g.shape)} from a site of shape "
            f"{tuple(f.shape)}. Take the prior at the inputs of the data, repeated where they are."
        )
    return _Seen(observation, slope, (g - slope * f).detach())


def _check_affine(name: str, before: _Seen, after: _Seen, f: Tensor) -> None:
    """Raise ValueError unless the site depends on f through the same a f + b at a new f."""
    g = after.observation.latent.detach()
    error = (g - before.slope * f - before.offset).abs().max()
    if bool(error > torch.finfo(g.dtype).eps ** 0.5 * (1 + g.abs().max() + before.offset.abs().max())):
        raise ValueError(
            f"{name!r} must see a f + b, elementwise, with a and b that do not depend on f; what it sees is another "
            "function of f. pyro.infer.NUTS samples this program."
        )
