"""What all tests share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_numbers():
    """Draws of a test that seeds nothing are the same alone, in any order and on any worker."""
    torch.manual_seed(0)
