"""Ctrl-C where several ranks have to stop at the same place."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from gpext.parallel.ranks import Ranks


@contextmanager
def interrupts(ranks: Ranks) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C has been pressed here, for the ranks to agree on what to do.

    Pressed a second time, or where there is one rank, it is a KeyboardInterrupt as ever.

    Example:
        >>> from gpext.parallel import Ranks
        >>> with interrupts(Ranks.alone()) as pressed:
        ...     print(pressed())
        False
    """
    pressed: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    if ranks.size == 1 or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)
