"""Laws of every distribution of a positive scale, and of every mixing density, against its phi."""

import copy
import math
import pickle
from dataclasses import dataclass, field

import numpy as np
import pyro
import pytest
import torch
from scipy import stats

from gpext.augmentations import AutomaticRadial, ExponentialRadial, Matern32Radial, SechRadial, StudentTRadial
from gpext.distributions import (
    Gamma,
    GeneralizedInverseGaussian,
    InverseGaussian,
    PolyaGamma,
    Scaled,
    ScaleMixture,
)
from tests.members import F64, PowerPhi, pseudo_huber_phi, tensor
from tests.statistics import misfit

NUM_DRAWS = 100_000
# P(sqrt(n) D > 2.6) = 2 exp(-2 2.6^2) = 3e-6.
KS_LIMIT = 2.6


def phi_student_t(r):
    return (1 + r / 4.5) ** -2.75


def log_phi_exponential(r):
    return -torch.sqrt(r)


def log_phi_matern32(r):
    x = torch.sqrt(3 * r)
    return torch.log(1 + x) - x


def log_phi_sech(r):
    c = torch.sqrt(r)
    return math.log(2) - c - torch.log(1 + torch.exp(-2 * c))


def log_phi_sech_power(r):
    return 7.3 * log_phi_sech(r)


@dataclass(frozen=True)
class Family:
    """A radial function in closed form, and the same phi as a user would write it."""

    radial: object
    phi: dict = field(default_factory=dict)


FAMILIES = {
    "student_t": Family(StudentTRadial(tensor(4.5).squeeze()), {"phi": phi_student_t}),
    "exponential": Family(ExponentialRadial(), {"log_phi": log_phi_exponential}),
    "matern32": Family(Matern32Radial(), {"log_phi": log_phi_matern32}),
    "sech": Family(SechRadial(tensor(1.0).squeeze()), {"log_phi": log_phi_sech}),
    "sech_power": Family(SechRadial(tensor(7.3).squeeze()), {"log_phi": log_phi_sech_power}),
}
TILTS = (0.0, 0.1, 1.0, 10.0, 100.0)
# Other distributions for the contract: all values of a parameter differ.
ABOVE, BELOW = tensor(0.3, 2.0, 40.0), tensor(1.5, 0.2, 3.0)
MEMBERS = {
    "gamma": lambda dtype: Gamma(ABOVE.to(dtype), BELOW.to(dtype)),
    "inverse_gaussian": lambda dtype: InverseGaussian(ABOVE.to(dtype), BELOW.to(dtype)),
    "gig_half_integer": lambda dtype: GeneralizedInverseGaussian(-1.5, ABOVE.to(dtype), BELOW.to(dtype)),
    "gig": lambda dtype: GeneralizedInverseGaussian(tensor(-0.7, 0.0, 4.2).to(dtype), ABOVE.to(dtype), BELOW.to(dtype)),
    "polya_gamma": lambda dtype: PolyaGamma(tensor(1.0, 0.3, 2.6).to(dtype), tensor(0.0, -3.0, 9.0).to(dtype)),
    "scaled": lambda dtype: Scaled(PolyaGamma(torch.ones(3, dtype=dtype), ABOVE.to(dtype)), 2.0),
    "scale_mixture": lambda dtype: ScaleMixture(pseudo_huber_phi, ABOVE.to(dtype)),
}


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


@pytest.fixture(params=MEMBERS)
def make(request):
    return MEMBERS[request.param]


def scaled_distance(law, draws):
    """sqrt(n) times the Kolmogorov-Smirnov distance of the draws (n,)."""
    uniform = cdf(law, draws)
    return float(stats.kstest(uniform.numpy(), "uniform").statistic) * math.sqrt(len(draws))


def cdf(law, values):
    if isinstance(law, Gamma):  # torch's is wrong by 1e-9
        concentration, rate = (p.double().numpy() for p in (law.concentration, law.rate))
        return torch.from_numpy(np.asarray(stats.gamma.cdf(values.double().numpy(), concentration, scale=1 / rate)))
    return law.cdf(values)


