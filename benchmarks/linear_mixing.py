r"""A linear model of coregionalisation under natural gradients: the ELBO reached in equal times.

Three outputs of counts at 1000 inputs in the plane, log rates mixed of two latent functions; each is missing at a third
of the inputs. The model has two latents with 40 inducing points each, squared exponential kernels and a Poisson
likelihood; every method starts from the same parameters and maximises the same ELBO:

* gpext.fit, full batch: q(u) by natural-gradient steps with L-BFGS on the collapsed bound for all else;
* gpext.fit, minibatches of 200: closed-form steps of rate 0.1 with Adam at 0.01 for all else;
* gpytorch's NGD at 0.1 with Adam at 0.01 for all else, minibatches of 200;
* Adam at 0.01 for all parameters, q(u) by its Cholesky factor, minibatches of 200.

Times are those of the process, so that other processes do not count. The ELBO is that of all data, per datum.

    OMP_NUM_THREADS=1 python -m benchmarks.linear_mixing
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import VariationalELBO
from gpytorch.variational import (
    CholeskyVariationalDistribution,
    LMCVariationalStrategy,
    NaturalVariationalDistribution,
    VariationalStrategy,
)
from torch import Tensor

import gpext
from benchmarks.tables import table
from gpext.likelihoods import PoissonLikelihood
from gpext.variational import SiteVariationalStrategy

TASKS, LATENTS, BATCH = 3, 2, 200


def data(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs (N, 2), tasks (N,) and counts (N,) of what was observed."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(size, 2, generator=generator)
    latent = torch.stack([torch.sin(6 * x[:, 0]) + x[:, 1], torch.cos(5 * x[:, 1] * x[:, 0]) - 0.5])
    rates = (torch.tensor([[1.0, 0.5, -0.6], [0.2, 1.0, 0.8]]).mT @ latent + 0.3).exp()
    seen = torch.rand(TASKS, size, generator=generator) < 2 / 3
    task, place = seen.nonzero().unbind(-1)
    return x[place], task, torch.poisson(rates, generator=generator)[seen]


class LMC(gpytorch.models.ApproximateGP):
    """Two latent functions, mixed into three."""

    def __init__(self, inducing_points: Tensor, strategy: type[VariationalStrategy], distribution: type) -> None:
        batch = torch.Size([LATENTS])
        q = distribution(len(inducing_points), batch_shape=batch)
        base = strategy(self, inducing_points.repeat(LATENTS, 1, 1), q, learn_inducing_locations=True)
        super().__init__(LMCVariationalStrategy(base, num_tasks=TASKS, num_latents=LATENTS))
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
        kernel = gpytorch.kernels.RBFKernel(batch_shape=batch)
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel, batch_shape=batch)
        start = torch.tensor([[1.0, 0.5, 0.3], [-0.3, 0.5, 1.0]])
        self.variational_strategy.initialize(lmc_coefficients=start)

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Return the priors of the latents at x."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Clock:
    """The ELBO of all data at each budget, without the time of its evaluation."""

    def __init__(self, budgets: Sequence[float], evaluate: Callable[[], float]) -> None:
        self.budgets, self.evaluate, self.found = budgets, evaluate, list[float]()
        self._started = time.process_time()

    def tick(self) -> bool:
        """Evaluate where a budget has been used, and return whether it was the last."""
        while len(self.found) < len(self.budgets) and self._elapsed() >= self.budgets[len(self.found)]:
            paused = time.process_time()
            self.found.append(self.evaluate())
            self._started += time.process_time() - paused
        return len(self.found) == len(self.budgets)

    def _elapsed(self) -> float:
        return time.process_time() - self._started


def by_gpext(batch_size: int | None, x: Tensor, task: Tensor, y: Tensor, budgets: Sequence[float]) -> list[float]:
    """Return the ELBO at each budget, of the last one if training has converged before."""
    model = LMC(x[:40], SiteVariationalStrategy, NaturalVariationalDistribution)
    likelihood = PoissonLikelihood()
    mll = VariationalELBO(likelihood, model, len(y))
    clock = Clock(budgets, lambda: elbo(mll, x, task, y))
    gpext.fit(
        mll,
        x,
        y,
        task_indices=task,
        batch_size=batch_size,
        max_steps=10**6,
        rate=0.1,
        learning_rate=0.01,
        tolerance=1e-4 if batch_size is None else -1.0,  # minibatches end with the last budget
        progress=False,
        callback=lambda *_: clock.tick(),
    )
    return clock.found + [elbo(mll, x, task, y)] * (len(budgets) - len(clock.found))


def by_gpytorch(natural: bool, x: Tensor, task: Tensor, y: Tensor, budgets: Sequence[float]) -> list[float]:
    """Return the ELBO at each budget."""
    kind = NaturalVariationalDistribution if natural else CholeskyVariationalDistribution
    model = LMC(x[:40], VariationalStrategy, kind)
    mll = VariationalELBO(PoissonLikelihood(), model, len(y))
    own = list(model.variational_parameters()) if natural else []
    known = {id(p) for p in own}
    rest = [p for p in model.parameters() if id(p) not in known]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(rest, lr=0.01)]
    if natural:
        optimizers.append(gpytorch.optim.NGD(own, num_data=len(y), lr=0.1))
    clock = Clock(budgets, lambda: elbo(mll, x, task, y))
    for index in batches(len(y)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (-mll(model(x[index], task_indices=task[index]), y[index])).backward()
        for optimizer in optimizers:
            optimizer.step()
        if clock.tick():
            return clock.found
    return clock.found


def batches(size: int) -> Iterator[Tensor]:
    """Yield minibatches without an end."""
    generator = torch.Generator().manual_seed(1)
    while True:
        yield from torch.randperm(size, generator=generator).split(BATCH)


def elbo(mll: VariationalELBO, x: Tensor, task: Tensor, y: Tensor) -> float:
    """Return the ELBO of all data, per datum."""
    training = mll.training
    with torch.no_grad():
        value = float(mll(mll.model.eval()(x, task_indices=task), y))
    mll.train(training)
    return value


METHODS: dict[str, Callable[..., list[float]]] = {
    "gpext, full batch": lambda *rest: by_gpext(None, *rest),
    "gpext, minibatches": lambda *rest: by_gpext(BATCH, *rest),
    "NGD and Adam": lambda *rest: by_gpytorch(True, *rest),
    "Adam": lambda *rest: by_gpytorch(False, *rest),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--budgets", type=float, nargs="+", default=[3.0, 10.0, 20.0], help="seconds")
    parser.add_argument("--size", type=int, default=1000)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for name, method in METHODS.items():
        found = method(*data(options.size), options.budgets)
        rows.append([name, *(f"{value:.4f}" for value in found)])
        print(*rows[-1], file=sys.stderr)
    print(table(["method", *(f"{seconds:g} s" for seconds in options.budgets)], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
