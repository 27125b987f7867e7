"""A checkpoint that is readable but wrong is rejected with the name of the entry, before anything has changed."""

import copy
import pickle

import pytest
import torch

import gpext
from gpext import files
from gpext.training import checkpoint as module
from gpext.training.checkpoint import Checkpoint
from gpext.training.minibatch import SiteStepper
from gpext.training.position import PositionSchema
from tests.parallel.test_fit import problem
from tests.spoiling import spoilt

OPTIONS = {"batch_size": 20, "tolerance": 0.0, "progress": False}
KEYS = ("mll", "ranks")


@pytest.fixture
def directory(tmp_path):
    """The checkpoint of a run of five steps."""
    mll, x, y = problem()
    gpext.fit(mll, x, y, max_steps=5, checkpoint=tmp_path, **OPTIONS)
    return tmp_path


def test_whatever_is_wrong_is_a_value_error_and_nothing_has_changed(directory, monkeypatch):
    content, _ = files.load(directory / "fit.pt", KEYS)
    read, wrong = [], {}

    def reading(*args):
        read.append(Checkpoint(*args))
        return read[0]

    monkeypatch.setattr("gpext.training.fitting.Checkpoint", reading)
    mll, x, y = problem()
    gpext.fit(mll, x, y, max_steps=5, checkpoint=directory, **OPTIONS)  # nothing remains to be done
    strategy, options = mll.model.variational_strategy, {"bound": "exact", "gradient": "exact"}
    stepper = SiteStepper(mll, strategy, mll.likelihood, 60, rate=1.0, learning_rate=0.05, **options)
    before, messages = copy.deepcopy(mll.state_dict()), []
    monkeypatch.setattr(module, "load", lambda *_: (wrong, ""))
    for fault, spoilt_content in spoilt(content):
        wrong = spoilt_content
        if set(wrong) != set(KEYS):
            continue  # `load` has checked that
        try:
            read[0].read(PositionSchema(stepper.optimizers))
        except ValueError as error:
            messages.append(str(error))
        else:
            pytest.fail(f"loads: {fault}")
    assert len(messages) > 200
    assert all(str(directory / "fit.pt") in message for message in messages)
    assert all(torch.equal(value, before[name]) for name, value in mll.state_dict().items())


@pytest.mark.parametrize("at", [("mll", "likelihood.raw_noise"), ("ranks", 0, "position", "optimizers", 0, "stepped")])
def test_fit_refuses_it_too(at, directory):
    content, _ = files.load(directory / "fit.pt", KEYS)
    inner = content
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = inner[at[-1]] * torch.nan if at[0] == "mll" else inner[at[-1]][1:]
    files.save(content, directory / "fit.pt")
    mll, x, y = problem()
    before, generator = copy.deepcopy(mll.state_dict()), torch.Generator().manual_seed(3)
    state = generator.get_state()
    with pytest.raises(ValueError, match=at[-1] if at[0] == "mll" else "state"):
        gpext.fit(mll, x, y, max_steps=9, checkpoint=directory, generator=generator, **OPTIONS)
    assert all(torch.equal(value, before[name]) for name, value in mll.state_dict().items())
    assert torch.equal(generator.get_state(), state)


def test_a_state_that_is_wrong_is_refused_as_well():
    mll, x, y = problem()
    good = gpext.fit(mll, x, y, max_steps=3, **OPTIONS).state_dict
    before = pickle.dumps(mll.state_dict())
    for name in good:
        wrong = {key: value for key, value in good.items() if key != name}
        with pytest.raises(ValueError, match=f"state must have an entry '{name}'"):
            gpext.fit(mll, x, y, max_steps=3, state=wrong, **OPTIONS)
    with pytest.raises(ValueError, match="state must have an entry"):
        gpext.fit(mll, x, y, max_steps=3, state={}, **OPTIONS)
    with pytest.raises(ValueError, match=r"state\['objective'\] must be a finite number; got float nan"):
        gpext.fit(mll, x, y, max_steps=3, state={**good, "objective": float("nan")}, **OPTIONS)
    assert pickle.dumps(mll.state_dict()) == before


def test_a_checkpoint_without_numbers_is_not_written(directory):
    mll, x, y = problem()
    path = directory / "fit.pt"
    written = path.read_bytes()

    def spoil(step, value):
        mll.likelihood.raw_noise.data.fill_(torch.nan)
        return True

    with pytest.warns(module.CheckpointWarning, match="the last one stays: the parameters or the objective are NaN"):
        gpext.fit(mll, x, y, max_steps=9, checkpoint=directory, callback=spoil, **OPTIONS)
    assert path.read_bytes() == written
