"""Importing BoTorch changes settings of GPyTorch for the whole process; this module restores them."""

import contextlib

import gpytorch
import linear_operator


@contextlib.contextmanager
def kept_settings():
    """Restore the settings of linear_operator and gpytorch afterwards."""
    modules = (linear_operator.settings, gpytorch.settings)
    kinds = [kind for module in modules for kind in vars(module).values() if isinstance(kind, type)]
    before = [(kind, name, value) for kind in kinds for name, value in vars(kind).items() if not callable(value)]
    try:
        yield
    finally:
        for kind, name, value in before:
            if not name.startswith("__") and not isinstance(value, classmethod | property):
                setattr(kind, name, value)
