"""What all tests share."""

import atexit
import contextlib
import os
import shutil
import tempfile
import unittest

import pytest
import torch

from tests import seeds

if "PYTEST_XDIST_WORKER" in os.environ and "KEOPS_CACHE_FOLDER" not in os.environ:
    # pykeops reads a file when it is imported and writes it when a process ends: workers must not share it. The folder
    # is new and this user's alone, and goes with the process: what is registered before pykeops is done after it.
    os.environ["KEOPS_CACHE_FOLDER"] = tempfile.mkdtemp(prefix="gpext-keops-")
    atexit.register(shutil.rmtree, os.environ["KEOPS_CACHE_FOLDER"], ignore_errors=True)


@pytest.fixture(autouse=True)
def _same_numbers(request):
    """Draws of a test that seeds nothing are the same alone, in any order and on any worker.

    Suites inherited from other packages have tolerances for seeds of their own.
    """
    is_inherited = request.cls is not None and issubclass(request.cls, unittest.TestCase)
    with seeds.as_written() if is_inherited else contextlib.nullcontext():
        torch.manual_seed(0)
        yield
