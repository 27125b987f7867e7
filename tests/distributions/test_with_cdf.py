"""Distribution functions and quantiles that torch's distributions lack, against SciPy's."""

import copy
import math
import pickle
import subprocess
import sys

import pytest
import scipy.stats
import torch

from gpext.distributions import Bernoulli, Beta, Matern32, NegativeBinomial, Poisson, StudentT, with_cdf

F64 = torch.float64


def tensor(*values):
    return torch.tensor(values, dtype=F64)


@pytest.mark.parametrize("deg_free", [0.5, 1.0, 4.0, 300.0])
def test_student_t_agrees_with_scipy(deg_free):
    y = tensor(-1e6, -3.0, 0.2, 0.3, 1.0, 50.0)
    mine, reference = StudentT(deg_free, tensor(0.3), tensor(0.7)), scipy.stats.t(deg_free, 0.3, 0.7)
    assert mine.cdf(y).tolist() == pytest.approx(reference.cdf(y.numpy()).tolist(), rel=1e-12)
    q = tensor(1e-6, 0.3, 0.5, 0.999)
    assert mine.icdf(q).tolist() == pytest.approx(reference.ppf(q.numpy()).tolist(), rel=1e-11)
    assert mine.cdf(mine.icdf(q)).tolist() == pytest.approx(q.tolist(), rel=1e-10)


def test_beta_agrees_with_scipy():
    y, q = tensor(1e-8, 0.2, 0.7, 1 - 1e-8), tensor(1e-6, 0.3, 0.999)
    mine, reference = Beta(tensor(0.4), tensor(7.0)), scipy.stats.beta(0.4, 7.0)
    assert mine.cdf(y).tolist() == pytest.approx(reference.cdf(y.numpy()).tolist(), rel=1e-12)
    assert mine.icdf(q).tolist() == pytest.approx(reference.ppf(q.numpy()).tolist(), rel=1e-10)
    assert isinstance(with_cdf(torch.distributions.Beta(tensor(0.4), tensor(7.0))), Beta)


@pytest.mark.parametrize("count", [0.3, 5.0, 200.0])
@pytest.mark.parametrize("logit", [-4.0, 0.5, 40.0])
def test_negative_binomial_cdf_sums_the_mass(count, logit):
    mine = NegativeBinomial(tensor(count), logits=tensor(logit))
    k = torch.arange(0, 60, dtype=F64)
    mass = mine.log_prob(k).exp().cumsum(0)
    assert mine.cdf(k).tolist() == pytest.approx(mass.tolist(), rel=1e-9, abs=1e-300)
    assert mine.cdf(tensor(0.0)).item() == pytest.approx(mass[0].item(), rel=1e-10)


def test_negative_binomial_without_failures_is_zero():
    assert NegativeBinomial(tensor(0.0), probs=tensor(0.5)).cdf(tensor(0.0)).item() == 1


def test_poisson_cdf_sums_the_mass():
    mine = Poisson(tensor(0.0, 0.1, 7.0, 300.0))
    k = torch.arange(0, 400, dtype=F64)[:, None]
    assert torch.allclose(mine.cdf(k), mine.log_prob(k).exp().cumsum(0), rtol=1e-9, atol=1e-300)
    assert mine.cdf(torch.tensor(3)).dtype == F64


