"""GibbsKernel: its stationary distribution against quadrature, and the programs it accepts and rejects."""

from functools import partial

import pyro
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from pyro import distributions as dist
from pyro import poutine
from pyro.infer.mcmc import HMC

from gpext import likelihoods, ppl
from gpext.quadrature import expectation, log_expectation
from tests.members import F64, MEMBERS, laplace, student_t, tensor
from tests.statistics import block_means, misfit

X = tensor(0.0, 0.7, 1.5)
K = torch.exp(-0.5 * (X[:, None] - X).square()) + 1e-4 * torch.eye(3, dtype=F64)
Z = tensor(0.8)
quick = partial(HMC, step_size=0.5, num_steps=3)


def prior(scale=1.0):
    return MultivariateNormal(0.3 * torch.ones(3, dtype=F64), scale * K)


def offset():
    return pyro.sample("b", dist.Normal(torch.ones((), dtype=F64), 0.7))


def everything(likelihood, y):
    """A random prior scale and offset, two sites that depend on f, and a third that Gibbs does not support."""
    b = offset()
    f = ppl.latent_gp("f", prior(b.exp()))
    ppl.observe("y", likelihood, 1.5 * f + b, y)
    ppl.observe("more", likelihood, -f, 0.5 * y)
    pyro.sample("z", dist.Normal(f[0], 2.0), obs=Z[0])


def by_quadrature(likelihood, y, points=37):
    """E x and E x^2 of x = (b, f) under `everything`, on a grid in whitened coordinates."""
    b = torch.linspace(-3.0, 5.0, points, dtype=F64)
    v = torch.linspace(-5.5, 5.5, points, dtype=F64)
    L = torch.linalg.cholesky(K)
    v = torch.stack(torch.meshgrid(v, v, v, indexing="ij"), -1).view(-1, 3)
    log_v = -0.5 * v.square().sum(-1)
    rows = []
    for offset in b:
        f = 0.3 + (0.5 * offset).exp() * v @ L.T
        log_joint = log_v - 0.5 * ((offset - 1) / 0.7).square() - 0.125 * (Z - f[:, 0]).square()
        log_joint = log_joint + likelihood.log_prob(y, 1.5 * f + offset).sum(-1)
        log_joint = log_joint + likelihood.log_prob(0.5 * y, -f).sum(-1)
        weight = (log_joint + 30).exp()
        values = torch.cat([offset.expand(len(f), 1), f], -1)
        rows.append((weight.sum(), weight @ values, weight @ values.square()))
    mass, first, second = (torch.stack(parts).sum(0) for parts in zip(*rows, strict=True))
    return first / mass, second / mass


def draw(program, *, seed=0, inner=quick, **sizes):
    generator = torch.Generator().manual_seed(seed)
    kernel = ppl.GibbsKernel(program, inner=inner, generator=generator)
    return ppl.sample_posterior(kernel, generator=generator, progress=False, **sizes)


@pytest.mark.slow
def test_it_samples_the_posterior_of_the_whole_program():
    likelihood, y = student_t().requires_grad_(False), tensor(0.4, 3.0, -1.0)
    mean, square = by_quadrature(likelihood, y)
    draws = draw(partial(everything, likelihood, y), num_samples=700, warmup=60)
    values = torch.cat([draws.samples["b"].unsqueeze(-1), draws.samples["f"]], -1)
    moments = torch.cat([values, values.square()], -1)
    assert misfit(block_means(moments, 20), torch.cat([mean, square])) < 1
    assert 0.5 < draws.diagnostics[0]["latent acceptance rate"] < 0.99


def test_plates_are_no_sites_to_move():
    """Offsets as one event and offsets in a plate are one program: the same draws, of one function or one per group."""
    likelihood, y = student_t().requires_grad_(False), tensor(0.4, 3.0, -1.0)
    where, two = torch.tensor([0, 1, 0]), torch.zeros(2, dtype=F64)

    def together():
        b = pyro.sample("b", dist.Normal(two, 0.7).to_event(1))
        f = ppl.latent_gp("f", prior().expand(torch.Size([2])))
        ppl.observe("y", likelihood, f + b[where], y.expand(2, 3))

    def in_plates():
        with pyro.plate("groups", 2):
            b = pyro.sample("b", dist.Normal(two, 0.7))
            f = ppl.latent_gp("f", prior().expand(torch.Size([2])), event_dim=1)
        ppl.observe("y", likelihood, f + b[where], y.expand(2, 3))

    for name, draws in draw(together, num_samples=4, warmup=2).samples.items():
        torch.testing.assert_close(draws, draw(in_plates, num_samples=4, warmup=2).samples[name])


