"""A training step of a softmax model under Laplace, in units of its own Cholesky factors and of a plain Newton step's.

A Newton step for D classes factorises D + 1 matrices of size N x N; a training step (evidence and gradient) needs two
such sets here, at the sites of the last step and at the mode. "newton" is the ratio to four sets, the usual number of
Newton steps with a factorisation each. CPU time, one thread, the least of a few steps; steps and factors take turns.

    OMP_NUM_THREADS=1 python -m benchmarks.softmax_step            # or --quick
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

from gpext.inference import Laplace
from gpext.likelihoods import MultinomialLogitLikelihood
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.models import LatentGP

_NEWTON = 4  # steps, each with a factorisation, from the sites of the last training step to a tolerance of 1e-10
_REPEATS = 5


class Softmax(LatentGP):
    """Classes under a Matern-5/2 kernel with a lengthscale for each input: one of all classes, or one for each."""

    def __init__(self, x: Tensor, y: Tensor, *, num_classes: int, shared: bool) -> None:
        super().__init__(x, y, MultinomialLogitLikelihood(num_classes), Laplace())
        shape = torch.Size([]) if shared else torch.Size([num_classes])
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=torch.Size([num_classes]))
        base = gpytorch.kernels.MaternKernel(2.5, ard_num_dims=x.size(-1), batch_shape=shape)
        self.covar_module = gpytorch.kernels.ScaleKernel(base, batch_shape=shape)
        self.to(x.dtype)

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Return the prior at x."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def seconds(step: Callable[[], object]) -> float:
    """Return the CPU time of one call."""
    begin = time.process_time()
    step()
    return time.process_time() - begin


def measure(size: int, num_classes: int, *, shared: bool) -> tuple[float, float]:
    """Return seconds of D + 1 Cholesky factors, and of a training step."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, 10, generator=generator, dtype=torch.float64)
    weights = torch.randn(10, num_classes, generator=generator, dtype=torch.float64)
    y = (x @ weights + torch.randn(size, num_classes, generator=generator, dtype=torch.float64)).argmax(-1)
    model = Softmax(x, y, num_classes=num_classes, shared=shared).train()
    mll = LatentMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)

    def step() -> None:
        optimizer.zero_grad()
        (-mll(model(x), y)).backward()
        optimizer.step()

    matrix = torch.eye(size, dtype=torch.float64) + model.covar_module(x).to_dense().detach().reshape(-1, size, size)[0]
    matrices = matrix.expand(num_classes + 1, size, size).contiguous()
    step()
    factors, steps = [], []
    for _ in range(_REPEATS):
        factors.append(seconds(lambda: torch.linalg.cholesky_ex(matrices)))
        steps.append(seconds(step))
    return min(factors), min(steps)


def main() -> None:
    """Print a row for each size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="the smallest size alone")
    quick = parser.parse_args().quick
    print("| N | classes | kernel | D + 1 factors, ms | step, ms | to its own factors | to those of Newton |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for size, num_classes in [(300, 4)] if quick else [(300, 4), (600, 4), (700, 11), (1200, 4)]:
        for shared in (True, False):
            factors, step = measure(size, num_classes, shared=shared)
            name = "one" if shared else "each"
            ratios = f"{step / factors / 2:.1f} | {step / factors / _NEWTON:.1f}"
            times = f"{1e3 * factors:.0f} | {1e3 * step:.0f}"
            print(f"| {size} | {num_classes} | {name} | {times} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
