"""The program that torchrun starts and restarts: training and sampling that resume from their checkpoints.

python -m torch.distributed.run ... -m tests.parallel.elastic FOLDER
"""

import os
import signal
import sys
from pathlib import Path

import torch

import gpext
from gpext import files
from gpext.parallel import Ranks
from tests.parallel.test_fit import numbers, problem
from tests.parallel.test_shared_products import shared_sampler

STEPS, DRAWS = 30, 3


def die(attempt, rank):
    """Kill this process, in one of torchrun's attempts, on one rank."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == str(attempt) and torch.distributed.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def train(folder):
    rows = torch.arange(60).chunk(2)[torch.distributed.get_rank()]
    mll, x, y = problem()
    taken = []

    def callback(step, value):
        taken.append(step)
        if len(taken) == 17:
            die(attempt=0, rank=1)

    options = {"batch_size": 20, "max_steps": STEPS, "tolerance": 0.0, "progress": False, "callback": callback}
    return numbers(mll, gpext.fit(mll, x[rows], y[rows], checkpoint=folder, **options)), len(taken)


def draw(folder):
    sampler = shared_sampler(Ranks(), 40)
    gradient, taken = sampler.target.gradient, []

    def counted(*args, **kwargs):
        taken.append(1)
        if len(taken) == 4:
            die(attempt=1, rank=0)
        return gradient(*args, **kwargs)

    sampler.target.gradient = counted
    known = sampler.load(folder) if folder is not None and (Path(folder) / "state.pt").exists() else None
    left = DRAWS if known is None else DRAWS - known.raw.size(1)
    generator = torch.Generator().manual_seed(0)
    options = {"step_size": 0.1, "generator": generator, "progress": False, "resume": known, "checkpoint": folder}
    return sampler.run(left, 1, 1, **options).raw, len(taken)


def both(folder=None):
    files.Pace.is_due = lambda *_: True  # a checkpoint a step
    return train(None if folder is None else folder / "fit"), draw(None if folder is None else folder / "chains")


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    target = Path(sys.argv[1])
    torch.save(both(target), target / f"{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()
