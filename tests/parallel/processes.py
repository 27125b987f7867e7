"""Start processes that form a group, run a function on each, and bring back what each returns or raises."""

import multiprocessing
import os
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
# What pykeops does when gpytorch imports it leaves a forked process without CUDA.
_CONTEXT.set_forkserver_preload([] if torch.cuda.is_available() else ["gpext", "tests.sparse_models"])


def run(function, size, *arguments, timeout=60.0, backend="gloo"):
    """The result of function(rank, *arguments) on each rank: (value, None); (None, error); or None if it was killed."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        workers = [
            _CONTEXT.Process(target=_work, args=(function, rank, size, store, folder, timeout, backend, arguments))
            for rank in range(size)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(3 * timeout)
            if worker.is_alive():
                worker.kill()
                raise TimeoutError("a rank hangs")
        paths = [Path(folder) / f"{rank}.pt" for rank in range(size)]
        return [torch.load(path, weights_only=False) if path.exists() else None for path in paths]


def _work(function, rank, size, store, folder, timeout, backend, arguments):
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )
    try:
        outcome = function(rank, *arguments), None
    except Exception as error:
        cause = error.__cause__
        source = "" if cause is None else f", from {type(cause).__name__}: {cause}"
        outcome = None, f"{type(error).__name__}: {error}{source}"
    path = Path(folder) / f"{rank}.pt"
    torch.save(outcome, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)
    dist.barrier() if outcome[1] is None else None
    os._exit(0)  # without destroy_process_group: in torch 2.4 it can wait, holding the GIL, for a thread that needs it
