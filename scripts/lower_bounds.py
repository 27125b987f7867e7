"""Print the declared lower bounds as constraints for pip: `name>=version` of setup.cfg as `name==version`.

python scripts/lower_bounds.py > lowest.txt
"""

from __future__ import annotations

import configparser
import sys
from pathlib import Path

SETUP = Path(__file__).resolve().parents[1] / "setup.cfg"


def lower_bounds(setup: Path = SETUP) -> list[str]:
    """Return `name==version` for each requirement of the package.

    Raises:
        ValueError: a requirement declares no lower bound.
    """
    config = configparser.ConfigParser()
    config.read(setup, encoding="utf-8")
    requirements = config["options"]["install_requires"].split()
    if unbounded := [each for each in requirements if each.count(">=") != 1]:
        raise ValueError(f"expected name>=version; got {', '.join(unbounded)}.")
    return [each.replace(">=", "==") for each in requirements]


if __name__ == "__main__":
    print("\n".join(lower_bounds()))
    sys.exit()
