"""torchrun restarts killed ranks, and the result is that of an uninterrupted run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.parallel.elastic import DRAWS, STEPS, both
from tests.parallel.processes import run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# Otherwise gloo finds addresses of dead processes in torchrun's store, which outlives an attempt (torch 2.13).
AFRESH = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def _uninterrupted(rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)
        return both()


FILES = [*(f"draws-{start:09d}.pt" for start in range(DRAWS)), "state.pt"]


def test_torchrun_goes_on_where_ranks_were_killed(tmp_path):
    (((trace, *parameters), steps), (raw, gradients)), error = run(_uninterrupted, 2)[0]
    assert error is None
    assert (steps, gradients) == (STEPS, 5)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    done = subprocess.run(
        [*torchrun, "-m", "tests.parallel.elastic", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, **AFRESH, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("exitcode: -9") == 2, done.stderr
    for rank in range(2):
        ((found_trace, *found_parameters), steps), (found_raw, gradients) = torch.load(
            tmp_path / f"{rank}.pt", weights_only=True
        )
        assert steps == 0, "the last attempt has trained anew"
        assert gradients == 2, "the last attempt has drawn anew"
        assert found_raw.shape[1] == DRAWS
        for a, b in zip([found_trace, *found_parameters, found_raw], [trace, *parameters, raw], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    assert sorted(path.name for path in (tmp_path / "chains").iterdir()) == FILES
