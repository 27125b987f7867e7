"""Mixing distributions from phi alone: draws and moments against closed forms at every tilt."""

import math

import pytest
import scipy.stats
import torch

from gpext.distributions import InverseGaussian, PolyaGamma, RadialTransform, Scaled, ScaleMixture
from gpext.distributions.laplace_inversion.quantile_table import interpolated

F64 = torch.float64


def tensor(*values):
    return torch.tensor(values, dtype=F64)


def exponential(r):
    return torch.exp(-torch.sqrt(r))


def log_exponential(r):
    return -torch.sqrt(r)


def sech(r):
    return 1 / torch.cosh(torch.sqrt(r))


@pytest.mark.parametrize("tilt", ["mixed", "one", "zero"])
def test_many_draws_come_from_a_table_as_exact_as_the_few(tilt):
    generator = torch.Generator().manual_seed(0)
    score = torch.randn(30_000, generator=generator, dtype=F64)
    mixed = 3 * torch.randn(30_000, generator=generator, dtype=F64).abs()
    c = {"mixed": mixed, "one": torch.ones_like(mixed), "zero": torch.zeros_like(mixed)}[tilt]
    for phi, exact in (
        (exponential, InverseGaussian(0.5 / c, 0.5)),
        (sech, Scaled(PolyaGamma(torch.ones_like(c), 2 * c), 2.0)),
    ):
        with torch.no_grad():
            found = interpolated(RadialTransform(phi), c, score)
        assert found is not None
        w, left_out = found
        assert float(left_out.double().mean()) < 0.011
        w = torch.where(left_out, 1.0, w)
        error = torch.where(left_out, 0.0, exact.cdf(w) - torch.special.ndtr(score))
        assert float(error.abs().max()) < 1e-8


def test_few_draws_from_a_heavy_tail_at_tilt_zero():
    law = ScaleMixture(exponential, tensor(0.0, 1e-8))
    q = tensor(1e-12, 1e-3, 0.5, 0.999, 1 - 1e-7).unsqueeze(-1)
    w = law.icdf(q)
    exact = InverseGaussian(0.5 / law.tilt, 0.5).cdf(w)
    torch.testing.assert_close(exact, q.expand(5, 2), rtol=0, atol=1e-9)


