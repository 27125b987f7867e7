"""Minibatches: evaluated together as one by one, resumed bit for bit, and ended where the full batch ends."""

import copy
import functools
import pickle

import pytest
import torch

from gpext import fit
from gpext.likelihoods import LaplaceLikelihood
from gpext.mlls import AugmentedELBO
from gpext.training import minibatch
from gpext.training.minibatch import Minibatches, decay, default_rate, hyperparameter_interval
from gpext.variational import CollapsedBound, SiteVariationalStrategy
from tests.members import F64
from tests.sparse_models import SparseGP

N, SIZE = 110, 5  # 22 minibatches an epoch, the hyperparameters at every fourth step
OPTIONS = {"batch_size": SIZE, "progress": False, "tolerance": -1e9}


def problem(dtype=F64):
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(N, 2, generator=generator, dtype=F64)
    y = torch.sin(2 * x[:, 0]) + 0.2 * torch.randn(N, generator=generator, dtype=F64)
    model = SparseGP(x[:8].clone().to(dtype))
    return AugmentedELBO(LaplaceLikelihood().to(dtype), model, num_data=N), x.to(dtype), y.to(dtype)


def trained(num_steps, dtype=F64, **options):
    mll, x, y = problem(dtype)
    make_callback = options.pop("make_callback", lambda mll: None)
    result = fit(mll, x, y, max_steps=num_steps, callback=make_callback(mll), **OPTIONS, **options)
    return [result.trace, *(p.detach() for p in mll.parameters())]


def assert_same(actual, expected, tolerance):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def moving_a_parameter(mll):
    """Change a parameter between steps that leave the hyperparameters alone."""

    model = mll.model

    def callback(step, value):
        if step == 18:
            mll.likelihood.raw_noise.data.add_(1.0)
        if step == 30:
            model.covar_module.base_kernel.raw_lengthscale.data.add_(0.5)
        if step == 39:
            state = {
                name: value + 0.1 if "outputscale" in name else value for name, value in model.state_dict().items()
            }
            model.load_state_dict(state)

    return callback


def evaluations(monkeypatch):
    """The sizes of the batches given to `prepare`."""
    sizes, prepare = [], SiteVariationalStrategy.prepare

    def counted(self, x, *others):
        sizes.append(x.size(-2))
        return prepare(self, x, *others)

    monkeypatch.setattr(SiteVariationalStrategy, "prepare", counted)
    return sizes


def test_the_setting_is_one_with_several_steps_between_two_of_the_hyperparameters():
    assert hyperparameter_interval(SIZE, N) == 4
    assert (N // SIZE) % 4 != 0  # an epoch ends between


@pytest.mark.parametrize("make_callback", [lambda mll: None, moving_a_parameter])
def test_together_is_one_by_one(make_callback, monkeypatch):
    sizes = evaluations(monkeypatch)
    together = trained(60, make_callback=make_callback)
    assert max(sizes) == 3 * SIZE
    assert len(sizes) < 25  # for 45 steps in q(u) alone
    monkeypatch.setattr(minibatch, "_TOGETHER", 1)
    assert_same(together, trained(60, make_callback=make_callback), 1e-9)
    assert set(sizes[-45:]) == {SIZE}


def test_q_alone_steps_as_by_updates_of_its_own():
    mll, x, y = problem()
    for parameter in [*mll.model.hyperparameters(), *mll.likelihood.parameters()]:
        parameter.requires_grad_(False)
    alone = copy.deepcopy(mll)
    fit(mll, x, y, max_steps=30, **OPTIONS)
    batches = Minibatches(N, SIZE, torch.Generator().manual_seed(0))
    for _ in range(30):
        index = batches.draw()
        alone.model.base.update(x[index], y[index], alone.likelihood, default_rate(SIZE / N), N)
    assert_same(mll.model.natural, alone.model.natural, 1e-10)


@pytest.mark.parametrize("first", [1, 7, 22, 23])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_resuming_between_two_steps_of_the_hyperparameters_is_going_on_bit_for_bit(first, dtype):
    whole, x, y = problem(dtype)
    parts, _, _ = problem(dtype)
    expected = fit(whole, x, y, max_steps=31, **OPTIONS)
    begun = fit(parts, x, y, max_steps=first, **OPTIONS)
    parts = pickle.loads(pickle.dumps(parts))
    ended = fit(parts, x, y, max_steps=31 - first, state=pickle.loads(pickle.dumps(begun.state_dict)), **OPTIONS)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, parts.state_dict()[name]), name
    assert torch.equal(expected.trace, torch.cat([begun.trace, ended.trace]))


