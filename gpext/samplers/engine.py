"""The engine of all samplers: chains that are counted, kept, interrupted, written and resumed.

A sampler is a density (:mod:`gpext.samplers.targets`), `init`, which returns the states that chains start from, and
`step`, which returns the state after the current one. A state holds everything that a step depends on, its generator
included, so that a run in two parts draws what one run would have drawn, bit for bit. Chains that a step moves together
are one state: all of a process for Gibbs sampling, each its own for the samplers of hyperparameters alone.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch

from gpext.callers import warn_caller
from gpext.checks import whole_number
from gpext.distributions import InversionError
from gpext.inference import InferenceWarning
from gpext.parallel import Ranks, check_ranks
from gpext.samplers.chain_ranks import ChainRanks
from gpext.samplers.draw_files import require_only
from gpext.samplers.draws import Draws, Outcome, conclude
from gpext.samplers.state import ChainState, as_stored, check_origin
from gpext.samplers.status import SamplingStatus
from gpext.samplers.storage import Chunks, Store
from gpext.samplers.targets.chain_target import ChainTarget
from gpext.schema import Anything, GeneratorState, Number, Numbers, Record
from gpext.threads import threads_for

Result = TypeVar("Result", bound=Draws)


@dataclass(frozen=True)
class Start:
    """The argument of :meth:`Sampler.init`: the chains to start, and their random numbers.

    Attributes:
        num_chains: of all processes.
        warmup: steps before the first draw.
        chains: the numbers of the chains of each state that this process is to make.
        generators: one for each of these states, on the device of the target.
        shared: on the CPU, in the same state in all processes, for what all chains have in common.
    """

    num_chains: int
    warmup: int
    chains: Sequence[Sequence[int]]
    generators: Sequence[torch.Generator]
    shared: torch.Generator


Init = Callable[[Start], Sequence[ChainState]]


@dataclass(frozen=True)
class Plan:
    """The arguments of :meth:`Sampler.run`, checked.

    Raises:
        TypeError: a number that is not whole, or something else than a generator, draws or ranks.
        ValueError: a number is not positive.
    """

    num_samples: int
    num_chains: int
    warmup: int
    thinning: int
    generator: torch.Generator | None
    resume: Draws | None
    checkpoint: str | Path | None
    progress: bool
    ranks: Ranks | None

    def __post_init__(self) -> None:
        for name in ("num_samples", "num_chains", "warmup", "thinning"):
            whole_number(name, getattr(self, name), 0 if name == "warmup" else 1)
        if not isinstance(self.generator, torch.Generator | None):
            raise TypeError(
                f"expected a torch.Generator; got {self.generator!r}. torch.Generator().manual_seed(n) has a seed."
            )
        if not isinstance(self.resume, Draws | None):
            raise TypeError(f"resume must be the result of an earlier run; got {type(self.resume).__name__}.")
        check_ranks(self.ranks)

    @classmethod
    def of(
        cls,
        num_samples: int,
        num_chains: int,
        warmup: int,
        thinning: int,
        generator: torch.Generator | None,
        resume: Draws | None,
        checkpoint: str | Path | None,
        directory: str | Path | None,
        progress: bool,
        ranks: Ranks | None,
    ) -> Plan:
        """Return the plan of the arguments of :meth:`Sampler.run`."""
        if directory is not None:
            if checkpoint is not None:
                raise TypeError("expected a checkpoint; got a directory, too, which is its older name.")
            checkpoint = directory
        return cls(num_samples, num_chains, warmup, thinning, generator, resume, checkpoint, progress, ranks)

    @property
    def options(self) -> list[str]:
        """The options that have to be the same on all ranks, in words."""
        names = ("num_samples", "num_chains", "warmup", "thinning")
        given = [name for name in ("resume", "checkpoint") if getattr(self, name) is not None]
        return [*(f"{name}={getattr(self, name)}" for name in names), f"{given=}"]


class Sampler(ABC, Generic[Result]):
    """The base of all samplers."""

    name: ClassVar[str]
    together: ClassVar[bool]  # whether a step moves all chains of a process at once
    result: type[Result]
    target: ChainTarget

    @abstractmethod
    def init(self, start: Start) -> Sequence[ChainState]:
        """Return the states that new chains start from."""

    @abstractmethod
    def step(self, state: ChainState, generator: torch.Generator) -> ChainState:
        """Return the state after one step: its values and its kernel; the engine does the rest.

        Raises:
            gpext.samplers.chain_ranks.BreakdownError: there is no such step.
            FloatingPointError: a chain has left where the model can be evaluated.
        """

    @abstractmethod
    def restored_kernel(self, stored: object, num_chains: int, where: str) -> Any:
        """Return the kernel of a state that was stored.

        Raises:
            ValueError: it is something else; the entry is named.
        """

    def acceptance(self, state: ChainState) -> float:
        """Return the share of proposals accepted after the warm-up; nan where nothing is rejected."""
        return float("nan")

    def run(
        self,
        num_samples: int,
        num_chains: int = 4,
        warmup: int = 500,
        *,
        thinning: int = 1,
        generator: torch.Generator | None = None,
        resume: Result | None = None,
        checkpoint: str | Path | None = None,
        directory: str | Path | None = None,
        progress: bool = True,
        ranks: Ranks | None = None,
    ) -> Result:
        """Return draws.

        Interrupting (Ctrl-C) returns what is finished, and so do a disk that is full and a chain that diverges; all
        warn.

        Args:
            num_samples: draws to keep of each chain, beside those of `resume`.
            num_chains: independent chains.
            warmup: steps before the first draw, in which the sampler adapts.
            thinning: keep each so many-th.
            generator: for all random numbers, on any device; by default seeded from torch's global one.
            resume: draws to resume from, with their chains and their own generators: the result holds these and the new
                ones, the same as if they had been drawn at once. Options other than `thinning` do not apply.
            checkpoint: a directory to write draws and chains to as they come, those of `resume` included, so that
                memory does not grow; None to keep them in memory. It is written to after ten seconds or a thousand
                draws of each chain, whichever comes first, but not before the time of twenty writes has passed: a
                process that is killed loses no more. See :meth:`load`. Rank 0 writes, and all have to see it.
            directory: an older name of `checkpoint`.
            progress: show a bar on a terminal, or lines in the log "gpext".
            ranks: processes among which the chains are shared out, as evenly as they can be, and which all get the
                draws of all; this one alone by default. Where a step moves one chain they are the draws that one
                process would have got. Else each process has a generator of its own, and draws of P processes are gone
                on with by P or fewer. Ctrl-C on any ends the run on all.

        Raises:
            TypeError: a number that is not whole, or something else than a generator, draws or ranks.
            ValueError: a number is not positive; draws of something else; the directory holds draws of another run;
                more ranks than chains; `ranks` and products that are shared out; phi cannot be inverted for a draw of w
                before there is one to keep; the log posterior is not finite at the model's own hyperparameters.
            gpext.parallel.RankError: a rank cannot be reached; what was written stays.
        """
        plan = Plan.of(
            num_samples, num_chains, warmup, thinning, generator, resume, checkpoint, directory, progress, ranks
        )
        return self._run(plan, self.init)

    def load(self, checkpoint: str | Path) -> Result:
        """Return the draws of a checkpoint of a finished or killed run; `run(..., resume=)` continues it.

        Raises:
            FileNotFoundError: there are none.
            ValueError: a file is missing, damaged or belongs elsewhere; or the draws are of another sampler, other
                hyperparameters or data.
        """
        target = self.target
        chunks, states = Chunks.found_in(
            Path(checkpoint),
            self._restored,
            Numbers((None, None, *target.latent_shape), target.dtype),
            Numbers((None, None, target.size), torch.float64),
        )
        return self._concluded(Outcome(chunks, states, None, f"read from {checkpoint}", 0.0))

    @torch.inference_mode(False)
    @torch.no_grad()
    def _run(self, plan: Plan, init: Init, *options: str) -> Result:
        """Return draws.

        Args:
            plan: what was asked for.
            init: returns the states that new chains start from.
            options: what else has to be the same on all ranks, in words.
        """
        started, target = time.perf_counter(), self.target
        members = ChainRanks.of(plan.ranks, target.model)
        everyone, origin = members.everyone, self._origin()
        everyone.require_same("sampler", self.name, *origin["hyperparameters"], str(target.dtype))
        everyone.require_same("model", *origin["model"], f"f {tuple(target.latent_shape)}")
        everyone.require_same("options", *plan.options, *options)
        everyone.require_alike([*target.data, *target.fixed])
        states, chunks = everyone.together(lambda: self._opened(plan, init, members))
        path = None if plan.checkpoint is None else _prepared(Path(plan.checkpoint), chunks, members)
        generators = [torch.Generator(target.device) for _ in states]
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state.generator_state)
        like = torch.empty(0, dtype=target.dtype, device=target.device)
        store = Store(chunks, tuple(state.on(like.device) for state in states), like, path, members)
        goal = store.num_draws + plan.num_samples
        flops = target.flops * max(state.num_chains for state in states)

        def stepped() -> tuple[ChainState, ...]:
            pairs = zip(store.states, generators, strict=True)
            with threads_for(flops):
                return tuple(self._next(state, plan.thinning, each) for state, each in pairs)

        def steps() -> Iterator[None]:
            store.open()
            while store.num_draws < goal:
                store.take(everyone.together(stepped))
                store.flush_if_due()
                yield
            store.flush()

        total = states[0].warmup_left + plan.num_samples * plan.thinning - states[0].since_draw
        status, note = members.drive(steps(), total, name=self.name, progress=plan.progress)
        if status is SamplingStatus.NOT_INVERTED and store.num_draws == 0:
            raise InversionError(note)
        if status not in (None, SamplingStatus.NOT_WRITTEN):  # what is finished is written as well
            try:
                store.flush()
            except OSError as error:
                status, note = SamplingStatus.NOT_WRITTEN, str(error)
        if status is SamplingStatus.NOT_WRITTEN:
            store.flush_to_memory()
        seconds = time.perf_counter() - started
        self.target.jitter = max(members.spread.gather(self.target.jitter))
        draws = self._concluded(Outcome(store.chunks, store.everyones_states(), status, note, seconds))
        if status is not None:
            warn_caller(draws.message, InferenceWarning)
        return draws

    def _opened(self, plan: Plan, init: Init, members: ChainRanks) -> tuple[list[ChainState], Chunks]:
        """Return the states of this rank's chains, new or resumed, and the draws so far."""
        spread = members.spread
        if plan.resume is not None:
            known = [
                self._restored(as_stored(each), f"resume.states[{i}]") for i, each in enumerate(plan.resume.states)
            ]
            members.check(len(known), "batches of them in the draws to resume from" if self.together else "chains")
            return spread.own(known), plan.resume.chunks
        members.check(plan.num_chains, "chains")
        numbers = range(plan.num_chains)
        batches = [numbers[r :: spread.size] for r in range(spread.size)] if self.together else [[i] for i in numbers]
        shared, generators = _generators(plan.generator, len(batches), self.target.device, members)
        start = Start(plan.num_chains, plan.warmup, spread.own(batches), spread.own(generators), shared)
        with threads_for(self.target.flops * len(start.chains[0])):
            made = zip(init(start), start.generators, strict=True)
            origin = self._origin()
            states = [
                replace(state, generator_state=each.get_state(), warmup_left=plan.warmup, origin=origin)
                for state, each in made
            ]
        return states, Chunks()

    def _next(self, state: ChainState, thinning: int, generator: torch.Generator) -> ChainState:
        """Return the state after one more step, a draw or not."""
        after = self.step(state, generator)
        if state.warmup_left:
            counts: dict[str, Any] = {"warmup_left": state.warmup_left - 1}
        elif state.since_draw + 1 < thinning:
            counts = {"since_draw": state.since_draw + 1}
        else:
            counts = {"since_draw": 0, "num_draws": state.num_draws + 1}
        return replace(after, generator_state=generator.get_state(), **counts)

    def _restored(self, stored: object, where: str) -> ChainState:
        """Return the state of chains that was stored, once it has been checked that chains here can resume from it.

        Raises:
            ValueError: it is something else; the entry is named.
        """
        if not isinstance(stored, dict) or not isinstance(stored.get("origin"), dict):
            raise ValueError(f"{where} must be a dictionary with an entry 'origin', itself one; got {stored!r:.60}.")
        check_origin(stored["origin"], self._origin())
        target, count = self.target, Number(whole=True, least=0)
        entries = {
            "raw": Numbers((None, target.size), torch.float64),
            "latent": Numbers((None, *target.latent_shape), torch.float64),
            "kernel": Anything(),
            "generator_state": GeneratorState(target.device),
            "warmup_left": count,
            "since_draw": count,
            "num_draws": count,
            "origin": Anything(),
        }
        Record(entries).check(stored, where)
        num_chains = len(stored["raw"]) if self.together else 1
        Numbers((num_chains, target.size), torch.float64).check(stored["raw"], f"{where}['raw']")
        Numbers((num_chains, *target.latent_shape), torch.float64).check(stored["latent"], f"{where}['latent']")
        kernel = self.restored_kernel(stored["kernel"], num_chains, f"{where}['kernel']")
        return ChainState(**{**stored, "kernel": kernel})

    def _origin(self) -> dict[str, Any]:
        """Return what draws are of."""
        return {"sampler": self.name, **self.target.origin}

    def _concluded(self, outcome: Outcome) -> Result:
        acceptance = [self.acceptance(state) for state in outcome.states for _ in range(state.num_chains)]
        known = torch.tensor(acceptance, dtype=torch.float64, device="cpu")
        return conclude(self.result, self.name, self.target, outcome, known)


def _generators(
    generator: torch.Generator | None, number: int, device: torch.device, members: ChainRanks
) -> tuple[torch.Generator, list[torch.Generator]]:
    """Return a generator on the CPU that is the same on all ranks, and so many on a device."""
    if generator is None:
        generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    generator = members.agree_on(generator)
    seeds = torch.randint(2**62, (number + 1,), generator=generator, device=generator.device).tolist()
    return torch.Generator().manual_seed(seeds[0]), [torch.Generator(device).manual_seed(seed) for seed in seeds[1:]]


def _prepared(directory: Path, known: Chunks, members: ChainRanks) -> Path:
    """Return the directory, made if need be, empty but for draws that are known."""
    members.everyone.on_first(lambda: directory.mkdir(parents=True, exist_ok=True))

    def checked() -> None:
        if not directory.is_dir():
            raise ValueError(f"expected a directory that all ranks see; {directory}, made by rank 0, is none here.")
        require_only(directory, known.stored_in(directory))

    members.everyone.together(checked)
    return directory
