"""Chains over hyperparameters, all in step with each other: counted, kept, interrupted, written and gone on with.

What a step is, a walker says. It has a generator of its own and a state that holds all it goes on from, so that a run
in two parts draws what one run would have drawn, bit for bit.
"""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from gpext.callers import warn_caller
from gpext.files import Pace, load, save
from gpext.inference import InferenceWarning
from gpext.parallel import Ranks, described, mark
from gpext.samplers.chain_ranks import Crew, check_run
from gpext.samplers.draws import WELL_MIXED, split_r_hat
from gpext.samplers.hyperposterior import HyperPosterior
from gpext.samplers.state import WalkState, as_stored, restored
from gpext.samplers.status import SamplingStatus
from gpext.samplers.targets.log_posterior import LogPosterior
from gpext.schema import Each, Number, Numbers, Schema
from gpext.threads import factor_flops, threads_for

_FILE = "chains.pt"
_KEYS = ("raw", "state")


class Walker(Protocol):
    """One chain."""

    @property
    def place(self) -> Tensor:
        """Where it is (P,), in the coordinates of the target."""

    @property
    def acceptance(self) -> float:
        """The share of proposals accepted after the warm-up; nan where nothing is rejected."""

    def step(self, *, adapt: bool) -> None:
        """Go on by one.

        Raises:
            FloatingPointError: there is no such model.
        """

    def state(self) -> dict[str, Any]:
        """Return what it goes on from: numbers and tensors that later steps leave alone."""


@dataclass(frozen=True)
class Plan:
    """What a run was asked for; see :meth:`gpext.samplers.SGLDSampler.run`.

    Raises:
        TypeError: a number that is not whole, or something else than a generator, draws or ranks.
        ValueError: a number is not positive.
    """

    num_samples: int
    num_chains: int
    warmup: int
    thinning: int
    generator: torch.Generator | None
    resume: HyperPosterior | None
    checkpoint: str | Path | None
    progress: bool
    ranks: Ranks | None

    def __post_init__(self) -> None:
        check_run(
            num_samples=self.num_samples,
            num_chains=self.num_chains,
            warmup=self.warmup,
            thinning=self.thinning,
            generator=self.generator,
            ranks=self.ranks,
        )
        if not isinstance(self.resume, HyperPosterior | None):
            raise TypeError(f"resume must be the result of an earlier run; got {type(self.resume).__name__}.")

    @property
    def options(self) -> list[str]:
        """What has to be the same on all ranks, in words."""
        names = ("num_samples", "num_chains", "warmup", "thinning")
        given = [name for name in ("resume", "checkpoint") if getattr(self, name) is not None]
        return [*(f"{name}={getattr(self, name)}" for name in names), f"{given=}"]


