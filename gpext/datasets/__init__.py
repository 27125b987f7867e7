"""Two small data sets for examples: yearly counts, and classes of glass; as NumPy arrays, without a download."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import resources

import numpy as np

__all__ = ["ExampleData", "load_coal", "load_glass"]

_KINDS = (
    "building window, float",
    "building window, not float",
    "vehicle window",
    "container",
    "tableware",
    "headlamp",
)


@dataclass(frozen=True)
class ExampleData:
    """A data set.

    Attributes:
        data: inputs (N, d), float64.
        target: (N,), float64 counts, or int64 classes 0, 1, ....
        feature_names: of the d columns.
        target_names: of the classes; none for counts.
        description: where the data are from, units, and licence.

    Example:
        >>> from gpext.datasets import load_glass
        >>> load_glass().data.shape, load_glass().feature_names[0]
        ((214, 9), 'RI')
    """

    data: np.ndarray
    target: np.ndarray
    feature_names: tuple[str, ...]
    target_names: tuple[str, ...]
    description: str = field(repr=False)


def load_coal() -> ExampleData:
    """Return the number of explosions in British coal mines that killed ten or more, in each year from 1851 to 1962.

    112 counts, 191 in all; the first and the last year are incomplete. Source: Jarrett (1979), "A note on the intervals
    between coal-mining disasters", Biometrika 66, 191-193; distributed with the R package boot without restrictions.

    Example:
        >>> coal = load_coal()
        >>> coal.data.shape, int(coal.target.sum())
        ((112, 1), 191)
    """
    return _read("coal", load_coal, counts=True)


def load_glass() -> ExampleData:
    """Return the refractive index and eight oxides (per cent by weight) of 214 pieces of glass of six kinds.

    Source: Evett & Spiehler (1987), "Rule induction in forensic science"; B. German, Central Research Establishment,
    Home Office Forensic Science Service; UCI Machine Learning Repository, "Glass Identification", CC BY 4.0. The kinds,
    there numbered 1, 2, 3, 5, 6 and 7, are 0 to 5 here.

    Example:
        >>> glass = load_glass()
        >>> glass.data.shape, glass.target_names[0]
        ((214, 9), 'building window, float')
    """
    return _read("glass", load_glass, target_names=_KINDS)


def _read(name: str, loader: object, *, counts: bool = False, target_names: tuple[str, ...] = ()) -> ExampleData:
    """Return a file of the package: a header, then rows whose last column is the target."""
    lines = resources.files(__name__).joinpath(f"{name}.csv").read_text(encoding="utf-8").splitlines()
    values = np.loadtxt(lines[1:], delimiter=",", dtype=np.float64, ndmin=2)
    target = values[:, -1] if counts else values[:, -1].astype(np.int64)
    names = tuple(lines[0].split(",")[:-1])
    return ExampleData(values[:, :-1].copy(), target.copy(), names, target_names, (loader.__doc__ or "").strip())
