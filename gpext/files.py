"""Files of tensors and numbers, whole or not there.

One is written beside its final name and then renamed: what stands under the final name is whole, whatever happens.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def load(path: Path, *, mapped: bool = True) -> dict[str, Any]:
    """Return what :func:`save` has written.

    Args:
        path: of the file.
        mapped: read numbers as they are asked for. Not for a file that may be replaced meanwhile: torch opens it twice,
            and what it finds the second time may be another.
    """
    if mapped:
        return torch.load(path, mmap=True, weights_only=True)
    with path.open("rb") as file:
        return torch.load(file, weights_only=True)


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
