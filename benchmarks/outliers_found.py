"""Does the outlier report put the data first that were moved?

Draws of Neal's curve, y = 0.3 + 0.4 x + 0.5 sin(2.7 x) + 1.1 / (1 + x^2) + noise [Neal 1997], 100 data each, noise of
standard deviation 0.1, but 1 for one datum in twenty; a Student-t model trained with EP on each. A datum counts as
moved where its noise is above 0.5.

    python -m benchmarks.outliers_found --draws 20
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

import gpext
from gpext.inference import EP, OutlierReport, outlier_report
from gpext.likelihoods import StudentTLikelihood
from gpext.mlls import LatentMarginalLogLikelihood


class Model(gpext.models.LatentGP):
    """A squared exponential kernel and a constant mean."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__(x, y, StudentTLikelihood(), EP())
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        self.to(x)

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Return the prior at x."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


@dataclass(frozen=True)
class Draw:
    """What the report of one draw says."""

    report: OutlierReport
    moved: Tensor  # (N,), bool

    def counts(self) -> dict[str, int]:
        """How many moved data are found in each of three ways, and how many others."""
        moved, first = self.moved, torch.zeros_like(self.moved)
        first[self.report.index[: int(moved.sum())]] = True
        unlikely, negative = self.report.tail_probability < 0.01, self.report.precision < 0
        return {
            "moved": int(moved.sum()),
            "among the first": int((first & moved).sum()),
            "tail probability below 0.01": int((unlikely & moved).sum()),
            "... others": int((unlikely & ~moved).sum()),
            "negative precision": int((negative & moved).sum()),
            "... of others": int((negative & ~moved).sum()),
        }


def draw(seed: int) -> Draw:
    """Train on one draw and return its report."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(100, generator=generator, dtype=torch.float64)
    scale = torch.where(torch.rand(100, generator=generator) < 0.05, 1.0, 0.1)
    noise = scale * torch.randn(100, generator=generator, dtype=torch.float64)
    y = 0.3 + 0.4 * x + 0.5 * torch.sin(2.7 * x) + 1.1 / (1 + x.square()) + noise
    model = Model(x, y)
    gpext.fit(LatentMarginalLogLikelihood(model.likelihood, model), x, y, progress=False)
    return Draw(outlier_report(model.result), noise.abs() > 0.5)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the counts over all draws, and the head of a report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--draws", type=int, default=20)
    draws = [draw(seed) for seed in range(parser.parse_args(arguments).draws)]
    for name in draws[0].counts():
        print(f"{name:>30} {sum(each.counts()[name] for each in draws)}")
    print("\n".join(str(draws[0].report).splitlines()[:5]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
