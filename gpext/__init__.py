"""Non-Gaussian and large Gaussian processes in PyTorch."""

from gpext._version import __version__

__all__ = ["__version__"]
