"""Additive noise as a distribution of y given f, where torch has none."""
