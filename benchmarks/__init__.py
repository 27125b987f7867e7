"""Measurements of gpext against named peers; run one as ``python -m benchmarks.NAME`` from the repository's root."""
