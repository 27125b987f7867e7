r"""Spatial counts at a million places: trained on whole regions, predicted region by region.

The field has a Matern-3/2 covariance of lengthscale 0.02 in the unit square, a variance of one and a mean of 0.5, drawn
by 2000 random Fourier features; counts are Poisson with rate exp(f). Hyperparameters are learned by Laplace with 10
neighbours on four regions of 2500 places, and 20,000 further places are predicted by `predict_by_regions` from all
data. Coverage is of central 90 % intervals: of the normal posterior of f, and, at random within its ties, of counts.

With `--blocks` they are learned on blocks of all data from the same start, `fit(..., batch_size=2000)`, in 60 steps or
as many as `--steps` says.

    OMP_NUM_THREADS=1 python -m benchmarks.million_counts --output million_counts.jsonl
    OMP_NUM_THREADS=1 python -m benchmarks.million_counts --blocks --output million_blocks.jsonl
    python -m benchmarks.million_counts --quick
"""

from __future__ import annotations

import argparse
import math
import resource
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

import gpext
from benchmarks.ledger import Ledger, Row, command_line, measure_and_report
from benchmarks.tables import table
from gpext.inference import Laplace
from gpext.likelihoods import PoissonLikelihood
from gpext.mlls import LatentMarginalLogLikelihood
from gpext.models import LatentGP, compact_subset, predict_by_regions

SIZES = (10_000, 100_000, 1_000_000)
_LENGTHSCALE, _MEAN, _FEATURES = 0.02, 0.5, 2000
_NEW = 20_000
_START = 0.1  # the lengthscale from which training begins
_BLOCK = 2000
_NORMAL_90 = 1.6448536269514722


class Field(LatentGP):
    """Counts with 10 neighbours under a Matern-3/2 kernel."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x, y, PoissonLikelihood(), Laplace(), neighbours=10)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(1.5))
        self.to(x.dtype)

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Return the prior at x."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def field(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return the field at places (N, 2)."""
    normal = torch.randn(_FEATURES, 2, generator=generator, dtype=x.dtype)
    chi = torch.randn(_FEATURES, 3, generator=generator, dtype=x.dtype).square().sum(-1)
    frequency = normal * (3 / chi).sqrt().unsqueeze(-1) / _LENGTHSCALE  # Student-t of 3 degrees: that of Matern-3/2
    phase = 2 * math.pi * torch.rand(_FEATURES, generator=generator, dtype=x.dtype)
    parts = [(part @ frequency.mT + phase).cos_().sum(-1) for part in x.split(10_000)]
    return _MEAN + math.sqrt(2 / _FEATURES) * torch.cat(parts)


def on_regions(model: Field, x: Tensor, y: Tensor) -> Row:
    """Train on four regions, and return how training ended."""
    index = compact_subset(x, 4)
    first = Field(x[index], y[index])
    first.covar_module.base_kernel.lengthscale = _START
    result = gpext.fit(LatentMarginalLogLikelihood(first.likelihood, first), x[index], y[index], progress=False)
    model.load_state_dict(first.state_dict(), strict=False)
    return {"fit": result.status.name}


def by_blocks(model: Field, x: Tensor, y: Tensor, num_steps: int) -> Row:
    """Train on blocks of all data, and return the seconds of the first step and the mean of the others'."""
    model.covar_module.base_kernel.lengthscale = _START
    mll, ends = LatentMarginalLogLikelihood(model.likelihood, model), [time.process_time()]

    def tick(step: int, value: float) -> None:
        ends.append(time.process_time())

    result = gpext.fit(mll, x, y, batch_size=_BLOCK, max_steps=num_steps, progress=False, callback=tick)
    later = (ends[-1] - ends[1]) / max(len(ends) - 2, 1)
    return {"fit": result.status.name, "first": ends[1] - ends[0], "step": later}


def measure(size: int, train: Callable[[Field, Tensor, Tensor], Row], *, num_new: int, margin: float = 10.0) -> Row:
    """Return seconds, memory, coverage and log densities at one number of places."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(size + num_new, 2, generator=generator, dtype=torch.float64)
    f = field(x, generator)
    y = torch.poisson(f.exp(), generator=generator)
    data, new = slice(0, size), slice(size, None)
    model = Field(x[data], y[data])
    started = time.process_time()
    trained = train(model, x[data], y[data])
    training = time.process_time() - started
    started = time.process_time()
    posterior = predict_by_regions(model, x[new], margin=margin, progress=False)
    prediction = time.process_time() - started
    with torch.no_grad():
        inside = (f[new] - posterior.mean).abs() < _NORMAL_90 * posterior.variance.sqrt()
        predictive = model.likelihood(posterior)
        log_density = predictive.log_prob(y[new])
        above = predictive.cdf(y[new])
        uniform = above - torch.rand(num_new, generator=generator, dtype=x.dtype) * log_density.exp()
    return {
        **trained,
        "training": training,
        "prediction": prediction,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "lengthscale": model.covar_module.base_kernel.lengthscale.item(),
        "outputscale": model.covar_module.outputscale.item(),
        "coverage of f": float(inside.double().mean()),
        "coverage of y": float(((uniform > 0.05) & (uniform < 0.95)).double().mean()),
        "log density": float(log_density.mean()),
        "of truth": float(torch.distributions.Poisson(f[new].exp()).log_prob(y[new]).mean()),
    }


def run(ledger: Ledger, options: argparse.Namespace) -> None:
    """Measure the missing rows."""
    if options.quick:
        ledger.get("quick", lambda: measure(4000, on_regions, num_new=200, margin=3.0))
        return
    name, train = "4 regions", on_regions
    if options.blocks:
        name, train = f"{options.steps} blocks", partial(by_blocks, num_steps=options.steps)
    for size in options.sizes:
        ledger.get(f"{size}, {name}", lambda n=size: measure(n, train, num_new=_NEW))


def report(ledger: Ledger) -> str:
    """Return the table."""
    head = ["N, trained on", "training, s", "a step, s", "prediction, s", "memory, GB", "lengthscale", "outputscale"]
    head += ["coverage of f", "coverage of y", "log density", "of the true rate"]
    rows = [
        [
            key,
            f"{row['training']:.0f}",
            f"{row['step']:.2f}" if "step" in row else "",
            f"{row['prediction']:.0f}",
            f"{row['memory']:.1f}",
            f"{row['lengthscale']:.4f}",
            f"{row['outputscale']:.2f}",
            f"{row['coverage of f']:.4f}",
            f"{row['coverage of y']:.4f}",
            f"{row['log density']:.4f}",
            f"{row['of truth']:.4f}",
        ]
        for key, row in ledger.rows.items()
    ]
    return table(head, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = command_line(__doc__, quick="4000 places alone")
    parser.add_argument("--steps", type=int, default=60, help="of training by blocks")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    parser.add_argument("--blocks", action="store_true", help="training by blocks of all data")
    measure_and_report(parser.parse_args(arguments), run, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
