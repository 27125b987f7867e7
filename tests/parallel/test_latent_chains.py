"""Chains of latent values over ranks: each rank has the draws it would have alone, and all ranks get all draws."""

import os
import resource
import signal
from dataclasses import replace

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.priors import GammaPrior, LogNormalPrior

from gpext.likelihoods import StudentTLikelihood
from gpext.models import LatentGP
from gpext.parallel import Ranks
from gpext.samplers import AugmentedSGLDSampler, GibbsSampler, storage
from gpext.samplers.engine import Start
from tests.members import F64
from tests.parallel.processes import run
from tests.statistics import misfit_between

pytestmark = pytest.mark.slow

N, CHAINS = 8, 5
X = torch.linspace(0, 3, N, dtype=F64).unsqueeze(-1)


class Model(LatentGP):
    def __init__(self, y):
        likelihood = StudentTLikelihood().to(F64)
        likelihood.register_prior("noise_prior", LogNormalPrior(-2.0, 0.7), "noise")
        super().__init__(X, y, likelihood)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.RBFKernel()
        self.covar_module.register_prior("lengthscale_prior", GammaPrior(4.0, 4.0), "lengthscale")
        self.to(X)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def sampler(kind, y=None):
    model = Model(torch.sin(2 * X[:, 0]) if y is None else y)
    return GibbsSampler(model) if kind == "gibbs" else AugmentedSGLDSampler(model, steps=2)


def drawn(kind, num_samples=4, num_chains=CHAINS, **options):
    generator = torch.Generator().manual_seed(7)
    defaults = {"thinning": 2, "generator": generator, "progress": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)
        patch.setattr(storage, "_CHUNK_BYTES", CHAINS * (N + 2) * 8 * 3)  # three draws a chunk
        return sampler(kind).run(num_samples, num_chains, 3, **{**defaults, **options})


@torch.no_grad()
def alone(kind, size, num_samples):
    """The draws of `size` ranks: each with a separate initial state, steps and generator."""
    seeds = torch.randint(2**62, (size + 1,), generator=torch.Generator().manual_seed(7)).tolist()
    made, latent, raw = sampler(kind), [], []
    for rank, seed in enumerate(seeds[1:]):
        generator, shared = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seeds[0])
        (state,) = made.init(Start(CHAINS, 3, [range(rank, CHAINS, size)], [generator], shared))
        for left in (3, 2, 1):
            state = made.step(replace(state, warmup_left=left), generator)
        kept, state = [], replace(state, warmup_left=0)
        for _ in range(num_samples):
            for _ in range(2):  # every second one is kept
                state = made.step(state, generator)
            kept.append(state)
        latent.append(torch.stack([each.latent for each in kept], 1))
        raw.append(torch.stack([each.raw for each in kept], 1))
    return torch.cat(latent), made.target.constrained(torch.cat(raw))


def same(found, expected):
    latent, hyperparameters = expected
    return torch.equal(found.latent, latent) and all(
        torch.equal(found.hyperparameters[name], value) for name, value in hyperparameters.items()
    )


def _twice(rank, kind, folder):
    """Draws to disk, and more that resume from these."""
    ranks = Ranks()
    first = drawn(kind, ranks=ranks, checkpoint=folder)
    loaded = sampler(kind).load(folder)
    more = drawn(kind, 3, ranks=ranks, checkpoint=folder, resume=loaded)
    chains = dict(more.to_arviz().posterior.sizes)["chain"]
    return first.latent, more.latent, more.hyperparameters, chains, sorted(os.listdir(folder))


@pytest.mark.parametrize("kind", ["gibbs", "sgld"])
def test_each_rank_draws_what_it_would_draw_alone(kind, tmp_path):
    whole, hyperparameters = alone(kind, 2, 7)
    for value, error in run(_twice, 2, kind, str(tmp_path)):
        assert error is None
        first, latent, found, chains, files = value
        assert torch.equal(first, whole[:, :4])
        assert torch.equal(latent, whole)
        assert all(torch.equal(found[name], each) for name, each in hyperparameters.items())
        assert chains == CHAINS
        assert files == [*(f"draws-{start:09d}.pt" for start in (0, 3, 4)), "state.pt"]
    read = sampler(kind).load(tmp_path)  # by one process, which also resumes both batches
    assert same(read, (whole, hyperparameters))
    assert same(drawn(kind, 2, resume=read), alone(kind, 2, 9))


