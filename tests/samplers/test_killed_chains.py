"""Chains whose process is killed, and chains that diverge: finished draws are kept, and runs resume from them."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gpext.inference import InferenceWarning
from gpext.samplers import SamplingStatus, SGLDSampler, draw_files
from tests.samplers.hyper_cases import quick
from tests.samplers.test_gibbs import run, sampler

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
import torch
from gpext import files
from gpext.samplers import SGLDSampler
from tests.samplers.hyper_cases import quick
files.Pace.is_due = lambda *_: True
generator = torch.Generator().manual_seed(0)
quick(SGLDSampler).run(10**6, 2, 3, generator=generator, checkpoint=sys.argv[1], progress=False)
"""


def run_and_kill(script, directory, is_time):
    """Run a script on a directory, and kill it when `is_time`."""
    process = subprocess.Popen([sys.executable, "-c", script, str(directory)], cwd=ROOT)
    try:
        deadline = time.monotonic() + 120
        while not is_time():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def test_a_process_that_is_killed_loses_nothing_that_was_written(tmp_path):
    run_and_kill(SCRIPT, tmp_path, lambda: len(draw_files.files_in(tmp_path)) >= 6)
    found = quick(SGLDSampler).load(tmp_path)
    written = found.raw.size(1)
    assert written >= 5
    more = quick(SGLDSampler).run(4, resume=found, checkpoint=tmp_path, progress=False)
    whole = quick(SGLDSampler).run(written + 4, 2, 3, generator=torch.Generator().manual_seed(0), progress=False)
    assert torch.equal(more.raw, whole.raw)


GIBBS = """
import sys
from gpext import files
from tests.samplers.test_gibbs import run, sampler
files.Pace.is_due = lambda *_: True
run(sampler(), 10**6, checkpoint=sys.argv[1], progress=False)
"""


def test_so_does_gibbs_whose_chunks_would_take_hours_to_fill(tmp_path):
    run_and_kill(GIBBS, tmp_path, lambda: len(draw_files.files_in(tmp_path)) >= 5)
    found = sampler().load(tmp_path)
    more = sampler().run(4, resume=found, checkpoint=tmp_path, progress=False)
    assert torch.equal(more.latent, run(sampler(), found.num_draws + 4).latent)


def test_chains_that_diverge_leave_their_finished_draws_and_states(tmp_path):
    with pytest.warns(InferenceWarning, match="smaller step"):
        found = quick(SGLDSampler).run(4000, 3, 0, step_size=(3000.0, 1.0, 1e-9), checkpoint=tmp_path, progress=False)
    assert found.status is SamplingStatus.DIVERGED
    loaded = quick(SGLDSampler).load(tmp_path)
    assert torch.equal(loaded.raw, found.raw)
    for mine, theirs in zip(loaded.states, found.states, strict=True):
        assert mine.num_draws == found.raw.size(1)
        assert torch.equal(mine.raw, theirs.raw)
        assert bool(mine.raw.isfinite().all())