def test_a_limit_on_what_is_evaluated_together(monkeypatch):
    sizes = evaluations(monkeypatch)
    monkeypatch.setattr(minibatch, "_TOGETHER", 2 * SIZE + 1)
    limited = trained(30)
    assert max(sizes) == 2 * SIZE
    monkeypatch.undo()
    assert_same(limited, trained(30), 1e-9)


@functools.cache
def large():
    """1200 data, as many as minibatches need to begin on a sample: here all of them."""
    generator = torch.Generator().manual_seed(1)
    x = 4 * torch.rand(1200, 2, generator=generator, dtype=F64)
    y = torch.sin(2 * x[:, 0]) + x[:, 1] + 0.3 * torch.randn(1200, generator=generator, dtype=F64)
    return x, y


def large_objective():
    x, y = large()
    return AugmentedELBO(LaplaceLikelihood().double(), SparseGP(x[:20].clone()), num_data=len(y))


def test_minibatches_end_near_the_full_batch():
    ends = []
    for batch_size in (None, 100):
        mll = large_objective()
        fit(mll, *large(), batch_size=batch_size, progress=False)
        x, y = large()
        bound = CollapsedBound(mll.model.base, mll.likelihood, x, y, bound="exact")
        ends.append(float(bound.settle()) / len(y))
    assert ends[1] > ends[0] - 0.01


def test_resuming_after_the_sample_is_going_on_bit_for_bit(tmp_path):
    options = {"batch_size": 100, "progress": False, "tolerance": -1e9}
    whole, parts, again = (large_objective() for _ in range(3))
    expected = fit(whole, *large(), max_steps=120, **options)
    begun = fit(parts, *large(), callback=lambda step, value: step == 105, checkpoint=tmp_path, **options)
    assert 0 < begun.state_dict["batches"]["num_drawn"] < 105  # on the sample before that
    fit(parts, *large(), max_steps=15, state=begun.state_dict, **options)
    resumed = fit(again, *large(), max_steps=120, checkpoint=tmp_path, **options)
    assert torch.equal(resumed.trace, expected.trace)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, parts.state_dict()[name]), name
        assert torch.equal(value, again.state_dict()[name]), name


def test_a_fit_stopped_on_the_sample_has_a_state_that_begins_there_again(tmp_path):
    mll = large_objective()
    stopped = fit(mll, *large(), batch_size=100, max_steps=2, checkpoint=tmp_path, progress=False)
    assert stopped.num_steps == 2
    assert not list(tmp_path.iterdir())
    result = fit(mll, *large(), batch_size=100, max_steps=40, state=stopped.state_dict, progress=False)
    assert result.num_steps == 40
    assert result.state_dict["batches"]["num_drawn"] < 40


def test_noise_does_not_keep_training_from_converging():
    """Five epochs are compared with five before, at the end of an epoch."""
    mll, x, y = problem()
    result = fit(mll, x, y, batch_size=SIZE, progress=False)
    assert result.num_steps % (N // SIZE) == 0
    assert result.num_steps >= 10 * (N // SIZE)


def test_step_sizes_fall_after_the_first_epochs():
    assert [decay(step, 50) for step in (0, 249, 499, 2499)] == [1, 1, 0.5, 0.1]
    assert decay(99, 4) == 1 > decay(100, 4)  # at least a hundred steps


def test_a_batch_larger_than_the_data_is_all_of_them():
    x = torch.linspace(0, 1, 1200, dtype=F64).unsqueeze(-1)
    y = torch.sin(6 * x[:, 0])

    def trace(batch_size):
        model = SparseGP(x[::120].clone())
        mll = AugmentedELBO(LaplaceLikelihood().double(), model, num_data=len(y))
        return fit(mll, x, y, batch_size=batch_size, max_steps=20, progress=False).trace

    assert torch.equal(trace(5000), trace(1200))
