"""Run all random tests under other seeds: GPEXT_TEST_SEED=1 changes every seed that a test or the package sets.

    seed -> seed + 1_000_003 GPEXT_TEST_SEED    in torch.manual_seed, torch.Generator and numpy.random.default_rng

Nothing is replaced if the variable is zero, or not set. The offset is large beside the seeds that are written in
tests: otherwise one test would get the numbers of the next.
"""

import contextlib
import os

import numpy as np
import torch

OFFSET = 1_000_003 * int(os.environ.get("GPEXT_TEST_SEED", "0"))


def shift():
    """Replace the three functions by ones that add the offset, for the rest of this process."""
    if OFFSET and torch.Generator is not Generator:
        torch.Generator, torch.manual_seed, np.random.default_rng = Generator, _manual_seed, _default_rng


@contextlib.contextmanager
def as_written():
    """Suspend the offset: for data sets defined by their seeds, such as examples of benchmarks. A decorator, too."""
    current = torch.Generator, torch.manual_seed, np.random.default_rng
    torch.Generator, torch.manual_seed, np.random.default_rng = _Generator, _torch_seed, _numpy_seed
    try:
        yield
    finally:
        torch.Generator, torch.manual_seed, np.random.default_rng = current


_Generator, _torch_seed, _numpy_seed = torch.Generator, torch.manual_seed, np.random.default_rng


class _AnyGenerator(type(_Generator)):
    """Generators that torch itself made, including its global one, remain generators."""

    def __instancecheck__(cls, instance):
        return isinstance(instance, _Generator)


class Generator(_Generator, metaclass=_AnyGenerator):
    def manual_seed(self, seed):
        return super().manual_seed(seed + OFFSET)


def _manual_seed(seed):
    return _torch_seed(seed + OFFSET)


def _default_rng(seed=None):
    return _numpy_seed(seed + OFFSET if isinstance(seed, int) else seed)
