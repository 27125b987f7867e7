"""Where draws are kept: in memory, or chunk by chunk in a directory, so that memory does not grow with their number.

With a chunk goes the state of the chains at its last draw, so that a run that was killed can go on from there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gpext.files import load, save
from gpext.samplers.chain_state import ChainState

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

    def __init__(self, parts: tuple[Chunk | Path, ...] = (), num_draws: int = 0) -> None:
        self.parts, self.num_draws = parts, num_draws

    @classmethod
    def found_in(cls, directory: Path) -> tuple[Chunks, ChainState]:
        """Return what a directory holds, and the state at its end.

        Raises:
            FileNotFoundError: there are no draws.
        """
        paths = files_in(directory)
        if not paths:
            raise FileNotFoundError(f"expected draws written by a sampler in {directory}; found none.")
        chunks = cls()
        for path in paths:
            content = load(path)
            chunks = chunks.extended(path, content["raw"].size(1))
        return chunks, ChainState(**content["state"])

    def extended(self, part: Chunk | Path, size: int) -> Chunks:
        """Return these and one more."""
        return Chunks((*self.parts, part), self.num_draws + size)

    def __iter__(self) -> Iterator[Chunk]:
        for part in self.parts:
            if isinstance(part, Chunk):
                yield part
            else:
                content = load(part)
                yield Chunk(content["latent"], content["raw"])


class Store:
    """Takes the states of the chains one after another, and keeps those that are draws.

    Args:
        chunks: the draws there are already.
        state: where the chains are.
        like: a tensor of the dtype and device to keep latent values in.
        directory: where to write; None for memory.
    """

    def __init__(self, chunks: Chunks, state: ChainState, like: Tensor, directory: Path | None) -> None:
        self.chunks, self.state, self._directory = chunks, state, directory
        num_chains, rest, num_raw = state.latent.size(0), state.latent.shape[1:], state.raw.size(-1)
        per_draw = num_chains * (rest.numel() * like.element_size() + num_raw * 8)
        size = max(_CHUNK_BYTES // per_draw, 1)
        self._buffer = Chunk(
            like.new_empty((num_chains, size, *rest)), torch.empty((num_chains, size, num_raw), dtype=torch.float64)
        )

    @property
    def _filled(self) -> int:
        return self.state.num_draws - self.chunks.num_draws

    def take(self, state: ChainState) -> None:
        """Take the next state. Interrupted at any moment, this has happened or has not.

        Raises:
            OSError: a full chunk could not be written; nothing is lost.
        """
        if self._filled == self._buffer.size:
            self.flush()
        if state.num_draws > self.state.num_draws:
            self._buffer.latent[:, self._filled] = state.latent
            self._buffer.raw[:, self._filled] = state.raw
        self.state = state
        if self._filled == self._buffer.size:
            self.flush()

    def flush(self) -> None:
        """Hand over the draws of the buffer.

        Raises:
            OSError: they could not be written; nothing is lost.
        """
        if self._filled:
            chunk = Chunk(*(part[:, : self._filled].clone() for part in (self._buffer.latent, self._buffer.raw)))
            part = chunk if self._directory is None else self._write(self._directory, chunk)
            self.chunks = self.chunks.extended(part, chunk.size)

    def flush_to_memory(self) -> None:
        """Hand over the draws of the buffer without the directory, where no half-written file stays."""
        if self._directory is not None:
            for partial in self._directory.glob("*.part"):
                partial.unlink()
        self._directory = None
        self.flush()

    def _write(self, directory: Path, chunk: Chunk) -> Path:
        path = directory / f"draws-{self.chunks.num_draws:09d}.pt"
        state = {field.name: getattr(self.state, field.name) for field in dataclasses.fields(self.state)}
        save({"latent": chunk.latent, "raw": chunk.raw, "state": state}, path)
        return path


def files_in(directory: Path) -> list[Path]:
    """Return the files of draws in a directory, in order."""
    return sorted(directory.glob("draws-*.pt"))