# ---- mixing densities against phi ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tilt", [0.0, 1e-3, 1.0, 30.0])
def test_laplace_transform_of_the_mixing_density_is_phi(family, tilt):
    """int e^{-s w} pi(w | c) dw = phi(c^2 + s) / phi(c^2), by the trapezoidal rule in log w."""
    r = tensor(tilt**2).squeeze()
    law = family.radial.mixing(r)
    typical = 1.0 if law.mean.isinf() else law.mean.item()
    low, high = math.log(typical) - 12, math.log(typical) + (60 if tilt < 0.1 else 12)
    step = min(0.05, 0.2 * float((law.variance.sqrt() / law.mean).nan_to_num(1.0, 1.0)))
    t = torch.arange(low, high, step, dtype=F64)
    density = law.log_prob(t.exp()).exp() * t.exp() * step
    for s in (0.0, 0.3 / typical, 4 / typical):
        expected = (family.radial.log_phi(r + s) - family.radial.log_phi(r)).exp()
        assert float((density * torch.exp(-s * t.exp())).sum()) == pytest.approx(float(expected), rel=1e-9)


def test_mean_of_the_mixing_density_is_the_mean_of_the_radial_function(family):
    r = torch.cat([torch.zeros(1, dtype=F64), torch.logspace(-16, 8, 25, dtype=F64)])
    torch.testing.assert_close(family.radial.mixing(r).mean, family.radial.mean(r), rtol=1e-12, atol=0)


@pytest.mark.parametrize("tilt", TILTS)
def test_draws_follow_the_exact_law(family, tilt):
    law = family.radial.mixing(tensor(tilt**2).squeeze())
    draws = law.sample((NUM_DRAWS,), generator=torch.Generator().manual_seed(1))
    assert scaled_distance(law, draws) < KS_LIMIT
    if law.variance.isfinite():
        assert misfit(draws.unsqueeze(-1), law.mean, variance=law.variance) < 1


@pytest.mark.parametrize("tilt", [*TILTS, 1e-8, 1e4])
def test_numerical_inversion_agrees_with_the_exact_law(family, tilt):
    exact = family.radial.mixing(tensor(tilt**2).squeeze())
    numerical = AutomaticRadial(**family.phi).mixing(tensor(tilt**2).squeeze())
    u = torch.cat([torch.logspace(-9, -0.31, 60, dtype=F64), 1 - torch.logspace(-9, -0.31, 60, dtype=F64)])
    w = numerical.icdf(u)
    assert float((cdf(exact, w) - u).abs().max()) < 2e-9
    assert float((numerical.cdf(w) - cdf(exact, w)).abs().max()) < 1e-9
    inner = (u > 1e-4) & (u < 1 - 1e-4)
    torch.testing.assert_close(numerical.log_prob(w)[inner], exact.log_prob(w)[inner], rtol=0, atol=1e-6)
    draws = numerical.sample((2000,), generator=torch.Generator().manual_seed(2))
    assert scaled_distance(exact, draws) < KS_LIMIT


def test_mixing_is_batched_over_parameters_and_tilts():
    deg_free, r = tensor(1.0, 4.0, 30.0), tensor(0.0, 0.5, 9.0)
    radial = StudentTRadial(deg_free)
    automatic = AutomaticRadial(lambda x: (1 + x / deg_free) ** (-0.5 * (deg_free + 1)))
    exact, numerical = radial.mixing(r), automatic.mixing(r)
    assert numerical.batch_shape == (3,)
    w = numerical.icdf(tensor(0.3, 0.9, 0.01))
    torch.testing.assert_close(cdf(exact, w), tensor(0.3, 0.9, 0.01), rtol=0, atol=1e-9)
    assert numerical.sample((5,)).shape == exact.sample((5,)).shape == (5, 3)
    assert automatic.mixing(r.unsqueeze(-1)).batch_shape == (3, 3)
    assert automatic.mixing(r[:1].squeeze()).batch_shape == (3,)


def test_a_learnable_phi_draws():
    radial = AutomaticRadial(PowerPhi())
    law = radial.mixing(tensor(0.5))
    draws = law.sample((1000,), generator=torch.Generator().manual_seed(0))
    assert not draws.requires_grad
    torch.testing.assert_close(law.mean, radial.mean(tensor(0.5)))


