"""Directories of draws are complete, or rejected with the name of the faulty file."""

import shutil
from dataclasses import replace

import pytest
import torch

from gpext import files
from gpext.samplers import AugmentedSGLDSampler, GibbsSampler, MetropolisHastings, SGLDSampler, storage
from gpext.samplers.state import as_stored
from tests.samplers.hyper_cases import quick
from tests.samplers.test_gibbs import Model, data, run, sampler, student
from tests.spoiling import spoilt

NAMES = [f"draws-{start:09d}.pt" for start in (0, 4, 8)]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A directory of twelve draws in three files, and these draws."""
    directory = tmp_path_factory.mktemp("draws") / "original"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "_CHUNK_BYTES", 3 * (6 * 8) * 4)  # four draws a chunk
        return directory, run(sampler(), 12, checkpoint=directory).latent


@pytest.fixture
def directory(original, tmp_path):
    """A copy of that directory."""
    return shutil.copytree(original[0], tmp_path / "copy")


@pytest.mark.parametrize("name", [*NAMES, "state.pt"])
def test_a_missing_file_is_named(name, directory):
    (directory / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing"):
        sampler().load(directory)


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0), (1, 2), (2, 1)])
def test_a_copy_in_place_of_another_file_is_named(source, target, directory):
    shutil.copy(directory / NAMES[source], directory / NAMES[target])
    with pytest.raises(ValueError, match=f"{NAMES[target]} does not (follow|begin)"):
        sampler().load(directory)


@pytest.mark.parametrize("start", [12, 16])
def test_a_copy_beside_the_others_is_named(start, directory):
    shutil.copy(directory / NAMES[2], directory / f"draws-{start:09d}.pt")
    with pytest.raises(ValueError, match=f"draws-{start:09d}.pt (does not follow|is none of the 3 files)"):
        sampler().load(directory)


@pytest.mark.parametrize("name", [*NAMES, "state.pt"])
@pytest.mark.parametrize("place", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_flipped_bit_is_told(name, place, directory):
    contents = bytearray((directory / name).read_bytes())
    contents[int(place * len(contents))] ^= 0x10
    (directory / name).write_bytes(contents)
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        sampler().load(directory)


def test_a_file_of_another_run_is_told(directory, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_CHUNK_BYTES", 3 * (6 * 8) * 4)
    run(sampler(), 12, generator=torch.Generator().manual_seed(5), checkpoint=tmp_path / "other")
    for name in (*NAMES, "state.pt"):
        copy = shutil.copytree(directory, tmp_path / f"with {name}")
        shutil.copy(tmp_path / "other" / name, copy / name)
        with pytest.raises(ValueError, match="of another run"):
            sampler().load(copy)


def test_a_file_replaced_after_loading_is_told(directory):
    draws = sampler().load(directory)
    shutil.copy(directory / NAMES[0], directory / NAMES[1])
    with pytest.raises(ValueError, match=f"{NAMES[1]} is another file"):
        _ = draws.latent


def test_a_file_without_a_checksum_is_refused(directory):
    path = directory / NAMES[1]
    torch.save(torch.load(path, weights_only=True), path)
    with pytest.raises(ValueError, match=f"{NAMES[1]} is damaged, or was not written by gpext 0.1.0"):
        sampler().load(directory)


def test_a_chunk_that_does_not_count_yet_is_drawn_once_more(original, directory, monkeypatch):
    """As after a process is killed between writing a chunk and the state that counts it."""
    monkeypatch.setattr(storage, "_CHUNK_BYTES", 3 * (6 * 8) * 4)
    first = run(sampler(), 4, checkpoint=directory.parent / "first")
    shutil.copy(directory / NAMES[0], directory.parent / "first" / NAMES[0])
    shutil.copy(directory / NAMES[1], directory.parent / "first" / NAMES[1])
    found = sampler().load(directory.parent / "first")
    assert torch.equal(found.latent, first.latent)
    resumed = sampler().run(8, resume=found, checkpoint=directory.parent / "first")
    assert torch.equal(resumed.latent, original[1])
    assert torch.equal(sampler().load(directory.parent / "first").latent, original[1])


@pytest.mark.parametrize("elsewhere", [False, True])
def test_draws_to_go_on_from_are_written_as_well(elsewhere, original, tmp_path):
    draws = run(sampler(), 5, checkpoint=tmp_path / "there" if elsewhere else None)
    sampler().run(7, resume=draws, checkpoint=tmp_path / "here")
    assert torch.equal(sampler().load(tmp_path / "here").latent, original[1])


class Killed(BaseException):
    """End a run as a signal would: nothing is caught, nothing is written."""


def test_a_warm_up_that_is_killed_is_gone_on_with(original, tmp_path, monkeypatch):
    monkeypatch.setattr(files.Pace, "is_due", lambda *_: True)
    made, taken = sampler(), []
    sweep = made.step

    def short_lived(*args):
        taken.append(1)
        if len(taken) > 7:
            raise Killed
        return sweep(*args)

    made.step = short_lived
    with pytest.raises(Killed):
        run(made, 12, warmup=10, checkpoint=tmp_path)
    found = sampler().load(tmp_path)
    assert found.num_draws == 0
    assert found.states[0].warmup_left == 3
    resumed = sampler().run(12, resume=found, checkpoint=tmp_path)
    assert torch.equal(resumed.latent, run(sampler(), 12, warmup=10).latent)


def augmented_sgld():
    return AugmentedSGLDSampler(Model(*data(), student(priors=True)), steps=2)


def moving():
    return GibbsSampler(Model(*data(), student(priors=True)))


def assert_all_refused(restored, content):
    """Every fault of one entry raises a ValueError; a correct entry does not."""
    restored(content, "here")
    number = 0
    for fault, wrong in spoilt(content):
        number += 1
        try:
            restored(wrong, "here")
        except ValueError:
            continue
        pytest.fail(f"loads: {fault}")
    assert number > 60


@pytest.mark.parametrize("make", [moving, augmented_sgld])
def test_whatever_is_wrong_with_a_state_is_a_value_error(make):
    made = make()
    draws = made.run(1, 1, 1, generator=torch.Generator().manual_seed(0), progress=False)
    assert_all_refused(made._restored, as_stored(draws.states[0]))


@pytest.mark.parametrize(
    ("kind", "options"),
    [(SGLDSampler, {}), (SGLDSampler, {"step_size": (0.1, 1.0, 0.5)}), (MetropolisHastings, {})],
)
def test_whatever_is_wrong_with_a_checkpoint_is_a_value_error(kind, options):
    made = quick(kind)
    found = made.run(2, 1, 1, progress=False, **options)

    assert_all_refused(made._restored, as_stored(found.states[0]))


@pytest.mark.parametrize("kind", [SGLDSampler, MetropolisHastings])
def test_draws_that_are_not_numbers_are_refused(kind, tmp_path):
    quick(kind).run(2, 1, 1, checkpoint=tmp_path, progress=False)
    path = tmp_path / "draws-000000000.pt"
    content, _ = files.load(path, ("latent", "raw", "start", "previous"))
    files.save({**content, "raw": content["raw"] * torch.nan}, path)
    with pytest.raises(ValueError, match=r"draws-000000000.pt\['raw'\] must be finite"):
        quick(kind).load(tmp_path)


def test_draws_to_go_on_from_are_checked_as_well():
    found = quick(MetropolisHastings).run(2, 1, 1, progress=False)
    state = replace(found.states[0], raw=found.states[0].raw * torch.nan)
    with pytest.raises(ValueError, match=r"resume.states\[0\]\['raw'\] must be finite"):
        quick(MetropolisHastings).run(2, resume=replace(found, states=(state,)), progress=False)
    draws = run(sampler(), 2)
    state = replace(draws.states[0], latent=draws.states[0].latent * torch.nan)
    with pytest.raises(ValueError, match=r"resume.states\[0\]\['latent'\] must be finite"):
        sampler().run(2, resume=replace(draws, states=(state,)), progress=False)
