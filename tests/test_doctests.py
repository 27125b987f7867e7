"""The examples in docstrings print what they say."""

import doctest
import importlib
import pkgutil

import matplotlib.pyplot as plt
import pytest
import torch

import gpext

FINDER = doctest.DocTestFinder(exclude_empty=True)


def examples():
    modules = [importlib.import_module(each.name) for each in pkgutil.walk_packages(gpext.__path__, "gpext.")]
    return [test for module in modules for test in FINDER.find(module) if test.examples]


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.name)
def test_example(example):
    dtype = torch.get_default_dtype()
    torch.manual_seed(0)
    try:
        runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
        report = []
        runner.run(example, out=report.append)
    finally:
        torch.set_default_dtype(dtype)
        plt.close("all")
    assert not runner.failures, "".join(report)
