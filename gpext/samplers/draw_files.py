"""Directories of draws: a file for each chunk, and one with their number and the state of the chains.

    draws-000000000.pt   latent, raw, start, previous     draws of all chains from `start` on
    draws-000001000.pt                                    `previous`: the checksum of the file before
    state.pt             states, files, draws, last       how many files and draws there are, the last one's checksum

A chunk is written first, then `state.pt`, and counts from then on. A process that is killed in between leaves a chunk
that does not count: the chains resume from `state.pt` and draw it once more, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gpext.files import load, save
from gpext.schema import Anything, Each, Number, Record, Schema, Text

_CHUNK_KEYS = ("latent", "raw", "start", "previous")
_STATE = "state.pt"
_COUNT = Number(whole=True, least=0)
_STATE_SCHEMA = Record({"states": Each(Anything()), "files": _COUNT, "draws": _COUNT, "last": Text()})
_CURE = "Put it back, or draw anew, in another directory."


@dataclass(frozen=True)
class Stored:
    """A chunk in a file."""

    path: Path
    start: int  # draws of each chain before it
    size: int  # draws of each chain in it
    num_chains: int
    digest: str  # the file's checksum


def read_chunk(stored: Stored) -> tuple[Tensor, Tensor]:
    """Return the latent values (C, S, ..., N) and hyperparameters (C, S, P) of a chunk.

    Raises:
        ValueError: the file is damaged, or another one than was found before.
    """
    content, digest = load(stored.path, _CHUNK_KEYS)
    if digest != stored.digest:
        raise ValueError(f"{stored.path} is another file than was found there at first. Load the directory again.")
    return content["latent"], content["raw"]


def write_chunk(directory: Path, latent: Tensor, raw: Tensor, start: int, previous: str) -> Stored:
    """Write a chunk that begins at draw `start` and follows the file with the checksum `previous`, "" for none.

    Raises:
        OSError: it could not be written.
    """
    path = _path(directory, start)
    digest = save({"latent": latent, "raw": raw, "start": start, "previous": previous}, path)
    return Stored(path, start, raw.size(1), raw.size(0), digest)


def write_state(directory: Path, states: Sequence[dict[str, Any]], stored: Sequence[Stored]) -> None:
    """Write where the chains are once these chunks are drawn, all that there are; they count from now on.

    Raises:
        OSError: it could not be written.
    """
    draws, last = _end(stored)
    save({"states": tuple(states), "files": len(stored), "draws": draws, "last": last}, directory / _STATE)


def read_state(directory: Path) -> dict[str, Any]:
    """Return the content of `state.pt`, with the states of the chains as yet unchecked.

    Raises:
        FileNotFoundError: there are no draws.
        ValueError: the file is missing or damaged.
    """
    names, path = files_in(directory), directory / _STATE
    if not path.exists():
        if not names:
            raise FileNotFoundError(f"expected draws written by a sampler in {directory}; found none.")
        raise ValueError(
            f"{path} is missing, which counts {names[0].name} and what else belongs to it (gpext wrote none before "
            f"0.1.0). {_CURE}"
        )
    content, _ = load(path, tuple(_STATE_SCHEMA.entries))
    _STATE_SCHEMA.check(content, str(path))
    return content


def read_chunks(directory: Path, state: dict[str, Any], latent: Schema, raw: Schema) -> tuple[Stored, ...]:
    """Return the chunks that a state counts, each of them checked.

    Args:
        directory: of the files.
        state: as :func:`read_state`.
        latent: of the latent values (C, S, ..., N).
        raw: of the hyperparameters (C, S, P).

    Raises:
        ValueError: a file is missing, damaged, or belongs elsewhere.
    """
    schema = Record({"latent": latent, "raw": raw, "start": _COUNT, "previous": Text()})
    stored: list[Stored] = []
    for number in range(state["files"]):
        path = _path(directory, _end(stored)[0])
        if not path.exists():
            raise ValueError(
                f"{path} is missing: {_STATE} counts {state['files']} files with {state['draws']} draws of each chain, "
                f"of which this would be number {number + 1}. {_CURE}"
            )
        stored.append(_following(path, stored, schema))
    if (state["draws"], state["last"]) != _end(stored):
        where = stored[-1].path if stored else directory
        raise ValueError(f"{where} is not the last file that {_STATE} counts: one of both is of another run. {_CURE}")
    paths = [each.path for each in stored]
    for extra in (path for path in files_in(directory) if path not in paths):
        if extra != _path(directory, state["draws"]):
            raise ValueError(f"{extra} is none of the {len(paths)} files that {_STATE} counts. Move it elsewhere.")
        _following(extra, stored, schema)
    return tuple(stored)


def require_only(directory: Path, stored: Sequence[Stored]) -> None:
    """Refuse a directory with other draws than these.

    Raises:
        ValueError: it has them, or a file is missing or damaged.
    """
    names = files_in(directory)
    if not names and not (directory / _STATE).exists():
        return
    content, end = read_state(directory), _end(stored)
    own = [*(each.path.name for each in stored), _path(directory, end[0]).name]
    foreign = [path.name for path in names if path.name not in own]
    if foreign or (content["draws"], content["last"]) != end:
        raise ValueError(
            f"{directory} holds draws of another run, such as {(foreign or [_STATE])[0]}. Give another directory, or "
            "resume from them with resume=sampler.load(directory)."
        )


def files_in(directory: Path) -> list[Path]:
    """Return the files of draws in a directory, in order."""
    return sorted(directory.glob("draws-*.pt"))


def _path(directory: Path, start: int) -> Path:
    return directory / f"draws-{start:09d}.pt"


def _end(stored: Sequence[Stored]) -> tuple[int, str]:
    """Return how many draws of each chain there are in chunks, and the checksum of the last."""
    return (stored[-1].start + stored[-1].size, stored[-1].digest) if stored else (0, "")


def _following(path: Path, stored: Sequence[Stored], schema: Record) -> Stored:
    """Return the chunk in a file, if it follows those."""
    content, digest = load(path, _CHUNK_KEYS)
    schema.check(content, str(path))
    size = content["raw"].size(1)
    if size == 0 or content["latent"].shape[:2] != content["raw"].shape[:2]:
        raise ValueError(
            f"{path} must hold latent values (C, S, ..., N) and hyperparameters (C, S, P) of the same C chains and S "
            f"draws; got {tuple(content['latent'].shape)} and {tuple(content['raw'].shape)}."
        )
    start, previous = _end(stored)
    if (content["start"], content["previous"]) != (start, previous):
        expected = f"follow {stored[-1].path.name}" if stored else "begin a run"
        raise ValueError(
            f"{path} does not {expected}: it was written for draws from number {content['start']} on, expected "
            f"{start}, or after another file than that. It is a copy, or of another run. {_CURE}"
        )
    return Stored(path, start, size, content["raw"].size(0), digest)