def test_moments_at_every_tilt():
    c = torch.cat([torch.zeros(1, dtype=F64), torch.logspace(-10, 4, 29, dtype=F64)])
    law = ScaleMixture(None, c, log_phi=log_exponential)
    exact = InverseGaussian(0.5 / c, 0.5)
    torch.testing.assert_close(law.mean, exact.mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(law.variance, exact.variance, rtol=1e-9, atol=0)
    c = c[c < 300]
    law, exact = ScaleMixture(sech, c), Scaled(PolyaGamma(1.0, 2 * c), 2.0)
    torch.testing.assert_close(law.mean, exact.mean, rtol=1e-9, atol=0)
    torch.testing.assert_close(law.variance, exact.variance, rtol=1e-7, atol=0)


def test_an_infinite_tilt_leaves_nothing():
    law = ScaleMixture(sech, tensor(1.0, math.inf))
    draws = law.sample((50,))
    assert (draws > 0).all(0).tolist() == [True, False]
    assert law.mean[1] == law.variance[1] == draws[:, 1].max() == 0
    assert law.cdf(tensor(0.0, 0.0)).tolist() == [0.0, 1.0]


def test_phi_without_complex_arguments_is_refused():
    def only_real(r):
        return torch.special.erfcx(r)

    with pytest.raises(TypeError, match="phi must take complex128 tensors, for numerical inversion; it raised"):
        ScaleMixture(only_real, tensor(1.0)).sample()

    def real_part(r):
        return 1 / (1 + r.real)

    with pytest.raises(TypeError, match=r"phi must be analytic: of a complex128 tensor it returned torch\.float64"):
        ScaleMixture(real_part, tensor(1.0)).sample()


def test_a_branch_cut_in_the_wrong_place_is_found_and_named():
    """cosh(sqrt r) winds around zero: its real powers are cut where they should be analytic."""

    def cut(r):
        return torch.cosh(torch.sqrt(r)) ** -3.3

    law = ScaleMixture(cut, torch.zeros(40, dtype=F64))
    with pytest.raises(ValueError, match=r"does not converge at datum \(\d+,\), tilt 0, w "):
        law.cdf(torch.linspace(0.01, 2, 40, dtype=F64))
    with pytest.raises(ValueError, match="does not converge at datum"):
        law.sample((50,), generator=torch.Generator().manual_seed(0))


def test_an_atom_has_no_density_to_be_found():
    with pytest.raises(ValueError, match="p\\(w\\) must have a density"):
        ScaleMixture(lambda r: torch.exp(-r), tensor(1.0)).sample((10,))


def test_underflow_names_the_remedy():
    with pytest.raises(ValueError, match="give log_phi instead of phi"):
        ScaleMixture(exponential, tensor(1e4)).sample()
    assert float(ScaleMixture(None, tensor(1e4), log_phi=log_exponential).sample()) == pytest.approx(5e-5, rel=0.1)


def test_exactly_one_of_phi_and_its_logarithm():
    for phi, log_phi in ((None, None), (exponential, log_exponential)):
        with pytest.raises(ValueError, match="exactly one of phi and log_phi"):
            ScaleMixture(phi, tensor(1.0), log_phi=log_phi)
    with pytest.raises(ValueError, match="constraint"):
        ScaleMixture(exponential, tensor(-1.0), validate_args=True)


def test_a_phi_that_overflows_far_out_has_its_lower_tail():
    tilt = tensor(10.0, 100.0, 200.0)
    exact = PolyaGamma(torch.ones_like(tilt), 2 * tilt)
    w = exact.mean * torch.logspace(-3, 1, 40, dtype=F64).unsqueeze(-1)
    torch.testing.assert_close(ScaleMixture(sech, tilt).cdf(2 * w), exact.cdf(w), rtol=0, atol=1e-10)


def test_tilts_that_are_numbers_or_integers():
    assert ScaleMixture(exponential, 2.0).mean == pytest.approx(0.25)
    assert ScaleMixture(exponential, torch.tensor([1, 2])).sample((4,)).gt(0).all()
    with pytest.raises(TypeError, match="it returned float"):
        ScaleMixture(lambda r: 1.0, tensor(1.0))


@pytest.mark.parametrize("power", [0.8, 0.9, 0.95])
def test_stable_laws_however_skew(power):
    """phi = exp(-r^a); exactly, w = sin(a U) sin(U)^(-1/a) (sin((1 - a) U) / E)^((1 - a) / a) [Kanter 1975]."""
    generator = torch.Generator().manual_seed(0)
    angle = math.pi * torch.rand(4000, generator=generator, dtype=F64)
    exponential_draws = -torch.rand(4000, generator=generator, dtype=F64).log()
    w = torch.sin(power * angle) / torch.sin(angle) ** (1 / power)
    w = w * (torch.sin((1 - power) * angle) / exponential_draws) ** ((1 - power) / power)
    law = ScaleMixture(lambda r: torch.exp(-(r**power)), tensor(0.0).squeeze())
    assert scipy.stats.kstest(law.cdf(w).numpy(), "uniform").pvalue > 1e-5
    few = torch.stack([law.sample((10,), generator=generator) for _ in range(20)])  # a few are solved one by one
    torch.testing.assert_close(law.icdf(law.cdf(few)), few, rtol=1e-6, atol=0)
    assert scipy.stats.kstest(law.cdf(few).flatten().numpy(), "uniform").pvalue > 1e-5


def test_parameters_of_phi_are_not_left_without_their_gradients_in_silence():
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    mixture = ScaleMixture(lambda r: (1 + r / scale) ** -1.5, torch.tensor(1.0, dtype=torch.float64))
    with pytest.raises(NotImplementedError, match="no derivative in the parameters of phi"):
        mixture.log_prob(torch.tensor(0.3, dtype=torch.float64))
    with torch.no_grad():
        found = mixture.log_prob(torch.tensor(0.3, dtype=torch.float64))
    gamma = torch.distributions.Gamma(torch.tensor(1.5).double(), torch.tensor(3.0).double())
    torch.testing.assert_close(found, gamma.log_prob(torch.tensor(0.3).double()), rtol=1e-6, atol=1e-6)


def matern(r):
    return torch.exp(-r.sqrt()) * (1 + r.sqrt())


@pytest.mark.parametrize("tilt", [0.0, 0.5, 2.0])
def test_values_that_no_draw_will_ever_have_are_no_fault_of_phi(tilt):
    """Steps that a sampler rejects: inverse gamma(3/2, 1/4), tilted."""
    w = torch.tensor([1e-30, 1e-5, 1e-3, 0.01, 1.0, 1e2, 1e4, 1e27], dtype=torch.float64)
    w = w[:-1] if tilt == 0 else w  # its tail falls like w^(-5/2)
    law = ScaleMixture(matern, torch.tensor(tilt, dtype=torch.float64))
    free = scipy.stats.invgamma(1.5, scale=0.25)
    expected = torch.tensor(free.logpdf(w.numpy())) - tilt**2 * w - math.log(float(matern(torch.tensor(tilt**2))))
    found = law.log_prob(w)
    known = found.isfinite()
    torch.testing.assert_close(found[known], expected[known], rtol=1e-6, atol=1e-6)
    assert bool((expected[~known] < -200).all())
    assert bool(known[3:6].all())
    cdf = law.cdf(w)
    assert bool((cdf.diff() >= -1e-12).all())
    assert float(cdf[0]) < 1e-60
    assert float(cdf[-1]) > 1 - 1e-6
