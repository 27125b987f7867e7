r"""A joint model of a count, a label, an angle and a measurement beside separate models, where outputs are missing.

Two Gaussian processes g_1, g_2 of x on [0, 10], squared exponentials of variance 1 and length scale 1, drive four
outputs of 60 places:

* a count, Poisson of rate e^{1 + 0.7 g_1};
* a label, of probability logistic(2 g_1);
* an angle, von Mises of (kappa cos, kappa sin) = (2 g_1, 2 g_2);
* a measurement, g_1 + 0.3 e, e standard normal.

Each output is missing at half of the places, at random; of the last quarter of the interval the measurement is seen
everywhere and the others nowhere, to be known by it alone.

The joint model has two latents, each a squared exponential of x times an `IndexKernel` of rank 1 over the outputs, a
constant mean for each output, and `MixedLikelihood`; a separate model has the same kernel of x with an output scale.
All are trained by `gpext.fit`. Scores are log densities of the missing outputs, paired by data set.

    OMP_NUM_THREADS=1 python -m benchmarks.joint_outputs --output joint_outputs.jsonl
    python -m benchmarks.joint_outputs --quick     # one data set
"""

from __future__ import annotations

import math
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gpytorch
import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor

import gpext
from benchmarks.ledger import Ledger, Row, command_line, measure_and_report
from benchmarks.tables import table
from gpext.inference import EP, KL, Laplace, Rule
from gpext.likelihoods import BernoulliLogitLikelihood, MixedLikelihood, PoissonLikelihood, VonMisesLikelihood

OUTPUTS = ("count", "label", "angle", "measurement")
ANGLE, MEASUREMENT = 2, 3
PLACES = 60
RULES: dict[str, Rule] = {"Laplace": Laplace(), "KL": KL(), "EP": EP()}


@dataclass(frozen=True)
class Data:
    """Rows (x, output) and their values, observed and missing."""

    x: Tensor  # (N, 2)
    y: Tensor  # (N,)
    missing_x: Tensor
    missing_y: Tensor


def draw(seed: int) -> Data:
    """Return one data set."""
    generator = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"dtype": torch.float64, "generator": generator}
    x = 10 * torch.rand(PLACES, **options).sort().values
    K = torch.exp(-0.5 * (x - x[:, None]).square()) + 1e-8 * torch.eye(PLACES, dtype=x.dtype)
    g = torch.randn(2, PLACES, **options) @ torch.linalg.cholesky(K).mT
    rng = np.random.default_rng(seed)
    values = [
        torch.poisson(torch.exp(1 + 0.7 * g[0]), generator=generator),
        (torch.rand(PLACES, **options) < torch.sigmoid(2 * g[0])).double(),
        torch.from_numpy(rng.vonmises(torch.atan2(g[1], g[0]).numpy(), 2 * g.norm(dim=0).numpy())),
        g[0] + 0.3 * torch.randn(PLACES, **options),
    ]
    seen = torch.rand(4, PLACES, **options) < 0.5
    last = x > 7.5
    seen[:MEASUREMENT, last], seen[MEASUREMENT, last] = False, True
    rows = torch.stack([x.expand(4, -1), torch.arange(4.0, dtype=x.dtype)[:, None].expand(-1, PLACES)], -1)
    y = torch.stack(values)
    return Data(rows[seen], y[seen], rows[~seen], y[~seen])


def families() -> list[Any]:
    """Return the likelihoods of the four outputs."""
    return [
        PoissonLikelihood(),
        BernoulliLogitLikelihood(),
        VonMisesLikelihood(),
        gpytorch.likelihoods.GaussianLikelihood().double(),
    ]


