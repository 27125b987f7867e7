"""Progress of a run: a bar on a terminal; elsewhere, as in a batch job, an occasional line in the log "gpext".

logging.basicConfig(level=logging.INFO)  # shows these lines
"""

from __future__ import annotations

import logging
import time
from types import TracebackType

from tqdm import tqdm

_INTERVAL = 30.0  # seconds between lines of the log, and before the first
_LOG = logging.getLogger("gpext")


class Progress:
    """Counts the steps of a run; a context manager, or closed by :meth:`close`.

    Args:
        name: of what runs.
        total: its number of steps, if that is known.
        shown: whether to show a bar, or lines in the log, at all.
    """

    def __init__(self, name: str, total: int | None = None, *, shown: bool = True) -> None:
        self._bar = tqdm(total=total, desc=name, disable=None if shown else True, leave=False)
        self._name, self._total, self._is_logged = name, total, shown and self._bar.disable
        self._count, self._started = 0, time.monotonic()
        self._last_line = self._started

    def update(self, count: int = 1, numbers: dict[str, str] | None = None) -> None:
        """Count steps that are done, and show numbers, by their names, beside the count."""
        self._count += count
        if not self._bar.disable:
            self._bar.update(count)
            if numbers:
                self._bar.set_postfix(numbers, refresh=False)
        elif self._is_logged and time.monotonic() - self._last_line >= _INTERVAL:
            self._last_line = time.monotonic()
            beside = ", ".join(f"{key}={value}" for key, value in (numbers or {}).items())
            elapsed = self._last_line - self._started
            _LOG.info(tqdm.format_meter(self._count, self._total, elapsed, ncols=0, prefix=self._name, postfix=beside))

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
