"""Where draws are kept: in memory, or chunk by chunk in a directory, so that memory does not grow with their number.

With a chunk goes the state of the chains at its last draw, so that a run that was killed can go on from there. Where
several ranks have chains, each hands its draws to all, and the first of them writes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gpext.files import load, save
from gpext.samplers.chain_state import ChainState
from gpext.samplers.crew import Crew

_CHUNK_BYTES = 2**25
_SECONDS = 60.0  # between two files, where chunks fill slowly
_KEYS = ("latent", "raw", "states")


@dataclass(frozen=True)
class Chunk:
    """Consecutive draws of all chains."""

    latent: Tensor  # (C, S, ..., N)
    raw: Tensor  # (C, S, P)

    @property
    def size(self) -> int:
        """The number of draws of each chain."""
        return self.raw.size(1)


class Chunks:
    """Finished draws in order, some of them on disk; iterating loads one chunk at a time."""

    def __init__(self, parts: tuple[Chunk | Path, ...] = (), num_draws: int = 0) -> None:
        self.parts, self.num_draws = parts, num_draws

    @classmethod
    def found_in(cls, directory: Path) -> tuple[Chunks, tuple[ChainState, ...]]:
        """Return what a directory holds, and the states at its end.

        Raises:
            FileNotFoundError: there are no draws.
            ValueError: a file is damaged.
        """
        paths = files_in(directory)
        if not paths:
            raise FileNotFoundError(f"expected draws written by a sampler in {directory}; found none.")
        chunks = cls()
        for path in paths:
            content = load(path, _KEYS)
            chunks = chunks.extended(path, content["raw"].size(1))
        return chunks, tuple(ChainState(**state) for state in content["states"])

    def extended(self, part: Chunk | Path, size: int) -> Chunks:
        """Return these and one more."""
        return Chunks((*self.parts, part), self.num_draws + size)

    def __iter__(self) -> Iterator[Chunk]:
        for part in self.parts:
            if isinstance(part, Chunk):
                yield part
            else:
                content = load(part, _KEYS)
                yield Chunk(content["latent"], content["raw"])


class Store:
    """Takes the states of this rank's chains one after another, and keeps those of all ranks that are draws.

    Args:
        chunks: the draws there are already.
        states: where the chains of this rank are, one for each batch of them.
        like: a tensor of the dtype and device to keep latent values in.
        directory: where to write; None for memory.
        crew: who takes part; all do the same at once.
    """

    def __init__(
        self, chunks: Chunks, states: tuple[ChainState, ...], like: Tensor, directory: Path | None, crew: Crew
    ) -> None:
        self.chunks, self.states, self._directory, self._crew = chunks, states, directory, crew
        self._written = time.perf_counter()
        self._sizes = [len(state.latent) for state in states]
        rest, num_raw = states[0].latent.shape[1:], states[0].raw.size(-1)
        num_chains = sum(crew.spread.everyones(self._sizes))
        per_draw = num_chains * (rest.numel() * like.element_size() + num_raw * 8)
        size = max(_CHUNK_BYTES // per_draw, 1)
        self._buffer = Chunk(
            like.new_empty((sum(self._sizes), size, *rest)),
            torch.empty((sum(self._sizes), size, num_raw), dtype=torch.float64, device="cpu"),
        )

    @property
    def num_draws(self) -> int:
        """The number of draws of each chain so far."""
        return self.states[0].num_draws

    @property
    def _filled(self) -> int:
        return self.num_draws - self.chunks.num_draws

    def take(self, states: tuple[ChainState, ...]) -> None:
        """Take the next states. Interrupted at any moment, this has happened or has not.

        Raises:
            OSError: a full chunk could not be written; nothing is lost.
        """
        if self._filled == self._buffer.size:
            self.flush()
        if states[0].num_draws > self.num_draws:
            self._buffer.latent[:, self._filled] = torch.cat([state.latent for state in states])
            self._buffer.raw[:, self._filled] = torch.cat([state.raw for state in states])
        self.states = states
        if self._filled == self._buffer.size:
            self.flush()

    def flush(self) -> None:
        """Hand over the draws of the buffers of all ranks.

        Raises:
            OSError: they could not be written; nothing is lost.
        """
        if self._filled:
            own = [part[:, : self._filled].cpu().split(self._sizes) for part in (self._buffer.latent, self._buffer.raw)]
            parts = self._crew.spread.everyones(list(zip(*own, strict=True)))
            latent, raw = (torch.cat(column, 0) for column in zip(*parts, strict=True))
            chunk = Chunk(latent.to(self._buffer.latent.device), raw)
            part = chunk if self._directory is None else self._write(self._directory, chunk)
            self.chunks = self.chunks.extended(part, chunk.size)
        self._written = time.perf_counter()

    def flush_if_due(self) -> None:
        """Write what there is to the directory once a minute: a process that is killed loses no more.

        Raises:
            OSError: as :meth:`flush`.
        """
        if self._directory is not None and self._crew.everyone.any(time.perf_counter() - self._written > _SECONDS):
            self.flush()

    def everyones_states(self) -> tuple[ChainState, ...]:
        """Return the states of the chains of all ranks."""
        states = self._crew.spread.everyones([state.on("cpu") for state in self.states])
        return tuple(state.on(self._buffer.latent.device) for state in states)

    def flush_to_memory(self) -> None:
        """Hand over the draws of the buffer without the directory, where no half-written file stays."""
        if self._directory is not None and self._crew.everyone.rank == 0:
            for partial in self._directory.glob("*.part"):
                partial.unlink()
        self._directory = None
        self.flush()

    def _write(self, directory: Path, chunk: Chunk) -> Path:
        path = directory / f"draws-{self.chunks.num_draws:09d}.pt"
        states = tuple(
            {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
            for state in self.everyones_states()
        )
        content = {"latent": chunk.latent, "raw": chunk.raw, "states": states}
        self._crew.everyone.on_first(lambda: save(content, path))
        return path


def files_in(directory: Path) -> list[Path]:
    """Return the files of draws in a directory, in order."""
    return sorted(directory.glob("draws-*.pt"))
