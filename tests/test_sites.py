"""The algebra of Gaussian sites, against the exponent that they represent."""

import pytest
import torch

from gpext.sites import BlockSites, CoupledSites, GaussianSites
from tests.members import F64, tensor


def random_sites(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return GaussianSites(*torch.randn(2, *shape, generator=generator, dtype=F64))


def test_expected_log_is_the_average_of_the_exponent():
    sites, mean, variance = random_sites(6), torch.linspace(-2, 2, 6, dtype=F64), torch.linspace(0.1, 3, 6, dtype=F64)
    z = torch.linspace(-12, 12, 100001, dtype=F64).unsqueeze(-1)
    weights = torch.exp(-0.5 * z.square())
    f = mean + variance.sqrt() * z
    exponent = sites.shift * f - 0.5 * sites.precision * f.square()
    expected = (weights * exponent).sum(0) / weights.sum(0)
    torch.testing.assert_close(sites.expected_log(mean, variance), expected, rtol=1e-10, atol=1e-10)


def test_damping_is_geometric_interpolation_of_the_factors():
    old, new = random_sites(4), random_sites(4, seed=1)
    f = torch.linspace(-1, 1, 4, dtype=F64)
    zero = torch.zeros(4, dtype=F64)
    mixed = old.lerp(new, 0.3).expected_log(f, zero)
    torch.testing.assert_close(mixed, 0.7 * old.expected_log(f, zero) + 0.3 * new.expected_log(f, zero))


def test_lerp_ends_at_its_ends():
    old, new = random_sites(4), random_sites(4, seed=1)
    assert torch.equal(old.lerp(new, 0.0).precision, old.precision)
    torch.testing.assert_close(old.lerp(new, 1.0).shift, new.shift)


def test_negative_precisions_are_kept():
    sites = GaussianSites(tensor(0.0), tensor(-2.0))
    assert sites.to(torch.float32).detach().precision.item() == -2


@pytest.mark.parametrize(
    ("shift", "precision", "message"),
    [
        (torch.zeros(3), torch.zeros(2), r"one shape; got \(3,\) and \(2,\)"),
        (torch.zeros(3), torch.zeros(3).double(), r"share dtype and device; got torch.float32 .* torch.float64"),
    ],
)
def test_mismatched_sites_are_refused(shift, precision, message):
    with pytest.raises(ValueError, match=message):
        GaussianSites(shift, precision)


def test_detach_cuts_the_graph():
    sites = GaussianSites(tensor(1.0).requires_grad_(), tensor(1.0).requires_grad_()).detach()
    assert not sites.shift.requires_grad
    assert not sites.precision.requires_grad


def test_data_without_sites_have_the_factor_one():
    g, w = random_sites(3, 2, 4), random_sites(3, 2, 4, seed=1)
    blocks = g.precision.unsqueeze(-3) * g.precision.unsqueeze(-2)
    index = torch.tensor([5, 0, 3, 2])
    for sites in (g, CoupledSites(g.shift, g.precision, w.shift[:, 0], w.precision), BlockSites(g.shift, blocks)):
        spread = sites.among(index, 7)
        assert type(spread) is type(sites)
        f = torch.linspace(-1, 1, 3 * 2 * 7, dtype=F64).view(3, 2, 7)
        spreads = torch.zeros_like(f) if sites is g else torch.zeros(3, 2, 2, 7, dtype=F64)
        found = spread.expected_log(f, spreads)
        expected = sites.expected_log(f[..., index], spreads[..., index])
        torch.testing.assert_close(found[..., index], expected)
        assert found[..., [1, 4, 6]].abs().max() == 0
        for mine, again in zip(vars(sites).values(), vars(spread.take(index)).values(), strict=True):
            assert torch.equal(mine, again)
