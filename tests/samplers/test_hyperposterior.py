"""Chains over hyperparameters against a grid, and the storage and predictions of their draws."""

import copy
import pickle
import sys

import arviz
import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.mlls import ExactMarginalLogLikelihood

from gpext import files
from gpext.inference import InferenceWarning
from gpext.mlls import UnbiasedMarginalLogLikelihood
from gpext.samplers import MetropolisHastings, SamplingStatus, SGLDSampler, draw_files
from gpext.samplers.targets.mode import mode_and_scale
from tests.samplers.hyper_cases import F64, N, QuickLogPosterior, constrained, covariance, grid_moments, problem, quick
from tests.statistics import block_means, misfit

BOTH = pytest.mark.parametrize("kind", [MetropolisHastings, SGLDSampler])


def run(sampler, *args, **options):
    return sampler.run(*args, progress=False, **{"generator": torch.Generator().manual_seed(0), **options})


def compared(found, length):
    """The misfit of means and variances of raw values to the grid, by blocks of this length, and effective sizes."""
    x, y = found.target.model.train_inputs[0].numpy(), found.target.model.train_targets.numpy()
    data = arviz.convert_to_dataset({"raw": found.raw.numpy()})
    mean, sd = (torch.from_numpy(each) for each in grid_moments(x, y))
    moments = torch.cat([found.raw, (found.raw - mean).square()], -1)
    blocks = block_means(moments, found.raw.size(1) // length)
    return misfit(blocks, torch.cat([mean, sd.square()])), arviz.ess(data)["raw"].values


@pytest.mark.slow
def test_metropolis_hastings_draws_the_posterior_and_mixes():
    found = run(quick(MetropolisHastings), 2500, 4, 400)
    error, sizes = compared(found, 250)
    assert error < 1
    assert sizes.min() > 600  # of 10000 draws
    assert found.status is SamplingStatus.MIXED
    assert 0.2 < float(found.acceptance.min()) < float(found.acceptance.max()) < 0.45


@pytest.mark.slow
def test_langevin_draws_are_of_the_posterior():
    found = run(quick(SGLDSampler), 1000, 4, 50, step_size=(0.2, 1.0, 1e-9))
    error, sizes = compared(found, 200)
    assert error < 1
    assert sizes.min() > 60
    assert bool(found.acceptance.isnan().all())


class NoisyLogPosterior(QuickLogPosterior):
    """Gradients with noise of covariance 8 M^-1, as of estimates."""

    is_estimated = True

    def gradient(self, raw, *, generator=None):
        exact = super().gradient(raw)
        if generator is None:
            return exact
        if not hasattr(self, "root"):
            self.root = torch.linalg.cholesky(torch.linalg.inv(mode_and_scale(self, torch.Generator())[1]))
        return exact + 8**0.5 * self.root @ torch.randn(2, dtype=F64, generator=generator)


@pytest.mark.slow
def test_noise_of_gradients_is_learnt_and_compensated():
    sampler = SGLDSampler(problem())
    sampler.target = NoisyLogPosterior(sampler.target.mll)
    found = run(sampler, 500, 4, 250)
    error, sizes = compared(found, 125)
    assert error < 1
    assert sizes.min() > 50
    for state in found.states:
        v = state.kernel.V @ sampler.target.root.inverse().mT @ sampler.target.root.inverse()
        assert 4 < float(torch.linalg.eigvals(v).real.min()) < float(torch.linalg.eigvals(v).real.max()) < 16
        assert 0.15 < state.kernel.step_size < 0.35
    wide = run(sampler, 500, 4, 50, step_size=0.3, compensated=False)
    ratio = wide.raw.flatten(0, 1).std(0) / found.raw.flatten(0, 1).std(0)
    assert float(ratio.min()) > 1.1  # 1.27 on a Gaussian: 1 + eps v / (4 - eps) of the variance


def test_steps_too_long_for_the_noise_are_told():
    sampler = SGLDSampler(problem())
    sampler.target = NoisyLogPosterior(sampler.target.mll)
    with pytest.warns(InferenceWarning, match="draws are too wide"):
        run(sampler, 5, 2, 60, step_size=0.9)


@pytest.mark.slow
def test_the_schedule_freezes_by_noise_that_was_learnt():
    sampler = SGLDSampler(problem())
    sampler.target = NoisyLogPosterior(sampler.target.mll)
    found = run(sampler, 1200, 1, 60, step_size=(0.9, 1.0, 1.0), freeze_below=0.005)
    state = found.states[0].kernel
    frozen_at, lr = state.frozen_at, state.step_size
    assert frozen_at > 60  # after the warm-up: V is that at the freeze
    assert lr == pytest.approx(0.9 / frozen_at)
    largest = float(torch.linalg.eigvals(state.M @ state.V).real.max())
    assert 0.25 * lr * largest < 0.005 <= 0.25 * 0.9 / (frozen_at - 1) * largest


def test_mode_and_scale_are_those_of_the_density():
    target = quick(SGLDSampler).target
    mode, M = mode_and_scale(target, torch.Generator().manual_seed(0))
    assert float(target.gradient(mode).abs().max()) < 0.02
    step = 0.3 * torch.linalg.cholesky(M)
    for column in step.mT:  # a parabola of curvature one, in units of M
        drop = target.value(mode) - 0.5 * (target.value(mode + column) + target.value(mode - column))
        assert drop == pytest.approx(0.5 * 0.09, rel=0.1)


def test_the_step_freezes_by_its_noise_with_unbiased_gradients():
    exact = problem()
    sampler = SGLDSampler(UnbiasedMarginalLogLikelihood(exact.likelihood, exact.model, 4))
    found = run(sampler, 130, 1, 0, step_size=(0.9, 9.0, 0.3), freeze_below=0.5)
    state = found.states[0].kernel
    assert 100 <= state.frozen_at < 130
    assert state.step_size == pytest.approx(0.9 * (9 + state.frozen_at - 1) ** -0.3)


@BOTH
def test_in_parts_it_draws_what_it_draws_at_once(kind, tmp_path):
    whole = run(quick(kind), 14, 2, 5, thinning=2)
    first = run(quick(kind), 6, 2, 5, thinning=2, checkpoint=tmp_path)
    assert torch.equal(run(quick(kind), 8, thinning=2, resume=first).raw, whole.raw)
    loaded = quick(kind).load(tmp_path)
    again = run(quick(kind), 8, thinning=2, resume=loaded, checkpoint=tmp_path)
    assert torch.equal(again.raw, whole.raw)
    assert torch.equal(again.acceptance, whole.acceptance) or bool(whole.acceptance.isnan().all())
    assert torch.equal(quick(kind).load(tmp_path).raw, whole.raw)


@BOTH
def test_a_sampler_starts_anew_whatever_it_has_drawn(kind):
    sampler = quick(kind)
    assert torch.equal(run(sampler, 3, 2, 5).raw, run(sampler, 3, 2, 5).raw)


@pytest.mark.slow
def test_estimates_of_gradients_are_gone_on_with_too():
    def sampler():
        exact = problem()
        return SGLDSampler(UnbiasedMarginalLogLikelihood(exact.likelihood, exact.model, 2))

    whole = run(sampler(), 8, 2, 45)
    assert torch.equal(run(sampler(), 5, resume=run(sampler(), 3, 2, 45)).raw, whole.raw)


class Interrupt:
    """Raise KeyboardInterrupt at the n-th line that runs in the samplers' own files, once draws are under way."""

    def __init__(self, at):
        self.left = at

    def __call__(self, frame, event, arg):
        name = frame.f_code.co_filename
        if "gpext/samplers" not in name and "gpext/optim" not in name:
            return None
        inside = ("step", "_run", "_next", "steps", "stepped", "take", "gradient")
        if event == "line" and frame.f_code.co_name in inside:
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


@pytest.mark.slow
@BOTH
def test_interrupted_anywhere_it_keeps_what_is_finished(kind):
    whole, interrupted = run(quick(kind), 5, 2, 1), 0
    for at in range(60, 700, 61):
        sampler = quick(kind)
        try:
            sys.settrace(Interrupt(at))
            with pytest.warns(InferenceWarning, match="interrupted"):
                found = run(sampler, 5, 2, 1)
        except (KeyboardInterrupt, pytest.fail.Exception):  # outside the loop, or at the end of the run
            continue
        finally:
            sys.settrace(None)
        assert found.status is SamplingStatus.INTERRUPTED
        assert torch.equal(found.raw, whole.raw[:, : found.raw.size(1)])
        if (left := 5 - found.raw.size(1)) > 0:
            assert torch.equal(run(quick(kind), left, resume=found).raw, whole.raw)
            interrupted += 1
    assert interrupted > 1


class Killed(BaseException):
    """End a run as a signal would: nothing is caught, nothing is written."""


@BOTH
def test_killed_it_goes_on_from_the_checkpoint(kind, tmp_path, monkeypatch):
    whole = run(quick(kind), 12, 2, 3)
    monkeypatch.setattr(files.Pace, "is_due", lambda *_: True)
    sampler, steps = quick(kind), 0
    step = sampler.step

    def counted(state, generator):
        nonlocal steps
        steps += 1
        if steps > 19:
            raise Killed
        return step(state, generator)

    monkeypatch.setattr(sampler, "step", counted)
    with pytest.raises(Killed):
        run(sampler, 12, 2, 3, checkpoint=tmp_path)
    (tmp_path / "state.part").write_bytes(b"half a file")
    found = quick(kind).load(tmp_path)
    assert found.raw.shape == (2, 6, 2)
    assert torch.equal(run(quick(kind), 6, resume=found, checkpoint=tmp_path).raw, whole.raw)
    assert not (tmp_path / "state.part").exists()


@BOTH
def test_a_checkpoint_of_another_run_is_not_overwritten(kind, tmp_path):
    run(quick(kind), 3, 2, 0, checkpoint=tmp_path)
    with pytest.raises(ValueError, match="another run"):
        run(quick(kind), 3, 2, 0, checkpoint=tmp_path)
    with pytest.raises(ValueError, match="that this sampler can resume, hyperparameters"):
        kind(problem(), ["covar_module.lengthscale"]).load(tmp_path)
    with pytest.raises(FileNotFoundError, match="found none"):
        quick(kind).load(tmp_path / "elsewhere")


def test_draws_survive_a_checkpoint_that_cannot_be_written(tmp_path, monkeypatch):
    save, written = draw_files.save, []

    def full(*args):
        written.append(args)
        if len(written) > 1:  # after the states at the start
            raise OSError("no space left")
        return save(*args)

    monkeypatch.setattr(draw_files, "save", full)
    with pytest.warns(InferenceWarning, match="no space left"):
        found = run(quick(SGLDSampler), 4, 2, 0, checkpoint=tmp_path)
    assert found.status is SamplingStatus.NOT_WRITTEN
    assert found.raw.shape == (2, 4, 2)


def test_a_chain_that_diverges_says_so_and_its_draws_survive():
    with pytest.warns(InferenceWarning, match="smaller step"):
        found = run(quick(SGLDSampler), 4000, 3, 0, step_size=(3000.0, 1.0, 1e-9))
    assert found.status is SamplingStatus.DIVERGED
    assert found.raw.size(0) == 3
    assert bool(found.raw.isfinite().all())


def test_draws_by_name_in_constrained_space_and_for_arviz():
    found = run(quick(MetropolisHastings), 10, 3, 0)
    noise, lengthscale = constrained(found.raw.numpy())
    assert found.draws["covar_module.lengthscale"].shape == (3, 10, 1, 1)
    np.testing.assert_allclose(found.draws["covar_module.lengthscale"].flatten(1), lengthscale)
    np.testing.assert_allclose(found.draws["likelihood.noise_covar.noise"].flatten(1), noise)
    exported = found.to_arviz().posterior
    assert exported.sizes["chain"] == 3
    assert exported.sizes["draw"] == 10
    np.testing.assert_array_equal(exported["covar_module.lengthscale"], found.draws["covar_module.lengthscale"])


def test_predictions_are_the_average_of_gaussians():
    found = run(MetropolisHastings(problem()), 5, 2, 3)
    model = found.target.model
    x, y = model.train_inputs[0].numpy(), model.train_targets.numpy()
    new = torch.tensor([[0.3], [2.2], [9.0]], dtype=F64)
    means, variances = [], []
    names = ("likelihood.noise_covar.noise", "covar_module.lengthscale")
    for noise, lengthscale in zip(*(found.draws[name].flatten().numpy() for name in names), strict=True):
        matrix = covariance(x, x, lengthscale) + noise * np.eye(len(y))
        cross = covariance(new.numpy(), x, lengthscale)
        means.append(cross @ np.linalg.solve(matrix, y))
        variances.append(1 + noise - (cross * np.linalg.solve(matrix, cross.T).T).sum(-1))
    means, variances = np.array(means), np.array(variances)
    with gpytorch.settings.max_cholesky_size(5), gpytorch.settings.eval_cg_tolerance(1.0):
        predicted = found.predict(new)  # exact beyond gpytorch's limit, too
    np.testing.assert_allclose(predicted.mean, means.mean(0), rtol=1e-6)
    np.testing.assert_allclose(predicted.variance, variances.mean(0) + means.var(0), rtol=1e-6)
    at = torch.tensor([0.1, -0.4, 0.7], dtype=F64)
    density = np.exp(-0.5 * (at.numpy() - means) ** 2 / variances) / np.sqrt(2 * np.pi * variances)
    np.testing.assert_allclose(predicted.log_prob(at).exp(), density.mean(0), rtol=1e-6)
    assert found.predict(new, num_draws=2).mean.shape == (3,)
    with pytest.raises(ValueError, match="num_draws must be at least 1"):
        found.predict(new, num_draws=0)


def test_copies_and_pickles():
    found = run(MetropolisHastings(problem()), 4, 2, 0)
    new = torch.tensor([[0.3]], dtype=F64)
    assert torch.equal(copy.deepcopy(found).predict(new).mean, found.predict(new).mean)
    mll = problem()  # a prior that gpytorch registers by name makes a module that cannot be pickled
    for module in mll.model.modules():
        if isinstance(module, gpytorch.Module):
            module._priors.clear()
    plain = run(SGLDSampler(mll), 2, 2, 0)
    assert torch.equal(pickle.loads(pickle.dumps(plain)).predict(new).mean, plain.predict(new).mean)


def test_a_single_precision_model():
    found = run(SGLDSampler(problem(torch.float32)), 3, 2, 0)
    assert found.draws["covar_module.lengthscale"].dtype == torch.float32
    assert found.predict(torch.zeros(1, 1)).mean.dtype == torch.float32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@BOTH
def test_on_a_gpu(kind):
    mll = problem()
    mll.model.cuda()
    mll.model.set_train_data(mll.model.train_inputs[0].cuda(), mll.model.train_targets.cuda(), strict=False)
    found, same = run(kind(mll), 5, 2, 2), run(kind(problem()), 5, 2, 2)
    torch.testing.assert_close(found.raw, same.raw, rtol=1e-4, atol=1e-4)
    new = torch.tensor([[0.3], [2.2]], dtype=F64)
    torch.testing.assert_close(found.predict(new.cuda()).mean.cpu(), same.predict(new).mean, rtol=1e-4, atol=1e-4)


def test_bad_input():
    mll = problem()
    with pytest.raises(TypeError, match="SGLDSampler"):
        MetropolisHastings(UnbiasedMarginalLogLikelihood(mll.likelihood, mll.model))
    for kind in (MetropolisHastings, SGLDSampler):
        with pytest.raises(ValueError, match="num_samples"):
            kind(mll).run(0)
        with pytest.raises(ValueError, match="warmup"):
            kind(mll).run(2, warmup=-1)
    with pytest.raises(ValueError, match="warm-up of more than 40"):
        SGLDSampler(UnbiasedMarginalLogLikelihood(mll.likelihood, mll.model)).run(2, warmup=40)
    with pytest.raises(ValueError, match=r"expected a preconditioner \(2, 2\)"):
        SGLDSampler(mll).run(2, preconditioner=torch.ones(3))
    draws = MetropolisHastings(mll).run(2, num_chains=1, warmup=1, progress=False)
    for bad, match in ((torch.tensor([torch.inf]), "x must be finite"), (torch.zeros(2, 7), r"got \(2, 7\)")):
        with pytest.raises(ValueError, match=match):
            draws.predict(bad)
    for step_size in (0.0, -1.0, torch.inf):
        with pytest.raises(ValueError, match="step_size must be positive and finite"):
            SGLDSampler(mll).run(2, step_size=step_size)
    edge = copy.deepcopy(mll)
    edge.likelihood.noise_covar.raw_noise.data.fill_(-torch.inf)
    with pytest.raises(ValueError, match=r"noise \[9.9.*e-05\].* inside their bounds"):
        MetropolisHastings(edge).run(2)
    x, y = mll.model.train_inputs[0], mll.model.train_targets
    for bad, match in (
        ({"targets": torch.full_like(y, torch.nan)}, "targets must be finite; got nan at index 0"),
        ({"targets": y, "inputs": torch.full_like(x, torch.inf)}, "inputs must be finite; got inf at index"),
    ):
        mll.model.set_train_data(**bad, strict=False)
        with pytest.raises(ValueError, match=match):
            MetropolisHastings(ExactMarginalLogLikelihood(mll.likelihood, mll.model))


@pytest.mark.parametrize("kind", [MetropolisHastings, SGLDSampler])
def test_what_is_no_option_is_refused(kind):
    for options, match in (
        ({"num_samples": 2.5}, r"num_samples must be a whole number; got 2\.5"),
        ({"num_chains": "4"}, "num_chains must be a whole number; got '4'"),
        ({"generator": 3}, r"expected a torch\.Generator; got 3"),
        ({"resume": 3}, "resume must be the result of an earlier run; got int"),
        ({"ranks": 2}, r"expected gpext\.parallel\.Ranks\(\), the processes that take part; got 2"),
    ):
        with pytest.raises(TypeError, match=match):
            kind(problem()).run(**{"num_samples": 2, **options})


def test_a_preconditioner_that_is_none_is_refused():
    for M, error, match in (
        (3.0, TypeError, "must be a torch.Tensor; got float"),
        (-torch.eye(2), ValueError, "not symmetric and positive definite"),
        (torch.tensor([[1.0, 0.5], [0.0, 1.0]]), ValueError, "not symmetric and positive definite"),
    ):
        with pytest.raises(error, match=match):
            SGLDSampler(problem()).run(2, preconditioner=M)
    with pytest.raises(ValueError, match="freeze_below must not be negative"):
        SGLDSampler(problem()).run(2, freeze_below=-1.0)


def test_draws_of_something_else_are_not_gone_on_with(tmp_path):
    draws = run(MetropolisHastings(problem()), 3, 2, 0, checkpoint=tmp_path)
    other_model = problem()
    other_model.model.covar_module.eps = 2.0
    for made, match in (
        (SGLDSampler(problem()), "sampler SGLD; got Metropolis-Hastings"),
        (MetropolisHastings(problem(seed=1)), "fingerprint of the data"),
        (MetropolisHastings(problem(), ["covar_module.lengthscale"]), "hyperparameters"),
        (MetropolisHastings(other_model), r"model \['covar_module\.eps = 2\.0'\]; got \[\]"),
    ):
        with pytest.raises(ValueError, match=match):
            made.load(tmp_path)
        with pytest.raises(ValueError, match=match):
            made.run(2, resume=draws, progress=False)


@pytest.mark.parametrize("content", [b"", b"something", None])
def test_a_damaged_checkpoint_is_told(content, tmp_path):
    run(quick(MetropolisHastings), 3, 2, 0, checkpoint=tmp_path)
    path = tmp_path / "state.pt"
    path.write_bytes(path.read_bytes()[:1000] if content is None else content)
    with pytest.raises(ValueError, match=r"state\.pt is damaged, or was not written by gpext .*Delete it"):
        quick(MetropolisHastings).load(tmp_path)


def test_batches_of_models_are_refused_and_batches_of_inputs_predicted():
    mll = problem()
    draws = SGLDSampler(UnbiasedMarginalLogLikelihood(mll.likelihood, mll.model)).run(2, 2, 50, progress=False)
    x = torch.linspace(0, 5, 6, dtype=F64).view(3, 2, 1)
    torch.testing.assert_close(draws.predict(x).mean.flatten(), draws.predict(x.flatten()).mean)
    with pytest.raises(TypeError, match="x"):
        draws.predict([[1.0]])
    (inputs,), y = mll.model.train_inputs, mll.model.train_targets
    mll.model.set_train_data(inputs.expand(2, N, 1), y.expand(2, N), strict=False)
    with pytest.raises(ValueError, match=r"no batch of them; got \(2, 12, 1\)"):
        MetropolisHastings(mll)
    with pytest.raises(ValueError, match=r"no batch and one task; got \(2, 12\)"):
        UnbiasedMarginalLogLikelihood(mll.likelihood, mll.model)
