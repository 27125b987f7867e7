r"""Files written completely or not at all, with a checksum that reveals damage, and folders of this user alone.

    contents | "\ngpext sha256 " | 64 hexadecimal digits | "\n"

A file is written beside its final name and synced to disk before it is renamed, so that a file with the final name is
always complete. The checksum behind the contents disturbs neither torch.load nor a linker.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_MARK = b"\ngpext sha256 "
_TRAILER = len(_MARK) + 64 + 1  # bytes
_CURE = "Delete it, or give another directory."
_SECONDS = 10.0  # between two writes of a long run
_ITEMS = 1000  # draws of a chain, likewise, whichever comes first
_SHARE = 0.05  # of the time: the most that writing takes
_SHARED = stat.S_IWGRP | stat.S_IWOTH


def load(path: Path, keys: Collection[str]) -> tuple[dict[str, Any], str]:
    """Return the content that :func:`save` has written, and its checksum.

    Args:
        path: of the file.
        keys: of the content.

    Raises:
        ValueError: the file is damaged, or holds something else.
        OSError: it cannot be read.
    """
    contents, digest = read(path)
    try:
        content = torch.load(io.BytesIO(contents), weights_only=True)
    except Exception as error:  # of any kind: the contents may be anything
        raise ValueError(f"{path} was not written by gpext: {error}. {_CURE}") from error
    if not isinstance(content, dict) or set(content) != set(keys):
        found = sorted(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"expected {sorted(keys)} in {path}; got {found}. {_CURE}")
    return content, digest


def save(content: dict[str, Any], path: Path) -> str:
    """Write a file completely or not at all, and return its checksum.

    Raises:
        OSError: it could not be written.
    """
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return write(path, buffer.getvalue())


def read(path: Path) -> tuple[bytes, str]:
    """Return the contents that :func:`write` has written, and their checksum.

    Raises:
        ValueError: the file is damaged, or was written by something else.
        OSError: it cannot be read.
    """
    return _verified(path, path.read_bytes())


def write(path: Path, contents: bytes, *, partial: Path | None = None) -> str:
    """Write contents with their checksum, completely or not at all, and return the checksum.

    Args:
        path: of the file.
        contents: of the file.
        partial: where to write first, in the same file system; by default beside the file, with the suffix `.part`,
            where no two processes may write the same file at once.

    Raises:
        OSError: it could not be written; an existing file stays.
    """
    digest = hashlib.sha256(contents).hexdigest()
    partial = path.with_suffix(".part") if partial is None else partial
    try:
        with partial.open("wb") as file:
            file.write(contents)
            file.write(_MARK + digest.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        _sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)
    return digest


def private_folder(path: Path) -> Path:
    """Return a folder, created if necessary, without symbolic links in its name, in which no other user can write.

    It belongs to this user and others cannot write to it. The folders above it belong to this user or the system, and
    are closed as well or let users move only their own files (the sticky bit of /tmp).

    Raises:
        OSError: it cannot be created, or others could write there.
    """
    if os.name != "posix":
        raise PermissionError(f"{path} cannot be trusted: this system does not say who owns a file")
    path = path.resolve()
    for folder in (*reversed(path.parents), path):
        folder.mkdir(mode=0o700, exist_ok=True)
    _require_closed(path, path.lstat())
    for folder in path.parents:
        found = folder.lstat()
        if found.st_uid not in (os.geteuid(), 0):
            raise PermissionError(f"{path} cannot be trusted: {folder} belongs to the user with the id {found.st_uid}")
        if found.st_mode & _SHARED and not found.st_mode & stat.S_ISVTX:
            raise PermissionError(f"{path} cannot be trusted: others may write to {folder}")
    return path


def read_private(path: Path) -> bytes:
    """Return the contents of a file in a private folder, if no other user can have written it.

    Raises:
        ValueError: it is damaged.
        OSError: it cannot be read, is no plain file, belongs to another user, or others may write to it.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise PermissionError(f"{path} cannot be trusted: it is no plain file")
        _require_closed(path, found)
        return _verified(path, file.read())[0]


class Pace:
    """The times at which a long run writes: after ten seconds or a thousand draws, whichever comes first.

    They are at least the time of twenty writes apart, so that writing takes a twentieth of a run at most.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._written, self._cost = clock(), 0.0

    def is_due(self, items: int = 0) -> bool:
        """Return whether to write now, with this many draws of a chain not yet written."""
        passed = self._clock() - self._written
        return (passed >= _SECONDS or items >= _ITEMS) and passed * _SHARE >= self._cost

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Measure the time of a write in this block, and count from its end."""
        started = self._clock()
        yield
        self._written = self._clock()
        self._cost = self._written - started


def _verified(path: Path, whole: bytes) -> tuple[bytes, str]:
    """Return the contents of a file and their checksum, after comparing it with the stored one."""
    contents, trailer = whole[:-_TRAILER], whole[-_TRAILER:]
    if not trailer.startswith(_MARK):
        raise ValueError(
            f"{path} is damaged, or was not written by gpext 0.1.0 or later: it does not end with a checksum. {_CURE}"
        )
    digest = hashlib.sha256(contents).hexdigest()
    if trailer != _MARK + digest.encode() + b"\n":
        raise ValueError(f"{path} is damaged: its contents do not have the checksum they were written with. {_CURE}")
    return contents, digest


def _sync(folder: Path) -> None:
    """Sync the names in a folder to disk, where the file system supports that."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def _require_closed(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{path} cannot be trusted: it belongs to the user with the id {found.st_uid}")
    if found.st_mode & _SHARED:
        raise PermissionError(f"{path} cannot be trusted: others may write to it")