class Joint(gpext.models.LatentGP):
    """Two latents, correlated over the outputs."""

    def __init__(self, data: Data, rule: Rule) -> None:
        super().__init__(data.x, data.y, MixedLikelihood(families(), data.x[:, 1].long()), rule)
        two = torch.Size([2])
        self.levels = torch.nn.Parameter(torch.zeros(2, len(OUTPUTS), dtype=data.x.dtype))
        self.of_x = gpytorch.kernels.RBFKernel(batch_shape=two)
        self.of_output = gpytorch.kernels.IndexKernel(num_tasks=len(OUTPUTS), rank=1, batch_shape=two)
        self.double()
        self.of_output.initialize(
            covar_factor=torch.full((2, 4, 1), 0.7).double(), var=torch.full((2, 4), 0.3).double()
        )

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Return the prior at rows (x, output)."""
        output = x[..., 1].long()
        output = output if output.dim() == 1 else output[0]
        covariance = self.of_x(x[..., :1]).mul(self.of_output(x[..., 1:].long()))
        return MultivariateNormal(self.levels[:, output], covariance)


class Separate(gpext.models.LatentGP):
    """One output."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: Any, rule: Rule) -> None:
        super().__init__(x, y, likelihood, rule)
        latents = gpext.bounds.num_latents(likelihood)
        batch = torch.Size() if latents is None else torch.Size([latents])
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=batch)
        kernel = gpytorch.kernels.RBFKernel(batch_shape=batch)
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel, batch_shape=batch)
        self.double()

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Return the prior."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def _trained(model: gpext.models.LatentGP) -> Any:
    mll = gpext.mlls.LatentMarginalLogLikelihood(model.likelihood, model)
    return gpext.fit(mll, model.train_inputs[0], model.train_targets, progress=False)


def jointly(data: Data, rule: Rule) -> Row:
    """Return the log densities of the missing values by the joint model."""
    started = time.process_time()
    model = Joint(data, rule)
    result = _trained(model)
    seconds = time.process_time() - started
    model.eval()
    targets = torch.stack([data.missing_y, data.missing_x[:, 1]], -1)
    with torch.no_grad():
        log_p = model.likelihood.log_marginal(targets, model(data.missing_x))
    return {**_scores(data, log_p), "seconds": seconds, "status": result.status.name}


def separately(data: Data, rule: Rule) -> Row:
    """Return the same by four models of one output each."""
    log_p = torch.zeros_like(data.missing_y)
    started, states = time.process_time(), []
    for k, likelihood in enumerate(families()):
        own, missing = data.x[:, 1] == k, data.missing_x[:, 1] == k
        model = Separate(data.x[own, :1], data.y[own], likelihood, rule)
        states.append(_trained(model).status.name)
        with torch.no_grad():
            f = model.eval()(data.missing_x[missing, :1])
            predictive = likelihood(f) if k == MEASUREMENT else None
            if predictive is None:
                log_p[missing] = likelihood.log_marginal(data.missing_y[missing], f)
            else:
                of_one = torch.distributions.Normal(predictive.mean, predictive.stddev)
                log_p[missing] = of_one.log_prob(data.missing_y[missing])
    seconds = time.process_time() - started
    return {**_scores(data, log_p), "seconds": seconds, "status": ", ".join(dict.fromkeys(states))}


def _scores(data: Data, log_p: Tensor) -> Row:
    return {name: log_p[data.missing_x[:, 1] == k].mean().item() for k, name in enumerate(OUTPUTS)}


def run(ledger: Ledger, options: Namespace) -> None:
    """Measure the missing rows."""
    for seed in range(1 if options.quick else options.seeds):
        data = draw(seed)
        for name, rule in RULES.items():
            ledger.get(f"{name}/joint/{seed}", lambda d=data, r=rule: jointly(d, r))
            ledger.get(f"{name}/separate/{seed}", lambda d=data, r=rule: separately(d, r))


def report(ledger: Ledger) -> str:
    """Return the table: log densities, of the joint model with their difference from the separate ones'."""
    rows = []
    for rule in RULES:
        apart = {row["key"].split("/")[2]: row for row in ledger.of(f"{rule}/separate/")}
        for kind in ("separate", "joint"):
            found = ledger.of(f"{rule}/{kind}/")
            if not found:
                continue
            cells = [rule, kind]
            for name in OUTPUTS:
                cells.append(f"{np.mean([row[name] for row in found]):.3f}")
                gap = [row[name] - apart[row["key"].split("/")[2]][name] for row in found]
                if kind == "joint" and len(gap) > 1:
                    cells[-1] += f" ({np.mean(gap):+.3f} +- {np.std(gap, ddof=1) / math.sqrt(len(gap)):.3f})"
            rows.append([*cells, f"{np.mean([row['seconds'] for row in found]):.1f}"])
    return table(["rule", "models", *OUTPUTS, "CPU seconds"], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = command_line(__doc__, quick="one data set")
    parser.add_argument("--seeds", type=int, default=10)
    measure_and_report(parser.parse_args(arguments), run, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
