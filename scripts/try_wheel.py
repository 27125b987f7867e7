"""Install a wheel into an environment of its own and run the README's examples with it, away from the checkout.

    python scripts/try_wheel.py dist/gpext-0.1.0-py3-none-any.whl

The environment has the versions of constraints.txt; nothing of it is left afterwards.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_WHERE = "import gpext, pathlib; print(gpext.__version__, pathlib.Path(gpext.__file__).parent)"
_SHIPPED = ("py.typed", "operators/tiles.cpp", "operators/strips.h")


def main() -> None:
    """Run from the command line; any failure ends it with the status of what has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel.resolve()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        python = directory / "env" / ("Scripts" if sys.platform == "win32" else "bin") / "python"

        def run(*command: str | Path) -> str:
            print("+", *command, flush=True)
            return subprocess.run(command, cwd=directory, check=True, stdout=subprocess.PIPE, text=True).stdout

        run(sys.executable, "-m", "venv", directory / "env")
        install = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        constraints = ("-c", ROOT / "constraints.txt")
        run(*install, *constraints, "torch")  # alone first: else the newest one comes with its CUDA packages
        run(*install, *constraints, wheel, "pytest")
        version, package = run(python, "-c", _WHERE).split(maxsplit=1)
        missing = [file for file in _SHIPPED if not (Path(package.strip()) / file).exists()]
        if missing or not Path(package.strip()).is_relative_to(directory.resolve()):
            raise SystemExit(f"gpext {version} in {package.strip()}: not the wheel's, or without {missing}.")
        (directory / "tests").mkdir()
        shutil.copy(ROOT / "README.md", directory)
        shutil.copy(ROOT / "tests" / "test_readme.py", directory / "tests")
        print(run(python, "-m", "pytest", "-q", "-k", "not links", "tests"))
        print(f"gpext {version}: the README's examples run with the wheel alone.")


if __name__ == "__main__":
    main()
