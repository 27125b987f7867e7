"""Draws for ArviZ, whose first generation has `InferenceData`, and later ones xarray's `DataTree`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    import arviz


def to_arviz(groups: dict[str, dict[str, Tensor]]) -> arviz.InferenceData:
    """Return groups of variables by name, each of shape (chains, draws, ...).

    Raises:
        ImportError: ArviZ is not installed.
    """
    try:
        import arviz
    except ImportError as error:
        raise ImportError("to_arviz() needs ArviZ: pip install arviz.") from error
    arrays = {group: {name: x.cpu().numpy() for name, x in variables.items()} for group, variables in groups.items()}
    is_first = int(arviz.__version__.split(".")[0]) == 0
    return arviz.from_dict(**arrays) if is_first else arviz.from_dict(arrays)
