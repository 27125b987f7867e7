"""Noise from a radial function: density, constant and draws against SciPy and closed forms."""

import copy
import math
import pickle

import pytest
import scipy.stats
import torch

from gpext.distributions import Matern32, RadialNoise, log_normalizer

F64 = torch.float64
Q = [1e-12, 1e-6, 0.1, 0.5, 0.6, 0.999]


def tensor(*values):
    return torch.tensor(values, dtype=F64)


def student_t(deg_free):
    return lambda r: -(deg_free + 1) / 2 * torch.log1p(r / deg_free)


def gaussian(r):
    return -r / 2


def exponential(r):
    return -r.sqrt()


def matern(r):
    t = (3 * r).sqrt()
    return t.log1p() - t


CASES = {
    **{f"student_t {nu}": (student_t(nu), scipy.stats.t(nu)) for nu in (0.1, 0.5, 1.0, 2.0, 4.0, 50.0)},
    "laplace": (exponential, scipy.stats.laplace()),
    "normal": (gaussian, scipy.stats.norm()),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scale", [1e-8, 0.3, 1e6])
def test_agrees_with_scipy(name, scale):
    log_phi, reference = CASES[name]
    # the scale is given by log_phi in one case, by curvature in the other
    loc = 0.5 * scale
    x = tensor(-600.0, -8.0, -1.0, -1e-7, 0.0, 0.3, 5.0, 600.0)
    for noise in (
        RadialNoise(tensor(loc), log_phi, tensor(scale**-2)),
        RadialNoise(tensor(loc), lambda r: log_phi(r / scale**2), tensor(1.0)),
    ):
        y = loc + scale * x
        x_rounded = ((y - loc) / scale).numpy()
        log_prob = torch.from_numpy(reference.logpdf(x_rounded)) - math.log(scale)
        assert torch.allclose(noise.log_prob(y), log_prob, rtol=1e-11, atol=1e-11)
        exact = torch.from_numpy(reference.cdf(x_rounded))
        # scipy's own t(1).cdf has lost digits at -600
        assert torch.allclose(noise.cdf(y), exact, rtol=1e-10, atol=1e-100)
        quantiles = noise.icdf(tensor(*Q)) - loc
        assert torch.allclose(quantiles / scale, torch.from_numpy(reference.ppf(Q)), rtol=1e-10, atol=1e-15)
        assert noise.cdf(loc + quantiles).tolist() == pytest.approx(Q, rel=1e-9)
        variance = reference.var() * scale**2
        assert noise.variance.item() == pytest.approx(variance, rel=1e-10, nan_ok=True)
        assert noise.mean.item() == pytest.approx(loc if math.isfinite(reference.mean()) else math.nan, nan_ok=True)


def test_agrees_with_matern32():
    loc, rho = tensor(0.3, -1.0), tensor(0.7, 20.0)
    mine, exact = RadialNoise(loc, matern, rho**-2), Matern32(loc, rho)
    y = torch.linspace(-90, 90, 37, dtype=F64)[:, None]
    assert torch.allclose(mine.log_prob(y), exact.log_prob(y), rtol=1e-12, atol=1e-12)
    assert torch.allclose(mine.cdf(y), exact.cdf(y), rtol=1e-10)
    assert torch.allclose(mine.variance, exact.variance, rtol=1e-12)
    assert torch.allclose(mine.icdf(tensor(*Q)[:, None]), exact.icdf(tensor(*Q)[:, None]), rtol=1e-11)


def test_log_normalizer_shape_and_gradient():
    nu = torch.tensor(3.0, dtype=F64, requires_grad=True)
    curvature = tensor(1.0, 4.0).unsqueeze(-1).requires_grad_()
    value = log_normalizer(lambda r: -(nu + 1) / 2 * torch.log1p(r / nu), curvature)
    assert value.shape == (2, 1)

    def exact(nu):
        return torch.lgamma((nu + 1) / 2) - torch.lgamma(nu / 2) - (nu * math.pi).log() / 2

    assert value[:, 0].tolist() == pytest.approx([exact(nu).item(), exact(nu).item() + math.log(2)], rel=1e-12)
    gradient, by_curvature = torch.autograd.grad(value.sum(), (nu, curvature))
    (expected,) = torch.autograd.grad(2 * exact(nu), nu)
    assert gradient.item() == pytest.approx(expected.item(), rel=1e-10)
    assert by_curvature[:, 0].tolist() == pytest.approx([0.5, 0.125], rel=1e-12)


def test_given_constant_is_used():
    noise = RadialNoise(tensor(0.0), gaussian, 1.0, log_constant=tensor(2.0))
    assert noise.log_prob(tensor(1.0)).item() == 1.5


def test_refusals():
    one = tensor(1.0)
    for power in (0.5, 0.4):
        with pytest.raises(ValueError, match="diverges"):
            log_normalizer(lambda r, power=power: -power * torch.log1p(r), one)
    log_normalizer(lambda r: -0.51 * torch.log1p(r), one)
    with pytest.raises(ValueError, match="decrease"):
        log_normalizer(torch.zeros_like, one)
    with pytest.raises(ValueError, match="decrease"):
        log_normalizer(lambda r: r, one)
    with pytest.raises(ValueError, match="phi\\(0\\) = 1"):
        log_normalizer(lambda r: 1 - r, one)
    with pytest.raises(ValueError, match="positive"):
        log_normalizer(gaussian, -one)
    with pytest.raises(ValueError, match="elementwise"):
        log_normalizer(lambda r: -r.unsqueeze(-1), one)
    with pytest.raises(ValueError, match="support"):
        RadialNoise(one, gaussian, one).log_prob(tensor(math.nan))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("log_phi", [exponential, matern, student_t(1.5)])
def test_samples_follow_the_cdf(dtype, log_phi):
    torch.manual_seed(0)
    noise = RadialNoise(torch.tensor([0.0, 3.0], dtype=dtype), log_phi, torch.tensor([1.0, 25.0], dtype=dtype))
    draws = noise.sample((10000,))
    assert draws.dtype == noise.cdf(draws).dtype == dtype
    for i in range(2):
        # sqrt(n) D has tail 2 exp(-2 x^2): 2.7 is exceeded with probability 1e-6.
        assert scipy.stats.kstest(noise.cdf(draws)[:, i].numpy(), "uniform").statistic * 100 < 2.7


def test_shapes_and_copies():
    noise = RadialNoise(tensor(0.0, 1.0), exponential, tensor(2.0).unsqueeze(-1))
    assert noise.batch_shape == (1, 2)
    value = torch.linspace(-2, 2, 6, dtype=F64).view(3, 1, 2)
    wide = noise.expand((3, 1, 2))
    for twin in (wide, copy.deepcopy(wide), pickle.loads(pickle.dumps(wide))):
        assert torch.equal(twin.log_prob(value), noise.log_prob(value))
        assert torch.equal(twin.cdf(value), noise.cdf(value))
        assert twin.sample((4,)).shape == (4, 3, 1, 2)
    ends = noise.cdf(torch.tensor([-math.inf, math.inf], dtype=F64))
    assert ends.tolist() == [[0.0, 1.0]]
    assert noise.icdf(tensor(0.0, 1.0)).tolist() == [[-math.inf, math.inf]]
