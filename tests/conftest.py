"""Fixtures and settings that all tests share."""

import atexit
import contextlib
import os
import shutil
import tempfile
import unittest
import warnings

import pytest
import torch

from tests import seeds
from tests.neutral_settings import kept_settings

if "PYTEST_XDIST_WORKER" in os.environ and "KEOPS_CACHE_FOLDER" not in os.environ:
    # pykeops reads a file when it is imported and writes it when a process ends: workers must not share it. The folder
    # is new, private and removed with the process: an exit handler registered before pykeops's runs after it.
    os.environ["KEOPS_CACHE_FOLDER"] = tempfile.mkdtemp(prefix="gpext-keops-")
    atexit.register(shutil.rmtree, os.environ["KEOPS_CACHE_FOLDER"], ignore_errors=True)

with kept_settings(), contextlib.suppress(ModuleNotFoundError):  # imported by a test, it would change those after it
    import botorch  # noqa: F401


def pytest_configure(config):
    """Import ArviZ before the workers do: once a day it writes a file, and two at a time fail."""
    if getattr(config.option, "numprocesses", None):  # of the process that starts them
        with warnings.catch_warnings(), contextlib.suppress(ModuleNotFoundError):
            warnings.simplefilter("ignore")
            import arviz  # noqa: F401


@pytest.fixture(autouse=True)
def _same_numbers(request):
    """Make the draws of a test that sets no seed the same alone, in any order and on any worker.

    Suites inherited from other packages have tolerances that suit their own seeds.
    """
    is_inherited = request.cls is not None and issubclass(request.cls, unittest.TestCase)
    with seeds.as_written() if is_inherited else contextlib.nullcontext():
        torch.manual_seed(0)
        # torch.compile and torch.export turn off the checks of distributions' arguments in the whole process.
        torch.distributions.Distribution.set_default_validate_args(__debug__)
        yield
