"""Check a wheel where it is installed: its files, and the examples of README and tour without the checkout.

    python -m build --outdir dist .
    python -m venv fresh && fresh/bin/python -m pip install dist/*.whl pytest
    fresh/bin/python scripts/check_wheel.py dist

`make dist` does all three.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
WHERE = (
    "import gpext, sys; print(gpext.__version__, gpext.__file__); sys.exit(not gpext.__file__.startswith(sys.prefix))"
)


def missing_files(wheel: Path, checkout: Path = CHECKOUT) -> list[str]:
    """Return the package's files in the checkout that the wheel lacks, and those it has besides, marked by a plus."""
    wanted = {
        path.relative_to(checkout).as_posix()
        for path in (checkout / "gpext").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    return sorted(wanted - found) + sorted(f"+{name}" for name in found - wanted)


def readme_command(directory: Path) -> list[str]:
    """Copy the README, the tour and their tests into a directory, and return the command that runs them there."""
    for file in ("README.md", "docs/tour.md", "tests/test_readme.py"):
        (directory / file).parent.mkdir(exist_ok=True)
        shutil.copy(CHECKOUT / file, directory / file)
    # Its links lead into the checkout, which is not there.
    options = ["-q", "-p", "no:cacheprovider", "-o", "markers=slow", "-k", "not links"]
    return [sys.executable, "-m", "pytest", *options, "tests/test_readme.py"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; the exit code is 0 if all of them hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("directory", type=Path, help="with one wheel and one sdist")
    directory = parser.parse_args(arguments).directory
    (wheel,) = directory.glob("*.whl")
    (sdist,) = directory.glob("*.tar.gz")
    print(f"{wheel.name}, {wheel.stat().st_size / 2**10:.0f} kB; {sdist.name}, {sdist.stat().st_size / 2**10:.0f} kB")
    if differing := missing_files(wheel):
        print("the wheel and the checkout have different files: " + ", ".join(differing))
        return 1
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as elsewhere:
        for command in ([sys.executable, "-c", WHERE], readme_command(Path(elsewhere))):
            if code := subprocess.run(command, cwd=elsewhere, env=environment, check=False).returncode:
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
