"""Chains over hyperparameters, all in step with each other: counted, kept, interrupted, written and gone on with.

What a step is, a walker says. It has a generator of its own and a state that holds all it goes on from, so that a run
in two parts draws what one run would have drawn, bit for bit.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor
from tqdm import tqdm

from gpext.files import load, save
from gpext.inference import InferenceWarning
from gpext.parallel import Ranks
from gpext.samplers.chain_state import WalkState
from gpext.samplers.draws import WELL_MIXED, SamplingStatus, split_r_hat
from gpext.samplers.hyperposterior import HyperPosterior
from gpext.samplers.log_posterior import LogPosterior

_SECONDS = 120.0  # between two checkpoints
_FILE = "chains.pt"


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

    def load(self, checkpoint: str | Path) -> HyperPosterior:
        """Return the draws of a checkpoint, of a run that may have been killed; `run(..., resume=)` goes on from them.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is one of other hyperparameters.
        """
        path = Path(checkpoint) / _FILE
        if not path.exists():
            raise FileNotFoundError(f"expected a checkpoint of a sampler in {checkpoint}; found none.")
        content = load(path, mapped=False)
        names = self._names()
        if content["names"] != names:
            raise ValueError(f"the checkpoint is one of {content['names']}; this sampler draws {names}.")
        return self._conclude(content["raw"], WalkState(**content["state"]), None, f" (read from {path})", 0.0)

    def _run(
        self,
        begin: Callable[[], list[dict[str, Any]]],
        *,
        num_samples: int,
        warmup: int,
        thinning: int,
        resume: HyperPosterior | None,
        checkpoint: str | Path | None,
        progress: bool,
        ranks: Ranks | None,
    ) -> HyperPosterior:
        """Return draws; `begin` returns the states that new chains start from, the same on all ranks."""
        started = time.perf_counter()
        ranks = Ranks.alone() if ranks is None else ranks

        def opened() -> tuple[Path | None, WalkState]:
            path = None if checkpoint is None else _prepare(Path(checkpoint), resume)
            state = WalkState(tuple(begin()), warmup, 0, 0) if resume is None else resume.state
            if len(state.walkers) < ranks.size:
                raise ValueError(
                    f"expected a chain for each of {ranks.size} ranks at least; got {len(state.walkers)} chains."
                )
            return path, state

        path, state = ranks.together(opened)
        earlier = torch.zeros(len(state.walkers), 0, self.target.moved.size, dtype=torch.float64)
        earlier = (earlier if resume is None else resume.raw)[ranks.rank :: ranks.size]
        state = dataclasses.replace(state, walkers=state.walkers[ranks.rank :: ranks.size])  # those of this rank
        walkers = [self._walker(each) for each in state.walkers]
        places: list[Tensor] = []  # of new draws (C, P); an interrupt may leave one too many
        goal, written = state.num_draws + num_samples, time.perf_counter()
        status, note = None, ""

        def together() -> tuple[Tensor, WalkState]:
            """Return the draws (C, S, P) and the state of the chains of all ranks."""
            new = torch.stack(places, 1) if places else earlier[:, :0]
            own = torch.cat([earlier, new], 1)[:, : state.num_draws]
            parts = ranks.gather((own, state.walkers))
            number = sum(len(each) for _, each in parts)
            order = [(c % ranks.size, c // ranks.size) for c in range(number)]
            raw = torch.stack([parts[rank][0][k] for rank, k in order])
            return raw, dataclasses.replace(state, walkers=tuple(parts[rank][1][k] for rank, k in order))

        def write(path: Path) -> None:
            raw, whole = together()
            ranks.together(lambda: self._write(path, raw, whole) if ranks.rank == 0 else None)

        def move() -> None:
            for walker in walkers:
                walker.step(adapt=state.warmup_left > 0)

        total = state.warmup_left + num_samples * thinning - state.since_draw
        shown = progress and ranks.rank == 0
        with tqdm(total=total, desc=self.name, disable=None if shown else True, leave=False) as bar:
            try:
                while state.num_draws < goal:
                    ranks.together(move)
                    following = _after(state, walkers, thinning)
                    if following.num_draws > state.num_draws:
                        places.append(torch.stack([walker.place for walker in walkers]))
                    state = following
                    bar.update()
                    if path is not None and ranks.any(time.perf_counter() - written > _SECONDS):
                        write(path)
                        written = time.perf_counter()
            except KeyboardInterrupt:
                if ranks.size > 1:
                    raise  # the others may be in another step; what was written is whole
                status = SamplingStatus.INTERRUPTED
            except FloatingPointError as error:
                status, note = SamplingStatus.DIVERGED, f" ({error})"
            except OSError as error:
                status, note = SamplingStatus.NOT_WRITTEN, f" ({error})"
        if path is not None and status is not SamplingStatus.NOT_WRITTEN:
            try:
                write(path)
            except OSError as error:
                status, note = SamplingStatus.NOT_WRITTEN, f" ({error})"
        found = self._conclude(*together(), status, note, time.perf_counter() - started)
        if status is not None:
            warnings.warn(found.message, InferenceWarning, stacklevel=3)
        return found

    def _conclude(
        self, raw: Tensor, state: WalkState, status: SamplingStatus | None, note: str, seconds: float
    ) -> HyperPosterior:
        """Return the draws of a run that ended with a status, or, with None, because it was done."""
        r_hat = split_r_hat(raw)
        if status is None:
            status = SamplingStatus.MIXED if r_hat < WELL_MIXED else SamplingStatus.NOT_MIXED
        acceptance = torch.tensor([self._walker(each).acceptance for each in state.walkers], dtype=torch.float64)
        accepted = "" if bool(acceptance.isnan().all()) else f"acceptance {acceptance.nanmean().item():.2f}, "
        message = (
            f"{self.name}, {raw.size(0)} chains of {raw.size(1)} draws in {seconds:.1f} s, {accepted}largest split "
            f"R-hat {r_hat:.4f}: {status.value}{note}."
        )
        return HyperPosterior(self.target, raw, state, status, message, seconds, r_hat, acceptance)

    def _write(self, path: Path, raw: Tensor, state: WalkState) -> None:
        fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
        save({"names": self._names(), "raw": raw, "state": fields}, path)

    def _names(self) -> list[str]:
        return [slot.coordinate for slot in self.target.moved.slots]


def check_counts(num_samples: int, num_chains: int, thinning: int, warmup: int) -> None:
    """Refuse what is no number of draws.

    Raises:
        ValueError: a number that is not positive.
    """
    if min(num_samples, num_chains, thinning) < 1 or warmup < 0:
        raise ValueError(
            "expected num_samples, num_chains, thinning >= 1 and warmup >= 0; got "
            f"{num_samples}, {num_chains}, {thinning}, {warmup}."
        )


def offspring(number: int, generator: torch.Generator | None) -> tuple[torch.Generator, list[Tensor]]:
    """Return the generator, seeded with 0 by default, and the states of one for each chain."""
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    seeds = torch.randint(2**62, (number,), generator=generator).tolist()
    return generator, [torch.Generator().manual_seed(seed).get_state() for seed in seeds]


def _after(state: WalkState, walkers: Sequence[Walker], thinning: int) -> WalkState:
    """Return the state once all have taken a step, a draw or not."""
    if state.warmup_left:
        counts = {"warmup_left": state.warmup_left - 1}
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
        written = load(path, mapped=False)["raw"]
        if resume is None or not torch.equal(written, resume.raw[:, : written.size(1)]):
            raise ValueError(
                f"{directory} holds draws of another run. Give another directory, or go on from them with "
                "resume=sampler.load(directory)."
            )
    return path
