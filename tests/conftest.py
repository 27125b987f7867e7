"""What all tests share."""

import getpass
import os
import tempfile

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ and "KEOPS_CACHE_FOLDER" not in os.environ:
    # pykeops reads a file when it is imported and writes it when a process ends: workers must not share it
    worker = f"gpext-keops-{getpass.getuser()}-{os.environ['PYTEST_XDIST_WORKER']}"
    os.environ["KEOPS_CACHE_FOLDER"] = os.path.join(tempfile.gettempdir(), worker)


@pytest.fixture(autouse=True)
def _same_numbers():
    """Draws of a test that seeds nothing are the same alone, in any order and on any worker."""
    torch.manual_seed(0)
