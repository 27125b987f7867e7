"""Computations whose results are stored in the package; run one as ``python -m scripts.NAME`` from the root."""
