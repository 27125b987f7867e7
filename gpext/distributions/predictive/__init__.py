"""Predictions p(y) = int p(y | f) q(f) df as distributions, with quantiles and regions, and averages of them."""
