"""Files of tensors and numbers, whole or not there.

One is written beside its final name and then renamed: what stands under the final name is whole, whatever happens.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

_CURE = "Delete it, or give another directory."


def load(path: Path, keys: Collection[str], *, mapped: bool = True) -> dict[str, Any]:
    """Return what :func:`save` has written.

    Args:
        path: of the file.
        keys: of what was written.
        mapped: read numbers as they are asked for. Not for a file that may be replaced meanwhile: torch opens it twice,
            and what it finds the second time may be another.

    Raises:
        ValueError: the file is damaged, or holds something else.
        OSError: it cannot be read.
    """
    try:
        if mapped:
            content = torch.load(path, mmap=True, weights_only=True)
        else:
            with path.open("rb") as file:
                content = torch.load(file, weights_only=True)
    except Exception as error:  # of any kind: whatever stands there is read as a program
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # which is what mapping a part of a file gives
            raise
        raise ValueError(f"{path} is damaged, or was not written by gpext: {error}. {_CURE}") from error
    if not isinstance(content, dict) or set(content) != set(keys):
        found = sorted(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"expected {sorted(keys)} in {path}; got {found}. {_CURE}")
    return content


def save(content: dict[str, Any], path: Path) -> None:
    """Write a file completely or not at all.

    Raises:
        OSError: it could not be written.
    """
    partial = path.with_suffix(".part")
    try:
        with partial.open("wb") as file:
            try:
                torch.save(content, file)
            except RuntimeError as error:  # how torch's writer may report a full disk
                raise OSError(f"{partial}: {error}") from error
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
