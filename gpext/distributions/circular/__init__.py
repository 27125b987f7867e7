"""Angles: von Mises distributions, their predictions, and credible arcs."""