class ChainSampler(ABC):
    """What samplers of hyperparameters share.

    Args:
        mll: see the members.
        hyperparameters: which parameters to draw; by default all that require gradients. The others stay.
        logarithms: of the target.

    Raises:
        TypeError, ValueError: as :class:`gpext.samplers.LogPosterior`.
    """

    name: str

    def __init__(
        self,
        mll: ExactMarginalLogLikelihood,
        hyperparameters: Sequence[str] | None = None,
        *,
        logarithms: bool = False,
    ) -> None:
        self.target = LogPosterior(mll, hyperparameters, logarithms=logarithms)

    @abstractmethod
    def _walker(self, state: dict[str, Any]) -> Walker:
        """Return the walker of a state."""

    @abstractmethod
    def _walker_schema(self) -> Schema:
        """Return the schema of the state of a walker."""

    def load(self, checkpoint: str | Path) -> HyperPosterior:
        """Return the draws of a checkpoint, of a run that may have been killed; `run(..., resume=)` goes on from them.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is damaged, or of another sampler, other hyperparameters or data.
        """
        path = Path(checkpoint) / _FILE
        if not path.exists():
            raise FileNotFoundError(f"expected a checkpoint of a sampler in {checkpoint}; found none.")
        content, _ = load(path, _KEYS)
        return self._conclude(*self._restored(content, str(path)), None, f"read from {path}", 0.0)

    def _restored(self, content: dict[str, Any], where: str) -> tuple[Tensor, WalkState]:
        """Return the draws (C, S, P) and the state of the chains that were stored.

        Raises:
            ValueError: they are something else, or of another sampler, other hyperparameters or data.
        """
        count = Number(whole=True, least=0)
        entries = {
            "walkers": Each(self._walker_schema()),
            "warmup_left": count,
            "since_draw": count,
            "num_draws": count,
        }
        state = restored(WalkState, content["state"], self._origin(), entries, f"{where}['state']")
        shape = (len(state.walkers), state.num_draws, self.target.moved.size)
        Numbers(shape, torch.float64).check(content["raw"], f"{where}['raw']")
        return content["raw"], state

    def _run(
        self,
        plan: Plan,
        begin: Callable[[torch.Generator, list[Tensor]], list[dict[str, Any]]],
        *options: str,
    ) -> HyperPosterior:
        """Return draws.

        Args:
            plan: what was asked for.
            begin: (generator, states of one for each chain) -> the states that new chains start from.
            options: what else has to be the same on all ranks, in words.
        """
        started = time.perf_counter()
        crew = Crew.of(plan.ranks, self.target.model)
        everyone, spread, resume = crew.everyone, crew.spread, plan.resume
        origin = self._origin()
        flops = factor_flops(self.target.num_data)

        def opened() -> tuple[Path | None, WalkState]:
            path = None if plan.checkpoint is None else _prepare(Path(plan.checkpoint), resume)
            if resume is None:
                crew.check(plan.num_chains, "chains")
                generator = torch.Generator().manual_seed(0) if plan.generator is None else plan.generator
                offspring = _offspring(plan.num_chains, crew.agree_on(generator))
                with threads_for(flops):
                    return path, WalkState(tuple(begin(*offspring)), plan.warmup, 0, 0, origin)
            _, known = self._restored({"raw": resume.raw, "state": as_stored(resume.state)}, "resume")
            crew.check(len(known.walkers), "chains")
            return path, known

        everyone.require_same("sampler", origin["sampler"], *origin["hyperparameters"])
        everyone.require_same("model", *origin["model"])
        everyone.require_same("options", *plan.options, *options)
        everyone.require_alike([*self.target.data, *self.target.fixed])
        path, state = everyone.together(opened)
        earlier = torch.zeros(len(state.walkers), 0, self.target.moved.size, dtype=torch.float64, device="cpu")
        earlier = (earlier if resume is None else resume.raw)[spread.rank :: spread.size]
        state = dataclasses.replace(state, walkers=tuple(spread.own(state.walkers)))  # those of this rank
        walkers = [self._walker(each) for each in state.walkers]
        places: list[Tensor] = []  # of new draws (C, P); an interrupt may leave one too many
        goal, pace, saved = state.num_draws + plan.num_samples, Pace(), state.num_draws

        def whole() -> tuple[Tensor, WalkState]:
            """Return the draws (C, S, P) and the state of the chains of all ranks."""
            new = torch.stack(places, 1) if places else earlier[:, :0]
            own = torch.cat([earlier, new], 1)[:, : state.num_draws]
            draws, states = zip(*spread.everyones(list(zip(own, state.walkers, strict=True))), strict=True)
            return torch.stack(draws), dataclasses.replace(state, walkers=states)

        def move() -> None:
            with threads_for(flops):
                for walker in walkers:
                    walker.step(adapt=state.warmup_left > 0)

        def steps() -> Iterator[None]:
            nonlocal state, saved
            while state.num_draws < goal:
                everyone.together(move)
                following = _after(state, walkers, plan.thinning)
                if following.num_draws > state.num_draws:
                    places.append(torch.stack([walker.place for walker in walkers]))
                state = following
                yield
                if path is not None and everyone.any(pace.is_due(state.num_draws - saved)):
                    with pace.writing():
                        self._write(path, *whole(), everyone)
                    saved = state.num_draws

        total = state.warmup_left + plan.num_samples * plan.thinning - state.since_draw
        status, note = crew.drive(steps(), total, name=self.name, progress=plan.progress)
        raw, at_the_end = whole()
        if path is not None and status is not SamplingStatus.NOT_WRITTEN:
            try:
                self._write(path, raw, at_the_end, everyone)
            except OSError as error:
                status, note = SamplingStatus.NOT_WRITTEN, str(error)
        found = self._conclude(raw, at_the_end, status, note, time.perf_counter() - started)
        if status is not None:
            warn_caller(found.message, InferenceWarning)
        return found

    def _conclude(
        self, raw: Tensor, state: WalkState, status: SamplingStatus | None, note: str, seconds: float
    ) -> HyperPosterior:
        """Return the draws of a run that ended with a status, or, with None, because it was done."""
        r_hat = split_r_hat(raw)
        if status is None:
            status = SamplingStatus.MIXED if r_hat < WELL_MIXED else SamplingStatus.NOT_MIXED
        acceptance = torch.tensor(
            [self._walker(each).acceptance for each in state.walkers], dtype=torch.float64, device="cpu"
        )
        accepted = "" if bool(acceptance.isnan().all()) else f"acceptance {acceptance.nanmean().item():.2f}, "
        message = (
            f"{self.name}, {raw.size(0)} chains of {raw.size(1)} draws in {seconds:.1f} s, {accepted}largest split "
            f"R-hat {r_hat:.4f}: {status.value}" + (f" ({note})" if note else "") + "."
        )
        return HyperPosterior(self.target, raw, state, status, message, seconds, r_hat, acceptance)

    def _write(self, path: Path, raw: Tensor, state: WalkState, everyone: Ranks) -> None:
        content = {"raw": raw, "state": as_stored(state)}
        everyone.on_first(lambda: save(content, path))

    def _origin(self) -> dict[str, Any]:
        """Return what draws are of."""
        names = [slot.coordinate for slot in self.target.moved.slots]
        return {
            "sampler": self.name,
            "hyperparameters": names,
            "model": described(self.target.model),
            "data with the mark": mark(self.target.data),
        }


