"""Anderson's mixing of an affine map: to the point where it rests, or away from it where F is a saddle there."""

from types import SimpleNamespace

import pytest
import torch

from gpext.inference.drivers.fixed_point import Mixing
from gpext.sites import GaussianSites

F64 = torch.float64
ALONG = torch.tensor([1.0, -2.0, 0.5], dtype=F64)
REST = torch.tensor([0.3, 1.0, 2.0], dtype=F64)


def mixed_after_a_step(slope, *, ascends):
    """From 1 along a line, a step along the residual, slope times the distance; return how far mixing then goes.

    F is slope t^2 / 2 at a distance t, so that a positive slope is that of a saddle.
    """
    mixing = Mixing(SimpleNamespace(num_latents=None, mean=REST), ascends=ascends)
    precision, variance = torch.ones(3, dtype=F64), torch.full((3,), 0.7, dtype=F64)

    def sites(distance):
        return GaussianSites(REST + distance * ALONG, precision)

    distance = 1.0
    assert mixing.mix(sites(distance), variance, sites((1 + slope) * distance)) is None
    distance *= 1 + slope
    mixed = mixing.mix(sites(distance), variance, sites((1 + slope) * distance))
    torch.testing.assert_close(mixed.precision, precision)
    found = float((mixed.shift - REST) @ ALONG / ALONG.square().sum())
    torch.testing.assert_close(mixed.shift, REST + found * ALONG)
    return distance, found


@pytest.mark.parametrize("ascends", [False, True])
def test_mixing_finds_where_an_affine_map_rests(ascends):
    _, found = mixed_after_a_step(-0.25, ascends=ascends)
    assert found == pytest.approx(0, abs=1e-9)


def test_mixing_leaves_a_saddle_as_far_as_newtons_step_leads_to_it():
    before, found = mixed_after_a_step(0.03125, ascends=True)
    assert found == pytest.approx(2 * (1 + 0.03125) * before, rel=1e-9)
    assert mixed_after_a_step(0.03125, ascends=False)[1] == pytest.approx(0, abs=1e-8)  # a fixed point, as of EP
