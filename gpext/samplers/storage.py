"""Storage of draws: in memory, or chunk by chunk in a directory, so that memory does not grow with their number.

With a chunk goes the state of the chains at its last draw, so that a killed run can resume from there; while
they warm up, their state alone. Where several ranks have chains, each hands its draws to all, and the first of them
writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpext.files import Pace
from gpext.samplers.chain_ranks import ChainRanks
from gpext.samplers.draw_files import Stored, read_chunk, read_chunks, read_state, write_chunk, write_state
from gpext.samplers.state import ChainState, as_stored
from gpext.schema import Schema

_CHUNK_BYTES = 2**25


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

    def __init__(self, parts: tuple[Chunk | Stored, ...] = ()) -> None:
        self.parts, self.num_draws = parts, sum(part.size for part in parts)

    @classmethod
    def found_in(
        cls, directory: Path, restored: Callable[[Any, str], ChainState], latent: Schema, raw: Schema
    ) -> tuple[Chunks, tuple[ChainState, ...]]:
        """Return what a directory holds, and the states at its end.

        Args:
            directory: of the files.
            restored: (what was stored of a state, where) -> the state.
            latent: of latent values (C, S, ..., N).
            raw: of hyperparameters (C, S, P).

        Raises:
            FileNotFoundError: there are no draws.
            ValueError: a file is missing, damaged, or belongs elsewhere.
        """
        content = read_state(directory)
        states = tuple(restored(each, f"{directory}: states[{i}]") for i, each in enumerate(content["states"]))
        chunks = cls(read_chunks(directory, content, latent, raw))
        num_chains = sum(state.num_chains for state in states)
        for state in states:
            if state.num_draws != chunks.num_draws:
                raise ValueError(
                    f"{directory}: the chains have {state.num_draws} draws, and {chunks.num_draws} are there."
                )
        for part in chunks.parts:
            if isinstance(part, Stored) and part.num_chains != num_chains:
                raise ValueError(f"{part.path} has draws of {part.num_chains} chains; there are {num_chains}.")
        return chunks, states

    def extended(self, part: Chunk | Stored) -> Chunks:
        """Return these and one more."""
        return Chunks((*self.parts, part))

    def stored_in(self, directory: Path) -> tuple[Stored, ...]:
        """Return the first of these, as far as they are in a directory."""
        found: list[Stored] = []
        for part in self.parts:
            if not isinstance(part, Stored) or part.path.parent.resolve() != directory.resolve():
                break
            found.append(part)
        return tuple(found)

    def __iter__(self) -> Iterator[Chunk]:
        for part in self.parts:
            if isinstance(part, Chunk):
                yield part
            else:
                yield Chunk(*read_chunk(part))


class Store:
    """Takes the states of this rank's chains one after another, and keeps those of all ranks that are draws.

    Args:
        chunks: the draws there are already.
        states: where the chains of this rank are, one for each batch of them.
        like: a tensor of the dtype and device to keep latent values in.
        directory: where to write; None for memory.
        members: who takes part; all do the same at once.
    """

    def __init__(
        self, chunks: Chunks, states: tuple[ChainState, ...], like: Tensor, directory: Path | None, members: ChainRanks
    ) -> None:
        self.chunks, self.states, self._directory, self._members = chunks, states, directory, members
        self._pace = Pace()
        self._sizes = [state.num_chains for state in states]
        rest, num_raw = states[0].latent.shape[1:], states[0].raw.size(-1)
        num_chains = sum(members.spread.everyones(self._sizes))
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

    def open(self) -> None:
        """Write the draws to resume from and the state of the chains to the directory.

        Raises:
            OSError: it could not be written; nothing is lost.
        """
        directory = self._directory
        if directory is None:
            return
        chunks = Chunks(self.chunks.stored_in(directory))
        for chunk in Chunks(self.chunks.parts[len(chunks.parts) :]):
            chunks = chunks.extended(self._write_chunk(directory, chunk, chunks))
        self._write_state(directory, chunks)
        self.chunks = chunks

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
        """Hand over the draws of the buffers of all ranks, and where the chains are.

        Raises:
            OSError: they could not be written; nothing is lost.
        """
        with self._pace.writing():
            chunks = self.chunks
            if self._filled:
                chunk = self._buffered()
                if self._directory is not None:
                    chunks = chunks.extended(self._write_chunk(self._directory, chunk, chunks))
                else:
                    chunks = chunks.extended(chunk)
            if self._directory is not None:
                self._write_state(self._directory, chunks)
            self.chunks = chunks

    def flush_if_due(self) -> None:
        """Write the new draws when :class:`gpext.files.Pace` is due: a killed process loses only later ones.

        Raises:
            OSError: as :meth:`flush`.
        """
        if self._directory is not None and self._members.everyone.any(self._pace.is_due(self._filled)):
            self.flush()

    def everyones_states(self) -> tuple[ChainState, ...]:
        """Return the states of the chains of all ranks."""
        states = self._members.spread.everyones([state.on("cpu") for state in self.states])
        return tuple(state.on(self._buffer.latent.device) for state in states)

    def flush_to_memory(self) -> None:
        """Hand over the draws of the buffer without the directory, where no half-written file stays."""
        if self._directory is not None and self._members.everyone.rank == 0:
            for partial in self._directory.glob("*.part"):
                partial.unlink()
        self._directory = None
        self.flush()

    def _buffered(self) -> Chunk:
        """Return the draws of the buffers of all ranks."""
        own = [part[:, : self._filled].cpu().split(self._sizes) for part in (self._buffer.latent, self._buffer.raw)]
        parts = self._members.spread.everyones(list(zip(*own, strict=True)))
        latent, raw = (torch.cat(column, 0) for column in zip(*parts, strict=True))
        return Chunk(latent.to(self._buffer.latent.device), raw)

    def _write_chunk(self, directory: Path, chunk: Chunk, before: Chunks) -> Stored:
        last = before.parts[-1] if before.parts else None
        previous = last.digest if isinstance(last, Stored) else ""

        def written() -> list[Stored]:
            if self._members.everyone.rank:
                return []
            return [write_chunk(directory, chunk.latent, chunk.raw, before.num_draws, previous)]

        (stored,) = self._members.everyone.gather(self._members.everyone.together(written))[0]
        return stored

    def _write_state(self, directory: Path, chunks: Chunks) -> None:
        states = [as_stored(state) for state in self.everyones_states()]
        parts = [part for part in chunks.parts if isinstance(part, Stored)]
        self._members.everyone.on_first(lambda: write_state(directory, states, parts))
