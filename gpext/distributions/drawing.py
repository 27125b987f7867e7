"""Draws by a generator of the user's, where torch's own distributions know only the global ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def drawn_from(generator: torch.Generator | None) -> Iterator[None]:
    """Let torch's global generators begin at a seed that `generator` draws, and leave them as they were.

    Without one they draw as they stand.
    """
    if generator is None:
        yield
        return
    seed = torch.randint(2**31, (), generator=generator, device=generator.device)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        torch.manual_seed(int(seed))
        yield