# ---- the contract --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_draws_follow_the_cdf(make, dtype):
    """Also far into both tails: for uniform u, -log u and -log(1 - u) have mean and variance one."""
    law = make(dtype)
    draws = law.sample((20_000,), generator=torch.Generator().manual_seed(3))
    assert draws.dtype == dtype
    assert draws.shape == (20_000, 3)
    assert bool((draws > 0).all())
    uniform = cdf(make(F64), draws.double())
    for k in range(3):
        assert float(stats.kstest(uniform[:, k].numpy(), "uniform").statistic) * math.sqrt(20_000) < KS_LIMIT
    tails = torch.cat([-uniform.log(), -torch.log1p(-uniform)], -1)
    assert misfit(tails, 1.0, variance=torch.ones((), dtype=F64)) < 1


def test_density_integrates_to_the_cdf_and_the_moments(make):
    law = make(F64)
    t = torch.linspace(-60, 12, 8001, dtype=F64).unsqueeze(-1)
    density = law.log_prob(t.exp()).exp() * t.exp()
    cumulative = torch.cumulative_trapezoid(density, dx=float(t[1] - t[0]), dim=0)
    expected = cdf(law, t[1:].exp())
    assert float((cumulative - expected).abs().max()) < 1e-4  # of the rule
    mass = density * float(t[1] - t[0])
    assert float((mass.sum(0) - 1).abs().max()) < 1e-5
    torch.testing.assert_close((mass * t.exp()).sum(0), law.mean, rtol=1e-6, atol=0)
    torch.testing.assert_close((mass * (t.exp() - law.mean).square()).sum(0), law.variance, rtol=1e-6, atol=0)


def test_icdf_inverts_the_cdf(make):
    law = make(F64)
    if isinstance(law, Gamma):
        pytest.skip("torch's Gamma has no icdf")
    for q in (1e-6, 0.3, 0.999):
        torch.testing.assert_close(law.cdf(law.icdf(q)), torch.full((3,), q, dtype=F64), rtol=1e-7, atol=1e-10)
    assert law.icdf(0.0).tolist() == [0.0] * 3
    assert law.icdf(1.0).tolist() == [math.inf] * 3
    with pytest.raises(ValueError, match=r"probabilities must be in \[0, 1\]; got 1.5"):
        law.icdf(1.5)


def test_cdf_and_density_outside_the_support(make):
    law = make(F64)
    if not isinstance(law, Gamma):
        law = law.expand((3,))
        law._validate_args = False
        assert law.cdf(tensor(0.0, 0.0, math.inf)).tolist() == [0.0, 0.0, 1.0]
        assert law.log_prob(tensor(0.0, math.inf, 0.0)).tolist() == [-math.inf] * 3


def test_a_generator_repeats_the_draws_and_leaves_the_global_one_alone(make):
    law = make(F64)
    state = torch.get_rng_state()
    first, again = (law.sample((7,), generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(5)
    first = law.sample((7,))
    torch.manual_seed(5)
    assert torch.equal(first, law.sample((7,)))


def test_copies_and_expansion(make):
    law = make(F64)
    wide = law.expand((4, 3))
    assert wide.batch_shape == (4, 3)
    assert wide.sample((2,)).shape == (2, 4, 3)
    value = tensor(0.4, 0.7, 1.3)
    for twin in (wide, copy.deepcopy(law), pickle.loads(pickle.dumps(law))):
        torch.testing.assert_close(twin.log_prob(value), law.log_prob(value).expand(twin.batch_shape))
        torch.testing.assert_close(twin.mean, law.mean.expand(twin.batch_shape))
    assert type(law).__name__ in repr(law)


def test_sample_site_of_pyro(make):
    law = make(F64)

    def model():
        with pyro.plate("data", 3):
            return pyro.sample("w", law)

    trace = pyro.poutine.trace(model).get_trace()
    trace.compute_log_prob()
    assert trace.nodes["w"]["value"].shape == (3,)
    assert bool(trace.nodes["w"]["log_prob"].isfinite().all())


def test_values_outside_the_support_are_refused(make):
    law = make(F64)
    law._validate_args = True
    with pytest.raises(ValueError, match="support"):
        law.log_prob(tensor(-1.0, 1.0, 1.0))
