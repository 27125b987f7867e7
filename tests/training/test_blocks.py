"""Training by blocks: the sum of the terms, their mean gradient, and what remains of the model afterwards."""

from __future__ import annotations

import math

import pytest
import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from gpytorch.mlls import AddedLossTerm
from gpytorch.priors import GammaPrior
from linear_operator.utils.errors import NanError

from gpext import FitStatus, fit
from gpext.inference import EP, KL, Laplace
from gpext.likelihoods import (
    BernoulliLogitLikelihood,
    HeteroscedasticGaussianLikelihood,
    MultinomialLogitLikelihood,
    PoissonLikelihood,
)
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.training.blocks import Blocks, BlockStepper
from tests.members import F64
from tests.models.test_neighbours import Model

N = 60


def problem(likelihood=None, rule=None, neighbours=N - 1, n=N, dtype=F64):
    """Return the objective of counts, or of what a likelihood takes, with a prior on the outputscale."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, 2, generator=generator, dtype=F64).to(dtype)
    counts = torch.poisson((1 + torch.sin(6 * x[:, 0])).exp(), generator=generator)
    likelihood = PoissonLikelihood() if likelihood is None else likelihood
    if isinstance(likelihood, BernoulliLogitLikelihood):
        counts = (counts > 2).to(dtype)
    if isinstance(likelihood, MultinomialLogitLikelihood):
        counts = counts.long() % 3
    model = Model(x, counts, likelihood, rule or Laplace(), neighbours=neighbours, fill_in=True)
    model.covar_module.register_prior("outputscale_prior", GammaPrior(2.0, 1.0).to(x), "outputscale")
    return LatentMarginalLogLikelihood(likelihood, model).train()


def data(mll):
    return mll.model.train_inputs[0], mll.model.train_targets


class NoAddedLossTerm(AddedLossTerm):
    def loss(self):
        return torch.zeros(())


def divided(mll, size=13, margin=math.inf):
    return Blocks(mll, size, margin, torch.Generator().manual_seed(1))


def gradient(mll, value):
    parameters = [p for p in mll.parameters() if p.requires_grad]
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    return torch.cat(
        [torch.zeros_like(p).flatten() if g is None else g.flatten() for p, g in zip(parameters, found, strict=True)]
    )


def left(mll):
    return torch.cat([p.grad.flatten() for p in mll.parameters() if p.requires_grad])


def test_the_sum_of_the_terms_is_the_exact_evidence_of_gaussian_data():
    mll = problem(GaussianLikelihood(), KL())
    mll.model.likelihood.noise = 0.4
    x, y = data(mll)
    found = divided(mll)
    assert len(found) > 4
    total = sum(found.log_evidence(place) for place in range(len(found)))
    exact = mll.likelihood(mll.model.forward(x)).log_prob(y)
    torch.testing.assert_close(total, exact, rtol=1e-8, atol=0.0)
    torch.testing.assert_close(gradient(mll, total), gradient(mll, exact), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("rule", [Laplace(), EP()], ids=lambda rule: type(rule).__name__)
def test_the_mean_of_the_steps_over_blocks_is_the_gradient_of_the_sum(rule):
    mll = problem(BernoulliLogitLikelihood(), rule, neighbours=6)
    found, stepper = divided(mll, margin=1.0), BlockStepper(mll, 0.1)
    parts = []
    values = []
    for place in range(len(found)):
        values.append(stepper.differentiate(found, place))
        parts.append(left(mll))
    log_prior = GammaPrior(2.0, 1.0).log_prob(mll.model.covar_module.outputscale)
    total = (sum(found.log_evidence(place) for place in range(len(found))) + log_prior) / N
    assert sum(values) / len(found) == pytest.approx(total.item(), abs=1e-7)
    torch.testing.assert_close(sum(parts) / len(found), -gradient(mll, total), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("rule", [Laplace(), EP(), KL()], ids=lambda rule: type(rule).__name__)
def test_one_block_is_the_objective(rule):
    mll = problem(rule=rule, neighbours=8)
    x, y = data(mll)
    value = BlockStepper(mll, 0.1).differentiate(divided(mll, size=N), 0)
    by_block = left(mll)
    expected = mll(mll.model(x), y)
    assert value == pytest.approx(expected.item(), abs=1e-7)
    torch.testing.assert_close(by_block, -gradient(mll, expected), rtol=1e-5, atol=1e-7)


def test_the_terms_see_earlier_blocks_alone_and_no_farther_than_the_margin():
    mll, seen = problem(), []
    found = divided(mll, margin=1.0)
    evidence = mll.log_evidence

    def spied(prior, targets):
        seen.append(mll.model.train_inputs[0])
        return evidence(prior, targets)

    mll.log_evidence = spied
    before = torch.zeros(0, 2, dtype=F64)
    for place in range(len(found)):
        seen.clear()
        found.log_evidence(place)
        halo = seen[1] if len(seen) == 2 else before[:0]
        assert all(bool((before == x).all(-1).any()) for x in halo)
        assert len(halo) < N // 2
        own = seen[0][: len(seen[0]) - len(halo)]
        before = torch.cat([before, own])
    assert len(before) == N


def test_training_learns_and_leaves_the_model_with_all_its_data():
    mll = problem(neighbours=8, n=200)
    x, y = data(mll)
    before = mll(mll.model(x), y).item()
    sites = mll.model.variational_strategy.sites
    result = fit(mll, x, y, batch_size=50, max_steps=60, progress=False)
    assert result.status is FitStatus.MAX_STEPS
    assert result.num_steps == 60
    assert "4 blocks of at most 50 data, with margins of 10" in result.message
    assert not mll.model.training
    assert mll.model.train_inputs[0] is x
    assert mll.model.train_targets is y
    assert torch.equal(mll.model.variational_strategy.sites.shift, sites.shift)
    scale = mll.model.covar_module.base_kernel.lengthscale.detach().squeeze()
    torch.testing.assert_close(mll.model.variational_strategy.neighbours.scale, scale)
    mll.train()
    after = mll(mll.model(x), y).item()
    by_all = problem(neighbours=8, n=200)
    best = fit(by_all, x, y, progress=False).objective
    assert after > before
    assert best - after < 0.1 * (best - before)


def test_training_is_deterministic():
    traces = []
    for _ in range(2):
        mll = problem(neighbours=5)
        generator = torch.Generator().manual_seed(3)
        traces.append(fit(mll, *data(mll), batch_size=20, max_steps=8, generator=generator, progress=False).trace)
    assert torch.equal(*traces)


@pytest.mark.parametrize("error", [NanError("lost"), KeyboardInterrupt(), RuntimeError("other")], ids=repr)
def test_after_an_error_parameters_are_the_last_good_ones(error):
    mll = problem(neighbours=5)
    x, y = data(mll)
    mll(mll.model(x), y)
    sites, evidence, good = mll.model.variational_strategy.sites, mll.log_evidence, []

    def breaks(prior, targets):
        if len(good) > 5:
            raise error
        good.append([p.detach().clone() for p in mll.parameters()])
        return evidence(prior, targets)

    mll.log_evidence = breaks
    if isinstance(error, RuntimeError) and not isinstance(error, NanError):
        with pytest.raises(RuntimeError, match="other"):
            fit(mll, x, y, batch_size=20, progress=False)
    else:
        result = fit(mll, x, y, batch_size=20, progress=False)
        expected = FitStatus.BREAKDOWN if isinstance(error, NanError) else FitStatus.INTERRUPTED
        assert result.status is expected
    if isinstance(error, NanError):
        assert any(all(torch.equal(p, q) for p, q in zip(mll.parameters(), each, strict=True)) for each in good)
    assert mll.model.train_inputs[0] is x
    assert mll.model.train_targets is y
    assert torch.equal(mll.model.variational_strategy.sites.shift, sites.shift)


def test_the_callback_ends_training():
    mll = problem(neighbours=5)
    result = fit(mll, *data(mll), batch_size=20, callback=lambda step, value: step == 3, progress=False)
    assert result.status is FitStatus.STOPPED
    assert result.num_steps == 3


@pytest.mark.parametrize(
    "likelihood", [MultinomialLogitLikelihood(3), HeteroscedasticGaussianLikelihood()], ids=lambda x: type(x).__name__
)
def test_several_latents(likelihood):
    mll = problem(likelihood, KL(), neighbours=5)
    result = fit(mll, *data(mll), batch_size=20, max_steps=6, progress=False)
    assert result.num_steps == 6
    assert bool(result.trace.isfinite().all())


def test_float32():
    mll = problem(neighbours=5, dtype=torch.float32)
    result = fit(mll, *data(mll), batch_size=20, max_steps=6, progress=False)
    assert result.num_steps == 6
    in_double = problem(neighbours=5)
    expected = fit(in_double, *data(in_double), batch_size=20, max_steps=6, progress=False)
    torch.testing.assert_close(result.trace, expected.trace, rtol=1e-3, atol=1e-3)


def test_what_is_refused(tmp_path):
    mll = problem(neighbours=5)
    x, y = data(mll)
    with pytest.raises(ValueError, match="cannot be resumed"):
        fit(mll, x, y, batch_size=20, checkpoint=tmp_path)
    with pytest.raises(ValueError, match="begins the full batch"):
        fit(mll, x, y, batch_size=20, initial="subset")
    with pytest.raises(ValueError, match="targets must be those of the model"):
        fit(mll, x, y + 1, batch_size=20)
    noisy = FixedNoiseGaussianLikelihood(torch.ones(N, dtype=F64))
    fixed = LatentMarginalLogLikelihood(noisy, Model(x, y, noisy, KL(), neighbours=5))
    with pytest.raises(TypeError, match=r"a batch_size cannot take a part.*Weighted"):
        fit(fixed, x, y, batch_size=20)
    mll.model.register_added_loss_term("loss")
    mll.model.update_added_loss_term("loss", NoAddedLossTerm())
    with pytest.raises(NotImplementedError, match="added losses"):
        fit(mll, x, y, batch_size=20, max_steps=1)