def _in_memory(rank, seed):
    torch.manual_seed(rank)
    generator = None if seed is None else torch.Generator().manual_seed(seed + rank)
    return drawn("gibbs", ranks=Ranks(), generator=generator).latent


def test_the_generator_of_the_first_rank_counts():
    expected = alone("gibbs", 4, 4)
    for found, error in run(_in_memory, 4, 7):
        assert error is None
        assert torch.equal(found, expected[0])
    (first, _), (second, _) = run(_in_memory, 2, None)
    assert torch.equal(first, second)
    assert not torch.equal(first[0], first[3])  # of different ranks


def many(seed, ranks=None):
    model = Model(torch.sin(2 * X[:, 0]))
    generator = torch.Generator().manual_seed(7)
    made = GibbsSampler(model, hyperparameters=())
    return made.run(30, 200, 20, generator=generator, progress=False, ranks=ranks).latent


def _many(rank):
    return many(7, Ranks())


def test_draws_agree_with_those_of_one_process():
    """Chains are independent: a mean over each has a standard error from the chains alone."""
    (found, error), _ = run(_many, 2)
    assert error is None
    statistics = [torch.cat([f, f.square()], -1).mean(1) for f in (found, many(8))]
    assert misfit_between(*statistics) < 1


def _with(rank, fault, folder):
    """A run with a fault on rank 1 in its third draw, or its fifth; then another that resumes."""
    made = sampler("gibbs", torch.full((N,), 9.0, dtype=F64) if fault == "data" and rank == 1 else None)
    sweep, taken, limits = made.step, [], resource.getrlimit(resource.RLIMIT_FSIZE)

    def disturbed(state, generator):
        taken.append(1)
        if len(taken) == (12 if fault == "kill" else 8) and rank == 1:
            if fault == "diverges":
                raise FloatingPointError("no such model")
            if fault == "nan":
                state = replace(state, latent=state.latent * torch.nan)
            if fault in ("interrupt", "kill"):
                os.kill(os.getpid(), signal.SIGINT if fault == "interrupt" else signal.SIGKILL)
        if len(taken) == 8 and fault == "disk" and rank == 0:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        return sweep(state, generator)

    made.step = disturbed
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "sampler", lambda kind: made)
        number = 1 if fault == "few" else CHAINS
        found = drawn("gibbs", 6, number, ranks=Ranks(), checkpoint=folder)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        rest = drawn("gibbs", 6 - found.num_draws, ranks=Ranks(), resume=found)
    return found.status.name, found.latent, os.listdir(folder), rest.latent


@pytest.mark.parametrize(
    ("fault", "status", "draws"),
    [("interrupt", "INTERRUPTED", 2), ("diverges", "DIVERGED", 2), ("disk", "NOT_WRITTEN", 3)],
)
def test_what_ends_one_rank_ends_all_with_the_same_draws(fault, status, draws, tmp_path):
    expected, _ = alone("gibbs", 2, 6)
    for value, error in run(_with, 2, fault, str(tmp_path)):
        assert error is None
        ended, latent, files, whole = value
        assert ended == status
        assert torch.equal(latent, expected[:, :draws])
        assert not [name for name in files if name.endswith(".part")]
        assert torch.equal(whole, expected)


def test_a_killed_rank_is_missed_and_what_was_written_gone_on_with(tmp_path):
    (_, error), killed = run(_with, 2, "kill", str(tmp_path), timeout=20.0)
    assert killed is None
    assert error.startswith("RankError: rank 0 of 2 has lost another one")
    written = sampler("gibbs").load(tmp_path)
    assert written.num_draws == 3  # a chunk; a fourth draw was finished
    assert same(drawn("gibbs", 3, resume=written), alone("gibbs", 2, 6))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("nan", "Expected parameter rate"),
        ("few", "expected a chain for each of 2 ranks at least; got 1 chains"),
        ("data", "expected the same inputs and vectors on every rank"),
    ],
)
def test_bad_input_is_refused_on_every_rank(fault, message, tmp_path):
    for value, error in run(_with, 2, fault, str(tmp_path)):
        assert value is None
        assert error.startswith(f"ValueError: {message}")


def _of_one_batch(rank):
    return drawn("gibbs", 2, ranks=Ranks(), resume=drawn("gibbs", 2)).latent


def test_more_ranks_than_batches_cannot_go_on():
    for _, error in run(_of_one_batch, 2):
        assert error.startswith("ValueError: expected a chain for each of 2 ranks at least; got 1 batches")