def test_with_no_other_sites_every_draw_is_the_exact_conditional():
    likelihood, y = laplace().requires_grad_(False), tensor(1.2)
    one = torch.ones(1, dtype=F64)

    def program():
        ppl.observe("y", likelihood, ppl.latent_gp("f", MultivariateNormal(0 * one, torch.diag(one))), y)

    draws = draw(program, num_samples=500, warmup=0)
    log_evidence = log_expectation(lambda f: likelihood.log_prob(y, f), 0 * one, one)
    for power in (1, 2):
        exact = expectation(lambda f, power=power: f**power * likelihood.log_prob(y, f).exp(), 0 * one, one)
        assert misfit(block_means(draws.samples["f"] ** power, 20), exact / log_evidence.exp()) < 1
    assert draws.diagnostics[0]["latent acceptance rate"] == 1.0


@pytest.mark.parametrize("name", MEMBERS)
def test_it_serves_every_likelihood_with_an_augmentation(name):
    member = MEMBERS[name]

    def program():
        f = ppl.latent_gp("f", prior())
        ppl.observe("y", member.likelihood, f + offset(), member.targets(3))

    draws = draw(program, num_samples=4, warmup=2)
    assert draws.diagnostics[0]["latent acceptance rate"] == 1.0
    assert bool(draws.samples["f"].isfinite().all())


@pytest.mark.slow
def test_a_tempered_likelihood_is_tempered():
    likelihood, y, one = laplace().requires_grad_(False), tensor(1.2), torch.ones(1, dtype=F64)

    def program():
        f = ppl.latent_gp("f", MultivariateNormal(0 * one, torch.diag(one)))
        with poutine.scale(scale=0.4):
            ppl.observe("y", likelihood, f, y)

    draws = draw(program, num_samples=600, warmup=0)
    mass = expectation(lambda f: (0.4 * likelihood.log_prob(y, f)).exp(), 0 * one, one)
    exact = expectation(lambda f: f * (0.4 * likelihood.log_prob(y, f)).exp(), 0 * one, one) / mass
    assert misfit(block_means(draws.samples["f"], 20), exact) < 1
    assert draws.diagnostics[0]["latent acceptance rate"] < 1


def test_draws_are_reproducible_and_leave_the_global_generator_alone():
    program = partial(everything, student_t().requires_grad_(False), tensor(0.4, 3.0, -1.0))
    state = torch.get_rng_state()
    first, second = (draw(program, num_samples=5, warmup=3, num_chains=2) for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    assert first.samples["f"].shape == (2, 5, 3)
    assert not torch.equal(first.samples["f"][0], first.samples["f"][1])
    for name, values in first.samples.items():
        assert torch.equal(values, second.samples[name]), name


def test_float32_and_a_batch():
    likelihood = likelihoods.BernoulliLogitLikelihood()
    y = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    p = MultivariateNormal(torch.zeros(2, 3), K.float().expand(2, 3, 3))

    def program():
        f = ppl.latent_gp("f", p, jitter=1e-4)
        ppl.observe("y", likelihood, f + pyro.sample("b", dist.Normal(0.0, 1.0)), y)

    draws = draw(program, num_samples=5, warmup=5)
    assert draws.samples["f"].shape == (1, 5, 2, 3)
    assert draws.samples["f"].dtype == torch.float32
    assert draws.diagnostics[0]["latent acceptance rate"] > 0.9  # one except for rounding


def subsampled(f, y):
    with pyro.plate("part", 3, subsample_size=2) as part:
        pyro.sample("z", dist.Normal(f[part], 2.0), obs=y[part])


REFUSED = {
    "another name": (lambda f, y: ppl.observe("y", student_t(), f, y), ValueError, "no latent GP site named 'g'.*'f'"),
    "nothing sees it": (lambda f, y: ppl.observe("y", student_t(), 0 * y, y), ValueError, "no likelihood sees 'f'"),
    "no augmentation": (
        lambda f, y: ppl.observe("y", likelihoods.PoissonLikelihood(), f, y.abs().round()),
        TypeError,
        "scale-mixture augmentation at 'y'.*got PoissonLikelihood.*NUTS",
    ),
    "fewer data": (lambda f, y: ppl.observe("y", student_t(), f[:2], y[:2]), ValueError, "one latent value a datum"),
    "a power": (lambda f, y: ppl.observe("y", student_t(), f**3, y), ValueError, "must see a f . b"),
    "a sum": (lambda f, y: ppl.observe("y", student_t(), f.cumsum(-1), y), ValueError, "must see a f . b"),
    "a subsampling plate": (
        lambda f, y: [ppl.observe("y", student_t(), f, y), subsampled(f, y)],
        NotImplementedError,
        "subsample sites",
    ),
    "a discrete site": (
        lambda f, y: ppl.observe("y", student_t(), f + pyro.sample("d", dist.Bernoulli(tensor(0.5)[0]))[..., None], y),
        ValueError,
        r"no moves for the discrete sites \['d'\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_refuses(case):
    see, error, message = REFUSED[case]

    def program():
        see(ppl.latent_gp("f", prior()), tensor(0.4, 3.0, -1.0))

    kernel = ppl.GibbsKernel(program, "g" if case == "another name" else "f")
    with pytest.raises(error, match=message):
        ppl.sample_posterior(kernel, num_samples=2, warmup=0, progress=False)
