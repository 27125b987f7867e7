"""Chains over latent values and hyperparameters, in batches: counted, kept, interrupted, written and gone on with.

What a sweep is, a member says. The state holds all that a sweep goes on from, the generator included, so that a run in
two parts draws what one run would have drawn, bit for bit. One process runs all chains as one batch; of several each
runs a batch of its own, with a generator of its own, and nothing that one draws depends on another.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpext.callers import warn_caller
from gpext.distributions import InversionError
from gpext.inference import InferenceWarning
from gpext.inference.gibbs import draw_latent, draw_prior
from gpext.parallel import Ranks
from gpext.posteriors import DensePrior
from gpext.samplers.chain_ranks import BreakdownError, Crew, check_run
from gpext.samplers.draw_files import require_only
from gpext.samplers.draws import GibbsDraws, conclude
from gpext.samplers.state import ChainState, as_stored, restored
from gpext.samplers.status import SamplingStatus
from gpext.samplers.storage import Chunks, Store
from gpext.samplers.targets.latent_posterior import Target
from gpext.schema import Anything, Each, GeneratorState, Number, Numbers
from gpext.sites import GaussianSites
from gpext.threads import factor_flops, threads_for

FIRST_WIDTH = 1.0  # of a slice, in unconstrained space; softplus and log make that about a factor e
_WIDTH_RATE = 0.1  # of its adaptation, sweep by sweep of the warm-up
_WIDTHS = 3.0  # a slice this many times the mean move wide finds its place in few evaluations


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

    def _walkers_schema(self, num_chains: int) -> Each:
        """Return the schema of what a state has of each of its chains beside their values."""
        return Each(Anything(), 0)

    @torch.inference_mode(False)
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
        ranks: Ranks | None = None,
    ) -> GibbsDraws:
        """Return draws of f, and of the hyperparameters that move.

        Interrupting (Ctrl-C) returns what is finished, and so does a disk that is full; both warn.

        Args:
            num_samples: draws to keep of each chain.
            num_chains: chains, run as one batch, or as one batch a rank.
            warmup: sweeps before the first draw; the widths of the slices adapt in them.
            thinning: keep each so many-th sweep.
            generator: for the random numbers, on the device of the targets; otherwise seeded from torch's global one.
            resume: draws to go on from, with their chains and their own generator: the result holds these and the new
                ones, the same as if they had been drawn at once. `num_chains`, `warmup` and `generator` do not apply.
            directory: where to write draws as they come, those of `resume` included, so that memory does not grow; None
                to keep them in memory. It is written to after ten seconds or a thousand draws of each chain, whichever
                comes first, but not before the time of twenty writes has passed: a process that is killed loses no
                more. See :meth:`load`. Rank 0 writes, and all have to see it.
            progress: show a bar on a terminal, or lines in the log "gpext".
            ranks: processes among which the chains are shared out, as evenly as they can be, and which all get the
                draws of all; this one alone by default. Rank r draws what it would draw alone: its generator is seeded
                with the r-th of as many numbers below 2^62 as there are ranks, drawn from `generator`, that of rank 0.
                Draws of P ranks are gone on with by P or fewer.

        Raises:
            TypeError: a number that is not whole, or something else than a generator, draws or ranks.
            ValueError: a number is not positive; draws of something else; the directory holds draws of another run;
                more ranks than chains; `ranks` and products that are shared out; phi cannot be inverted for a draw of w
                before there is one to keep.
            gpext.parallel.RankError: a rank cannot be reached; what was written stays.
        """
        check_run(
            num_samples=num_samples,
            num_chains=num_chains,
            warmup=warmup,
            thinning=thinning,
            generator=generator,
            ranks=ranks,
        )
        if not isinstance(resume, GibbsDraws | None):
            raise TypeError(f"resume must be the result of an earlier run; got {type(resume).__name__}.")
        target, started = self._target, time.perf_counter()
        crew = Crew.of(ranks, target.model)

        def opened() -> tuple[list[ChainState], Chunks]:
            if resume is not None:
                known = [
                    self._restored(as_stored(state), f"resume.states[{i}]") for i, state in enumerate(resume.states)
                ]
                crew.check(len(known), "batches of them in the draws to go on from")
                return crew.spread.own(known), resume.chunks
            crew.check(num_chains, "chains")
            own = len(crew.spread.own(range(num_chains)))
            with threads_for(self._flops(own)):
                return [replace(self._begin(own, warmup, self._own(generator, crew)), origin=origin)], Chunks()

        origin = self._origin()
        given = [name for name, each in (("resume", resume), ("directory", directory)) if each is not None]
        options = f"{num_samples=}", f"{num_chains=}", f"{warmup=}", f"{thinning=}", f"{given=}"
        crew.everyone.require_same("sampler", self.name, *origin["hyperparameters"], str(target.dtype))
        crew.everyone.require_same("model", *origin["model"], f"f {tuple(target.latent_shape)}")
        crew.everyone.require_same("options", *options)
        crew.everyone.require_alike([*target.data, *target.fixed])
        states, chunks = crew.everyone.together(opened)
        path = None if directory is None else _prepare(Path(directory), chunks, crew)
        generators = [torch.Generator(target.targets.device) for _ in states]
        for each, state in zip(generators, states, strict=True):
            each.set_state(state.generator_state)
        like = torch.empty(0, dtype=target.dtype, device=target.targets.device)
        flops = max(self._flops(len(state.latent)) for state in states)
        store = Store(chunks, tuple(state.on(like.device) for state in states), like, path, crew)
        goal = store.num_draws + num_samples

        def swept() -> tuple[ChainState, ...]:
            pairs = zip(store.states, generators, strict=True)
            with threads_for(flops):
                return tuple(self._next(state, thinning, each) for state, each in pairs)

        def sweeps() -> Iterator[None]:
            store.open()
            while store.num_draws < goal:
                store.take(crew.everyone.together(swept))
                store.flush_if_due()
                yield
            store.flush()

        total = states[0].warmup_left + num_samples * thinning - states[0].since_draw
        status, note = crew.drive(sweeps(), total, name=self.name, progress=progress)
        if status is SamplingStatus.NOT_INVERTED and store.num_draws == 0:
            raise InversionError(note)
        if status is not None:
            store.flush_to_memory()
        seconds = time.perf_counter() - started
        draws = conclude(self.name, target, store.chunks, store.everyones_states(), status, note, seconds)
        if status is not None:
            warn_caller(draws.message, InferenceWarning)
        return draws

    def load(self, directory: str | Path) -> GibbsDraws:
        """Return the draws that an earlier run, finished or killed, has written to a directory.

        Raises:
            FileNotFoundError: there are none.
            ValueError: a file is missing, damaged or belongs elsewhere; or the draws are of another sampler, other
                hyperparameters or data.
        """
        target, shape = self._target, tuple(self._target.latent_shape)
        size = target.begin(1).size(-1)
        chunks, states = Chunks.found_in(
            Path(directory),
            self._restored,
            Numbers((None, None, *shape), target.dtype),
            Numbers((None, None, size), torch.float64),
        )
        return conclude(self.name, self._target, chunks, states, None, f"read from {directory}", 0.0)

    def _restored(self, stored: object, where: str) -> ChainState:
        """Return the state of chains that was stored.

        Raises:
            ValueError: it is something else.
        """
        target, count = self._target, Number(whole=True, least=0)
        size = target.begin(1).size(-1)
        entries = {
            "latent": Numbers((None, *target.latent_shape), torch.float64),
            "raw": Numbers((None, size), torch.float64),
            "widths": Numbers((size,), torch.float64),
            "generator_state": GeneratorState(target.targets.device),
            "warmup_left": count,
            "since_draw": count,
            "num_draws": count,
            "walkers": Anything(),
        }
        state = restored(ChainState, stored, self._origin(), entries, where)
        num_chains = len(state.latent)
        Numbers((num_chains, size), torch.float64).check(state.raw, f"{where}['raw']")
        self._walkers_schema(num_chains).check(state.walkers, f"{where}['walkers']")
        return state

    def _origin(self) -> dict[str, Any]:
        """Return what draws are of."""
        return {"sampler": self.name, **self._target.origin}

    def _flops(self, num_chains: int) -> float:
        """Return those of the factors that a sweep of so many chains needs."""
        shape = self._target.latent_shape
        return factor_flops(shape[-1], number=num_chains * shape[:-1].numel())

    def _own(self, generator: torch.Generator | None, crew: Crew) -> torch.Generator:
        """Return this rank's generator."""
        device = self._target.targets.device
        if generator is None:
            generator = torch.Generator(device).manual_seed(int(torch.randint(2**62, ())))
        generator = crew.agree_on(generator)
        if crew.spread.size == 1:
            return generator
        seeds = torch.randint(2**62, (crew.spread.size,), generator=generator, device=device).tolist()
        return torch.Generator(device).manual_seed(seeds[crew.spread.rank])

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


def _prepare(directory: Path, known: Chunks, crew: Crew) -> Path:
    """Return the directory, made if need be, empty but for draws that are known."""
    crew.everyone.on_first(lambda: directory.mkdir(parents=True, exist_ok=True))

    def checked() -> None:
        if not directory.is_dir():
            raise ValueError(f"expected a directory that all ranks see; {directory}, made by rank 0, is none here.")
        require_only(directory, known.stored_in(directory))

    crew.everyone.together(checked)
    return directory
