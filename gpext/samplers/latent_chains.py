"""Chains over latent values and hyperparameters, as one batch: counted, kept, interrupted, written and gone on with.

What a sweep is, a member says. The state holds all that a sweep goes on from, the generator included, so that a run in
two parts draws what one run would have drawn, bit for bit.
"""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from gpext.distributions import InversionError
from gpext.inference import InferenceWarning
from gpext.inference.gibbs import draw_latent, draw_prior
from gpext.posteriors import DensePrior
from gpext.samplers.chain_state import ChainState
from gpext.samplers.draws import GibbsDraws, SamplingStatus, conclude
from gpext.samplers.storage import Chunks, Store, files_in
from gpext.samplers.target import Target
from gpext.sites import GaussianSites

FIRST_WIDTH = 1.0  # of a slice, in unconstrained space; softplus and log make that about a factor e
_WIDTH_RATE = 0.1  # of its adaptation, sweep by sweep of the warm-up
_WIDTHS = 3.0  # a slice this many times the mean move wide finds its place in few evaluations


class BreakdownError(ArithmeticError):
    """A sweep came upon a matrix that has no factor."""


class LatentChainSampler(ABC):
    """What samplers of latent values share.

    Args:
        target: what they sample.
    """

    name: str

    def __init__(self, target: Target) -> None:
        self._target = target

    @abstractmethod
    def _begin(self, num_chains: int, warmup: int, generator: torch.Generator) -> ChainState:
        """Return the state that new chains start from."""

    @abstractmethod
    def _sweep(self, state: ChainState, generator: torch.Generator) -> ChainState:
        """Return the state after one sweep; what is counted stays as it is.

        Raises:
            BreakdownError: there is no such sweep.
            FloatingPointError: a chain has left where the model can be evaluated.
        """

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

        Interrupting (Ctrl-C) returns what is finished, and so does a disk that is full; both warn.

        Args:
            num_samples: draws to keep of each chain.
            num_chains: chains, run as one batch.
            warmup: sweeps before the first draw; the widths of the slices adapt in them.
            thinning: keep each so many-th sweep.
            generator: for the random numbers, on the device of the targets; otherwise seeded from torch's global one.
            resume: draws to go on from, with their chains and their own generator: the result holds these and the new
                ones, the same as if they had been drawn at once. `num_chains`, `warmup` and `generator` do not apply.
            directory: where to write draws as they come, so that memory does not grow; None to keep them in memory.
                See :meth:`load`.
            progress: show a bar on a terminal.

        Raises:
            ValueError: a number is not positive; the directory holds draws of another run; phi cannot be inverted for
                a draw of w before there is one to keep.
        """
        _check_positive(num_samples=num_samples, num_chains=num_chains, thinning=thinning)
        if warmup < 0:
            raise ValueError(f"warmup must not be negative; got {warmup}.")
        target = self._target
        if resume is None:
            state, chunks = self._begin(num_chains, warmup, self._seeded(generator)), Chunks()
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
        with tqdm(total=total, desc=self.name, disable=None if progress else True, leave=False) as bar:
            try:
                while store.state.num_draws < goal:
                    store.take(self._next(store.state, thinning, generator))
                    bar.update()
                store.flush()
            except KeyboardInterrupt:
                status = SamplingStatus.INTERRUPTED
            except OSError as error:
                status, note = SamplingStatus.NOT_WRITTEN, str(error)
            except InversionError as error:
                if store.state.num_draws == 0:
                    raise
                status, note = SamplingStatus.NOT_INVERTED, str(error)
            except BreakdownError as error:
                status, note = SamplingStatus.BREAKDOWN, str(error)
            except FloatingPointError as error:
                status, note = SamplingStatus.DIVERGED, str(error)
        if status is not None:
            store.flush_to_memory()
        draws = conclude(self.name, target, store.chunks, store.state, status, note, time.perf_counter() - started)
        if status is not None:
            warnings.warn(draws.message, InferenceWarning, stacklevel=2)
        return draws

    def load(self, directory: str | Path) -> GibbsDraws:
        """Return the draws that an earlier run, finished or killed, has written to a directory.

        Raises:
            FileNotFoundError: there are none.
        """
        chunks, state = Chunks.found_in(Path(directory))
        return conclude(self.name, self._target, chunks, state, None, f"read from {directory}", 0.0)

    def _seeded(self, generator: torch.Generator | None) -> torch.Generator:
        if generator is not None:
            return generator
        return torch.Generator(self._target.targets.device).manual_seed(int(torch.randint(2**62, ())))

    def _next(self, state: ChainState, thinning: int, generator: torch.Generator) -> ChainState:
        """Return the state after one more sweep, a draw or not."""
        after = self._sweep(state, generator)
        if state.warmup_left:
            widths = state.widths.lerp(_WIDTHS * (after.raw - state.raw).abs().mean(0), _WIDTH_RATE)
            after = replace(after, widths=widths, warmup_left=state.warmup_left - 1)
        elif state.since_draw + 1 < thinning:
            after = replace(after, since_draw=state.since_draw + 1)
        else:
            after = replace(after, since_draw=0, num_draws=state.num_draws + 1)
        return replace(after, generator_state=generator.get_state())


def draw_given_sites(
    prior: DensePrior,
    sites: GaussianSites,
    shape: torch.Size,
    *,
    current: Tensor | None = None,
    overrelaxation: float = 0.0,
    generator: torch.Generator,
) -> Tensor:
    """Return latent values of a given shape (C, ..., N) drawn from the prior conditioned on the sites of C chains.

    Args:
        prior: of each chain, or one for all.
        sites: (C, ..., N).
        shape: of the draws.
        current: see :func:`gpext.inference.gibbs.draw_latent`, as for `overrelaxation`.
        overrelaxation: rho.
        generator: for the random numbers.

    Raises:
        BreakdownError: a matrix has no factor.
    """
    posterior = prior.condition(sites)
    if not bool(posterior.positive_definite.all()):
        raise BreakdownError("the precision of f given w")
    try:
        root = prior.square_root
    except ValueError as error:
        raise BreakdownError(str(error)) from error
    before = draw_prior(prior.mean, root, shape, generator=generator)
    return draw_latent(posterior, before, current=current, overrelaxation=overrelaxation, generator=generator)


def sites_of(sites: GaussianSites, chain: int) -> GaussianSites:
    """Return the sites (..., N) of one of C chains (C, ..., N)."""
    return GaussianSites(sites.shift[chain], sites.precision[chain])


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
