"""Training that is killed repeatedly ends with the same parameters as an uninterrupted run."""

import os
import random
import signal

import pytest
import torch

import gpext
from gpext import files
from gpext.training import checkpoint as module
from tests.parallel.processes import run
from tests.parallel.test_fit import numbers, problem

pytestmark = pytest.mark.slow

STEPS = 60


def train(rows, folder=None, callback=None, **more):
    mll, x, y = problem()
    options = {"batch_size": 20, "max_steps": STEPS, "tolerance": 0.0, "progress": False, **more}
    return numbers(mll, gpext.fit(mll, x[rows], y[rows], callback=callback, checkpoint=folder, **options))


def _rank(rank, size, folder=None, victim=None, last=None):
    files.Pace.is_due = lambda *_: True  # in a separate process
    taken = []

    def callback(step, value):
        taken.append(step)
        if rank == victim and len(taken) == last:
            os.kill(os.getpid(), signal.SIGKILL)

    return train(torch.arange(60).chunk(size)[rank], folder, callback)


def test_twenty_kills_change_nothing(tmp_path):
    (expected, _), _ = run(_rank, 2, 2)
    rng, kills = random.Random(0), 0
    while kills < 20:
        outcome = run(_rank, 2, 2, str(tmp_path), rng.randrange(2), rng.randint(1, 4), timeout=20.0)
        assert None in outcome, "it was done before it could be killed as often"
        kills += 1
    for found, error in run(_rank, 2, 2, str(tmp_path)):
        assert error is None
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.fixture
def _at_every_step(monkeypatch):
    monkeypatch.setattr(files.Pace, "is_due", lambda *_: True)


@pytest.mark.usefixtures("_at_every_step")
def test_one_process_too(tmp_path):
    expected = train(slice(None))
    train(slice(None), tmp_path, lambda step, value: step == 13)
    found = train(slice(None), tmp_path)
    again = train(slice(None), tmp_path)  # nothing remains to be done
    for a, b, c in zip(found, expected, again, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_the_end_of_a_checkpoint_says_how_to_go_on(tmp_path):
    mll, x, y = problem()
    options = {"batch_size": 20, "checkpoint": tmp_path, "progress": False}
    for _ in range(2):
        assert "give a larger max_steps" in gpext.fit(mll, x, y, max_steps=2, **options).message
    assert gpext.fit(mll, x, y, max_steps=4, **options).num_steps == 4


@pytest.mark.usefixtures("_at_every_step")
def test_what_has_converged_stays_so(tmp_path):
    first = train(slice(None), tmp_path, max_steps=None, tolerance=10.0)
    second = train(slice(None), tmp_path, max_steps=None, tolerance=10.0)
    assert len(first[0]) == len(second[0]) < 400


@pytest.mark.usefixtures("_at_every_step")
def test_other_numbers_of_ranks_are_refused(tmp_path):
    train(slice(None), tmp_path, max_steps=2)
    for _, error in run(_rank, 2, 2, str(tmp_path)):
        assert "was written by 1 ranks; there are 2 now" in error


@pytest.mark.usefixtures("_at_every_step")
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("targets", "is of another run: its fingerprint of the data is"),
        ("order", "is of another run: its fingerprint of the data is"),
        ("batches", "is of another run: its batch size is 20, this one's 30"),
        ("rate", "is of another run: its learning rate is 0.05, this one's 0.1"),
        ("likelihood", "is of another model: they differ in likelihood.raw_deg_free"),
        ("half", "is damaged, or was not written by gpext"),
        ("nothing", "is damaged, or was not written by gpext"),
        ("something", r"expected \['mll', 'ranks'\] in .*fit.pt; got \['a'\]"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused_and_nothing_has_changed(other, message, tmp_path):
    train(slice(None), tmp_path, max_steps=2)
    mll, x, y = problem()
    if other == "targets":
        y = -y
    if other == "order":
        x, y = x.flip(0), y.flip(0)
    if other == "likelihood":
        mll = gpext.mlls.AugmentedELBO(gpext.likelihoods.LaplaceLikelihood().double(), mll.model, num_data=60)
    path = tmp_path / "fit.pt"
    written = path.read_bytes()
    if other in ("half", "nothing"):
        path.write_bytes(written[: len(written) // 2] if other == "half" else b"")
    if other == "something":
        files.save({"a": 1}, path)
    before, found = {k: v.clone() for k, v in mll.state_dict().items()}, path.read_bytes()
    options = {"batch_size": 30 if other == "batches" else 20, "learning_rate": 0.1 if other == "rate" else 0.05}
    with pytest.raises(ValueError, match=message):
        gpext.fit(mll, x, y, max_steps=4, progress=False, checkpoint=tmp_path, **options)
    assert all(torch.equal(v, before[k]) for k, v in mll.state_dict().items())
    assert path.read_bytes() == found


@pytest.mark.usefixtures("_at_every_step")
def test_a_disk_that_takes_nothing_does_not_end_training(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("no space left")

    monkeypatch.setattr(module, "save", refuse)
    with pytest.warns(module.CheckpointWarning, match="no space left"):
        assert len(train(slice(None), tmp_path, max_steps=3)[0]) == 3


def test_the_full_batch_has_none(tmp_path):
    mll, x, y = problem()
    with pytest.raises(ValueError, match="give the batch_size"):
        gpext.fit(mll, x, y, checkpoint=tmp_path)
