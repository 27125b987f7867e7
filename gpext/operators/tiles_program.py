"""The C++ program of `compiled_tiles`: from the user's cache, or compiled for this processor.

The cache is `$XDG_CACHE_HOME/gpext`, or `~/.cache/gpext`, and must be closed to other users, because the code
loaded from it is executed. A program is loaded if its checksum is right and it belongs to this user; otherwise it is
compiled anew, by $CXX, c++, g++ or clang++, whichever is the first to produce one that can be loaded. Its name depends
on source, options and processor, so that no compiler is needed to find it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from gpext.callers import warn_caller
from gpext.files import private_folder, read_private, write

_SOURCE = Path(__file__).with_name("tiles.cpp")
_HEADER = _SOURCE.with_name("strips.h")
_FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
)
_THREADS = ("-fopenmp", "-pthread")  # whichever the compiler supports
_COMPILERS = ("c++", "g++", "clang++")  # tried after $CXX
_FUNCTIONS = tuple(
    f"{name}_{dtype}" for name in ("product", "entries", "rounded", "derivatives") for dtype in ("float32", "float64")
)
_PROCESSOR = Path("/proc/cpuinfo")
_TRAITS = {"vendor_id", "cpu family", "model", "model name", "stepping", "flags"}
_TRAITS |= {"CPU implementer", "CPU part", "CPU variant", "Features", "isa", "uarch", "cpu"}  # other than x86
_LONGEST = 300  # characters kept of a compiler's message


class NotCompiledWarning(UserWarning):
    """There is no compiler, or none that works; torch's slower tiles are used instead."""


class NotKeptWarning(UserWarning):
    """The program was compiled and is used, but cannot be kept for later processes."""


@cache
def program() -> ctypes.CDLL | None:
    """Return the program, compiled unless it is in the cache; None, with a warning, if that is impossible."""
    refused: list[str] = []
    try:
        folder: Path | None = private_folder(_cache())
    except OSError as error:
        folder = None
        refused.append(str(error))
    path = None if folder is None else folder / _name()
    if path is not None and os.path.lexists(path):
        try:
            read_private(path)
            return _opened(path)
        except (OSError, ValueError) as error:  # to be replaced
            refused.append(str(error))
    try:
        with _scratch(folder) as scratch:
            found, failures = _first_that_works(Path(scratch))
            if found is not None:
                _keep(found, path, refused)
                return _opened(found)
    except OSError as error:
        failures = [str(error)]
    warn_caller(
        f"The tiles' program is not compiled, products go by torch, more slowly: {'; '.join(refused + failures)}.",
        NotCompiledWarning,
    )
    return None


def _cache() -> Path:
    """Return the folder that programs are kept in.

    Raises:
        OSError: this user has none.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):  # the specification requires relative paths to be ignored
        return Path(named) / "gpext"
    home = os.environ.get("HOME", "~")
    if not os.path.isabs(os.path.expanduser(home)):  # expanduser leaves "~" if the system has no entry for this user
        raise FileNotFoundError(f"there is no folder to keep it in: this user's home directory is {home!r}")
    return Path(home).expanduser() / ".cache" / "gpext"


def _name() -> str:
    """Return the name of the program's file, which depends on source, options and processor."""
    texts = (path.read_text(encoding="utf-8") for path in (_SOURCE, _HEADER))
    parts = (*texts, *_FLAGS, *_THREADS, platform.machine(), *_processor())
    return f"tiles-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.so"


def _processor() -> list[str]:
    """Return an identification of this processor or, if there is none, of this machine."""
    if not _PROCESSOR.exists():
        return [platform.processor(), platform.node()]
    first = _PROCESSOR.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    return [line for line in first.splitlines() if line.split(":")[0].strip() in _TRAITS]


def _opened(path: Path) -> ctypes.CDLL:
    """Return the program in a file.

    Raises:
        OSError: it cannot be loaded, or lacks a function.
    """
    found = ctypes.CDLL(str(path))
    missing = [name for name in _FUNCTIONS if not hasattr(found, name)]  # hasattr looks the symbol up
    if missing:
        raise OSError(f"{path} has no function {missing[0]}")
    return found


def _scratch(folder: Path | None) -> tempfile.TemporaryDirectory[str]:
    """Return a new folder to compile in, in the cache if possible: programs may not be allowed to run elsewhere."""
    try:
        return tempfile.TemporaryDirectory(dir=folder)
    except OSError:
        return tempfile.TemporaryDirectory()


def _first_that_works(scratch: Path) -> tuple[Path | None, list[str]]:
    """Return the file of the first program that can be loaded, and the reasons why the compilers before it failed."""
    named, failures = os.environ.get("CXX", ""), []
    try:
        own = shlex.split(named)
    except ValueError as error:
        own = []
        failures.append(f"CXX is {named!r}, which is no command ({error})")
    candidates = [*([own] if own else []), *([name] for name in _COMPILERS)]
    found = [command for command in candidates if shutil.which(command[0])]
    if not found:
        names = ", ".join(command[0] for command in candidates)
        failures.append(f"found no C++ compiler ({names}); install one or set CXX")
    for number, command in enumerate(found):
        draft = scratch / f"tiles-{number}.so"
        try:
            _compile(command, draft)
            _opened(draft)
        except subprocess.CalledProcessError as error:
            failures.append(f"{shlex.join(command)} failed: {error.stderr.strip()[:_LONGEST] or error.returncode}")
        except OSError as error:
            failures.append(f"{shlex.join(command)} makes no program: {str(error)[:_LONGEST]}")
        else:
            return draft, failures
    return None, failures


def _compile(compiler: Sequence[str], draft: Path) -> None:
    """Compile the program.

    Raises:
        subprocess.CalledProcessError: the compiler failed.
        OSError: it cannot be run.
    """
    command = (*compiler, *_FLAGS, str(_SOURCE), "-o", str(draft))
    try:
        _run(*command, _THREADS[0])
    except subprocess.CalledProcessError:  # a compiler without these options
        _run(*command, _THREADS[1])


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8", errors="replace")


def _keep(draft: Path, path: Path | None, refused: Sequence[str]) -> None:
    """Put a program into the cache atomically: other processes find it complete or not at all."""
    reasons = list(refused)
    if path is not None:
        partial = draft.with_suffix(".part")
        try:
            partial.touch(mode=0o600)  # whatever this user's default mode
            write(path, draft.read_bytes(), partial=partial)
        except OSError as error:
            reasons = [str(error)]
        else:
            return
    warn_caller(
        f"The tiles' program was compiled, but every process has to do so: {'; '.join(reasons)}. XDG_CACHE_HOME can "
        "name another folder to keep it in.",
        NotKeptWarning,
    )