def _offspring(number: int, generator: torch.Generator) -> tuple[torch.Generator, list[Tensor]]:
    """Return the generator, and the states of one for each chain."""
    seeds = torch.randint(2**62, (number,), generator=generator, device="cpu").tolist()
    return generator, [torch.Generator().manual_seed(seed).get_state() for seed in seeds]


def _after(state: WalkState, walkers: Sequence[Walker], thinning: int) -> WalkState:
    """Return the state once all have taken a step, a draw or not."""
    if state.warmup_left:
        counts: dict[str, Any] = {"warmup_left": state.warmup_left - 1}
    elif state.since_draw + 1 < thinning:
        counts = {"since_draw": state.since_draw + 1}
    else:
        counts = {"since_draw": 0, "num_draws": state.num_draws + 1}
    return dataclasses.replace(state, walkers=tuple(walker.state() for walker in walkers), **counts)


def _prepare(directory: Path, resume: HyperPosterior | None) -> Path:
    """Return the file of a checkpoint in a directory, made if need be, empty but for draws that are known."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / _FILE
    if path.exists():
        written = load(path, _KEYS)[0]["raw"]
        if not isinstance(written, Tensor) or written.dim() != 3:
            raise ValueError(f"{path} holds no draws (C, S, P). Delete it, or give another directory.")
        if resume is None or not torch.equal(written, resume.raw[:, : written.size(1)]):
            raise ValueError(
                f"{directory} holds draws of another run. Give another directory, or go on from them with "
                "resume=sampler.load(directory)."
            )
    return path
