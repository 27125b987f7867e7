"""Expectations of log sum exp, softmax and their kin over independent Gaussians, as one-dimensional integrals."""
