r"""A sampler of the exact posterior of f, and of hyperparameters, for any likelihood with an augmentation.

One sweep of every chain; each part leaves p(f, theta | y) invariant:

    w | f, theta                        one independent draw a datum
    kernel and mean parameters | w      f integrated out: slice sampling of A(nu, tau; theta) + log p(theta)
    f | w, theta                        a Gaussian, drawn at once                           [GWO20 Sec. 3.4]
    likelihood parameters | f           w integrated out: slice sampling of sum log p(y | f, theta) + log p(theta)

Integrating w out takes the place of the parameter expansion of [JVV11 Sec. 5], whose aim is to weaken the tie between
the noise scale and w: without w there is none (docs/gibbs_sampling.md has both). Where no hyperparameter moves, a sweep
is one Cholesky a chain.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor
from tqdm import tqdm

from gpext.inference import InferenceWarning
from gpext.inference.gibbs import draw_latent, draw_prior
from gpext.likelihoods import AugmentedLikelihood
from gpext.models import LatentGP
from gpext.samplers.chain_state import ChainState
from gpext.samplers.draws import GibbsDraws, SamplingStatus, conclude
from gpext.samplers.slice_sampling import slice_step
from gpext.samplers.storage import Chunks, Store, files_in
from gpext.samplers.target import ModelTarget, Target
from gpext.sites import GaussianSites

_FIRST_WIDTH = 1.0  # of a slice, in unconstrained space; softplus and log make that about a factor e
_WIDTH_RATE = 0.1  # of its adaptation, sweep by sweep of the warm-up
_WIDTHS = 3.0  # a slice this many times the mean move wide finds its place in few evaluations


class GibbsSampler:
    """Exact posterior draws by alternating w and f, many chains at once.

    Args:
        prior: p(f) at the training inputs (..., N); or a :class:`gpext.models.LatentGP`, which brings likelihood and
            targets along, and whose hyperparameters can move.
        likelihood: any likelihood with an augmentation.
        targets: (..., N).
        hyperparameters: of a model, the names of the parameters to move, as in `model.named_parameters()`, with or
            without `raw_`; () for none. By default all that a registered prior depends on and that require gradients.
            One without a prior has a uniform prior, under which the posterior may be improper. The others stay as they
            are.
        jitter: added to the diagonal of the prior covariance; a singular one needs none.
        overrelaxation: rho in [0, 1): the draw of f given w has correlation -rho with the last [Adler 1981]; 0 for
            independent draws. Averages of f gain, with the default a factor 2 to 3 in effective sample size; those of
            f^2 gain where chains mix slowly and lose up to half where w and f are hardly tied
            (docs/gibbs_sampling.md). Where the prior moves, the draw is independent.

    Raises:
        TypeError: the likelihood has no augmentation; or likelihood or targets are missing, or given beside a model.
        ValueError: targets are not finite, outside the support or of the wrong shape; there is no such parameter;
            `overrelaxation` is not in [0, 1).

    Example:
        >>> import torch
        >>> from gpytorch.distributions import MultivariateNormal
        >>> from gpext.likelihoods import BernoulliLogitLikelihood
        >>> prior = MultivariateNormal(torch.zeros(2).double(), torch.eye(2).double())
        >>> sampler = GibbsSampler(prior, BernoulliLogitLikelihood(), torch.tensor([0.0, 1.0]).double())
        >>> draws = sampler.run(50, num_chains=3, warmup=10, generator=torch.Generator().manual_seed(0))
        >>> draws.latent.shape
        torch.Size([3, 50, 2])
    """

    def __init__(
        self,
        prior: MultivariateNormal | LatentGP,
        likelihood: AugmentedLikelihood | None = None,
        targets: Tensor | None = None,
        *,
        hyperparameters: Sequence[str] | None = None,
        jitter: float = 0.0,
        overrelaxation: float = 0.6,
    ) -> None:
        if not 0 <= overrelaxation < 1:
            raise ValueError(f"overrelaxation must be in [0, 1); got {overrelaxation}.")
        self._overrelaxation = overrelaxation
        given = likelihood is not None or targets is not None
        if isinstance(prior, LatentGP):
            if given:
                raise TypeError("a LatentGP brings its likelihood and targets along: expected GibbsSampler(model).")
            self._target: Target = ModelTarget(prior, hyperparameters, jitter)
        else:
            if likelihood is None or targets is None:
                raise TypeError("expected GibbsSampler(prior, likelihood, targets) or GibbsSampler(model).")
            if hyperparameters:
                raise TypeError("only a model's hyperparameters can move: expected GibbsSampler(model).")
            self._target = Target(prior, likelihood, targets, jitter)

    @torch.no_grad()
    def run(
        self,
        num_samples: int,
        num_chains: int = 4,
        warmup: int = 500,
        *,
        thinning: int = 1,
        generator: torch.Generator | None = None,
        resume: GibbsDraws | None = None,
        directory: str | Path | None = None,
        progress: bool = True,
    ) -> GibbsDraws:
        """Return draws of f, and of the hyperparameters that move.

        Every chain begins at a draw of the prior of f and at the model's hyperparameters. Interrupting (Ctrl-C) returns
        what is finished, and so does a disk that is full; both warn.

        Args:
            num_samples: draws to keep of each chain.
            num_chains: chains, run as one batch.
            warmup: sweeps before the first draw; the widths of the slices adapt in them.
            thinning: keep each so many-th sweep.
            generator: for the random numbers, on the device of the targets; otherwise seeded from torch's global one.
            resume: draws to go on from, with their chains and their own generator: the result holds these and the new
                ones, the same as if they had been drawn at once. `num_chains`, `warmup` and `generator` do not apply.
            directory: where to write draws as they come, so that memory does not grow; None to keep them in memory.
                See :meth:`GibbsDraws.load`.
            progress: show a bar on a terminal.

        Raises:
            ValueError: a number is not positive; the directory holds draws of another run.
        """
        _check_positive(num_samples=num_samples, num_chains=num_chains, thinning=thinning)
        if warmup < 0:
            raise ValueError(f"warmup must not be negative; got {warmup}.")
        target = self._target
        if resume is None:
            state, chunks = self._begin(num_chains, warmup, generator), Chunks()
        else:
            state, chunks = resume.state, resume.chunks
        path = None if directory is None else _prepare(Path(directory), chunks)
        generator = torch.Generator(target.targets.device)
        generator.set_state(state.generator_state)
        like = torch.empty(0, dtype=target.dtype, device=target.targets.device)
        store = Store(chunks, state, like, path)
        status, note, started = None, "", time.perf_counter()
        goal = state.num_draws + num_samples
        total = state.warmup_left + num_samples * thinning - state.since_draw
        with tqdm(total=total, desc="Gibbs", disable=None if progress else True, leave=False) as bar:
            try:
                while store.state.num_draws < goal:
                    store.take(self._next(store.state, thinning, generator))
                    bar.update()
                store.flush()
            except KeyboardInterrupt:
                status = SamplingStatus.INTERRUPTED
            except OSError as error:
                status, note = SamplingStatus.NOT_WRITTEN, str(error)
            except BreakdownError as error:
                status, note = SamplingStatus.BREAKDOWN, str(error)
        if status is not None:
            store.flush_to_memory()
        draws = conclude(target, store.chunks, store.state, status, note, time.perf_counter() - started)
        if status is not None:
            warnings.warn(draws.message, InferenceWarning, stacklevel=2)
        return draws

    def load(self, directory: str | Path) -> GibbsDraws:
        """Return the draws that an earlier run, finished or killed, has written to a directory.

        Raises:
            FileNotFoundError: there are none.
        """
        chunks, state = Chunks.found_in(Path(directory))
        return conclude(self._target, chunks, state, None, f"read from {directory}", 0.0)

    def _begin(self, num_chains: int, warmup: int, generator: torch.Generator | None) -> ChainState:
        device = self._target.targets.device
        if generator is None:
            generator = torch.Generator(device).manual_seed(int(torch.randint(2**62, ())))
        raw = self._target.begin(num_chains)
        prior = self._target.prior(raw)
        shape = torch.Size((num_chains, *self._target.latent_shape))
        latent = draw_prior(prior.mean, prior.square_root, shape, generator=generator)
        widths = torch.full_like(raw[0], _FIRST_WIDTH)
        return ChainState(latent, raw, widths, generator.get_state(), warmup, 0, 0)

    def _next(self, state: ChainState, thinning: int, generator: torch.Generator) -> ChainState:
        """Return the state after one more sweep, a draw or not."""
        latent, raw = self._sweep(state, generator)
        widths = state.widths
        if state.warmup_left:
            widths = widths.lerp(_WIDTHS * (raw - state.raw).abs().mean(0), _WIDTH_RATE)
            counts = {"warmup_left": state.warmup_left - 1}
        elif state.since_draw + 1 < thinning:
            counts = {"since_draw": state.since_draw + 1}
        else:
            counts = {"since_draw": 0, "num_draws": state.num_draws + 1}
        return replace(state, latent=latent, raw=raw, widths=widths, generator_state=generator.get_state(), **counts)

    def _sweep(self, state: ChainState, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the latent values (C, ..., N) and hyperparameters (C, P) after one sweep."""
        target, latent, raw = self._target, state.latent, state.raw
        sites = target.sites(latent, raw, generator)
        if isinstance(target, ModelTarget):
            of_chain = [GaussianSites(*pair) for pair in zip(sites.shift, sites.precision, strict=True)]
            raw = _move(target.of_prior, raw, state.widths, target.log_density_given_sites, of_chain, generator)
        prior = target.prior(raw)
        posterior = prior.condition(sites)
        if not bool(posterior.positive_definite.all()):
            raise BreakdownError("the precision of f given w")
        try:
            root = prior.square_root
        except ValueError as error:
            raise BreakdownError(str(error)) from error
        before = draw_prior(prior.mean, root, latent.shape, generator=generator)
        # The prior's move has integrated f out: what f was no longer belongs to the state.
        rho = 0.0 if target.of_prior else self._overrelaxation
        latent = draw_latent(posterior, before, current=latent, overrelaxation=rho, generator=generator)
        if isinstance(target, ModelTarget):
            density = target.log_density_given_latent
            raw = _move(target.of_likelihood, raw, state.widths, density, list(latent), generator)
        return latent, raw


