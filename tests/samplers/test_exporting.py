"""Draws are exported to ArviZ before and after 1.0, with all their groups."""

import sys

import arviz
import numpy as np
import pytest
import torch

from gpext.samplers.exporting import to_arviz


def groups():
    generator = torch.Generator().manual_seed(0)
    return {
        "posterior": {"scale": torch.randn(2, 6, generator=generator), "latent": torch.randn(2, 6, 3)},
        "log_likelihood": {"targets": torch.randn(2, 6, 3)},
    }


def test_every_group_arrives_with_its_chains_and_draws():
    given = groups()
    exported = to_arviz(given)
    for group, variables in given.items():
        for name, draws in variables.items():
            assert exported[group][name].dims[:2] == ("chain", "draw")
            np.testing.assert_array_equal(exported[group][name].values, draws.numpy())


@pytest.mark.parametrize(("version", "names_groups"), [("0.23.4", True), ("1.3.0", False)])
def test_groups_go_where_each_generation_takes_them(monkeypatch, version, names_groups):
    """From 1.0 on `from_dict` takes one dictionary of groups."""
    seen = {}
    monkeypatch.setattr(arviz, "__version__", version)
    monkeypatch.setattr(arviz, "from_dict", lambda *args, **kwargs: seen.update(args=args, kwargs=kwargs))
    to_arviz(groups())
    assert set(seen["kwargs"] if names_groups else seen["args"][0]) == {"posterior", "log_likelihood"}


def test_without_arviz_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(ImportError, match="pip install arviz"):
        to_arviz(groups())
