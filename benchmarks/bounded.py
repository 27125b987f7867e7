"""Programs that are ended when their time is over, with their output so far."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ended:
    """The end of a program."""

    status: int | None  # None where its time was over
    stdout: str
    stderr: str

    @property
    def last_words(self) -> str:
        """The last line that it has written, of errors if there are any."""
        return (self.stderr.strip() or self.stdout.strip() or "no output").splitlines()[-1][:300]


def ended(command: Sequence[str], most_seconds: float, *, folder: Path, environment: Mapping[str, str]) -> Ended:
    """Run a program and return how it ended; when its time is over it is killed, with the programs it has started."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=pipe,
        stderr=pipe,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=most_seconds)
        return Ended(process.returncode, stdout, stderr)
    except subprocess.TimeoutExpired:
        _kill(process)
        stdout, stderr = process.communicate()
        return Ended(None, stdout, stderr)
    except BaseException:  # Ctrl-C, which the other process session does not receive
        _kill(process)
        raise


def _kill(process: subprocess.Popen[str]) -> None:
    if os.name == "posix":  # its children may hold its output open
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