class BreakdownError(ArithmeticError):
    """A sweep came upon a matrix that has no factor."""


def _move(
    coordinates: Sequence[int],
    raw: Tensor,
    widths: Tensor,
    log_density: Callable[[Tensor, int, Any], Tensor],
    given: Sequence[Any],
    generator: torch.Generator,
) -> Tensor:
    """Return hyperparameters (C, P) after a slice in each of some coordinates.

    Args:
        coordinates: which, one after another.
        raw: (C, P).
        widths: of the slices (P,).
        log_density: (raw (P,), coordinate, what is given in a chain) -> log density ().
        given: of each chain.
        generator: for the random numbers.
    """
    for j in coordinates:

        def along(values: Tensor, which: Tensor, j: int = j, raw: Tensor = raw) -> Tensor:
            out = torch.full_like(values, -torch.inf)
            for chain in which.nonzero().flatten().tolist():
                trial = raw[chain].clone()
                trial[j] = values[chain]
                out[chain] = log_density(trial, j, given[chain])
            return out

        moved = slice_step(raw[:, j].clone(), along, float(widths[j]), generator=generator)
        raw = raw.clone()
        raw[:, j] = moved
    return raw


def _check_positive(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}.")


def _prepare(directory: Path, known: Chunks) -> Path:
    """Return the directory, made if need be, empty but for draws that are known."""
    directory.mkdir(parents=True, exist_ok=True)
    foreign = [path for path in files_in(directory) if path not in known.parts]
    if foreign:
        raise ValueError(
            f"{directory} holds draws of another run, such as {foreign[0].name}. Give another directory, or go on from "
            "them with resume=sampler.load(directory)."
        )
    return directory