MAKERS = [
    lambda dtype: StudentT(3.0, torch.zeros(2, dtype=dtype), torch.ones(2, dtype=dtype)),
    lambda dtype: NegativeBinomial(torch.full((2,), 3.0, dtype=dtype), logits=torch.zeros(2, dtype=dtype)),
    lambda dtype: Poisson(torch.ones(2, dtype=dtype)),
    lambda dtype: Matern32(torch.zeros(2, dtype=dtype), torch.ones(2, dtype=dtype)),
]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_family_habits(make, dtype):
    distribution = make(dtype)
    y = torch.tensor([1.0, 2.0], dtype=dtype)
    assert distribution.cdf(y).dtype == dtype
    wide = distribution.expand((3, 2))
    assert type(wide) is type(distribution)
    for twin in (wide, copy.deepcopy(wide), pickle.loads(pickle.dumps(wide))):
        assert torch.equal(twin.cdf(y), wide.cdf(y))
        assert twin.cdf(y).shape == (3, 2)
    with pytest.raises(ValueError, match="support"):
        distribution.cdf(torch.tensor([math.nan, 1.0], dtype=dtype))
    # with Pyro installed these are Pyro distributions
    assert distribution.to_event(1).log_prob(y).shape == ()
    assert distribution.mask(torch.tensor([True, False])).log_prob(y)[1] == 0


@pytest.mark.slow
def test_everything_works_without_pyro():
    script = (
        "import sys; sys.modules['pyro'] = None\n"
        "import torch; from gpext.distributions import *\n"
        "for d in (StudentT(3.0), Matern32(0.0, 1.0), Poisson(2.0), NegativeBinomial(2.0, logits=torch.zeros(()))):\n"
        "    assert 0 < d.expand((2,)).cdf(torch.ones(2))[0] < 1\n"
        "d = AdditiveNoisePredictive(lambda f: Matern32(f, 1.0), torch.zeros(2), torch.ones(2))\n"
        "assert d.expand((3, 2)).sample().shape == (3, 2)\n"
        "assert RadialNoise(torch.zeros(2), lambda r: -r, 1.0).cdf(torch.zeros(2))[0] == 0.5\n"
        "assert not hasattr(d, 'mask')\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=120)


def test_bernoulli_quantiles_are_the_smallest_class_that_reaches_them():
    bernoulli = Bernoulli(logits=torch.tensor([-2.0, 0.0, 3.0], dtype=torch.float64))
    for q in (0.01, 0.3, 0.5, 0.9, 0.999):
        k = bernoulli.quantile(q)
        assert bool((bernoulli.cdf(k) >= q).all())
        assert bool((bernoulli.cdf(k - 1) < q).all())


def test_torch_distributions_get_the_cdf_they_lack():
    stock = torch.distributions
    pairs = [
        (stock.StudentT(tensor(3.0), tensor(0.3), tensor(0.7)), scipy.stats.t(3.0, 0.3, 0.7)),
        (stock.Bernoulli(tensor(0.3)), scipy.stats.bernoulli(0.3)),
        (stock.NegativeBinomial(tensor(2.5), tensor(0.4)), scipy.stats.nbinom(2.5, 0.6)),
        (stock.Poisson(tensor(1.7)), scipy.stats.poisson(1.7)),
    ]
    for distribution, reference in pairs:
        assert with_cdf(distribution).cdf(tensor(1.0)).item() == pytest.approx(reference.cdf(1.0), rel=1e-12)
    for other in (Poisson(tensor(1.7)), stock.Normal(tensor(0.0), tensor(1.0))):
        assert with_cdf(other) is other


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_draws_of_giant_rates_are_as_wide_as_poisson_draws(dtype):
    """torch's own draws are 64-bit integers, which become negative at rates above 2^63."""
    torch.manual_seed(0)
    rate = torch.tensor([3.0, 1e12, 1e16, 1e26, math.inf], dtype=dtype)
    draws = Poisson(rate).sample((2000,))
    assert draws.dtype == dtype
    assert bool((draws[:, -1] == math.inf).all())
    draws, rate = draws[:, :-1].double(), rate[:-1].double()
    z = (draws.mean(0) - rate) / (rate.sqrt() / math.sqrt(2000) + torch.finfo(dtype).eps * rate)
    assert bool((z.abs() < 4.5).all())
    counts = NegativeBinomial(torch.tensor(2.0, dtype=dtype), logits=torch.tensor(60.0, dtype=dtype)).sample((50,))
    assert bool((counts > 0).all())
