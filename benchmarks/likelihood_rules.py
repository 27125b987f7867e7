"""Likelihoods of one latent function, and of a location and a log scale, under every rule: evidence and time.

Targets are drawn from the likelihood (or, of compositions, from the one inside) at a latent function drawn from a
Matern-5/2 prior of unit variance and length scale 0.3 on [0, 1]. The error is that of the log evidence of two data
whose latent values have a correlation of 0.6, against the trapezoidal rule on 1200 x 1200 nodes, averaged over ten
pairs of targets; that of KL and CAVI, which are bounds, is never positive. The time is the CPU time of one inference of
1000 data in float64 at these hyperparameters, the least of three. A log scale has a quarter of the location's variance.

    OMP_NUM_THREADS=1 python -m benchmarks.likelihood_rules --output likelihood_rules.jsonl
    python -m benchmarks.likelihood_rules --quick     # 50 data in place of 1000, one pair
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gpytorch
import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from torch import Tensor

from benchmarks.ledger import Ledger, Row, command_line, measure_and_report
from benchmarks.tables import table
from gpext import likelihoods as gl
from gpext.bounds import conditional_log_prob, num_latents
from gpext.inference import CAVI, EP, KL, Laplace, Rule, Taylor

RULES: dict[str, Rule] = {"Taylor": Taylor(), "Laplace": Laplace(), "KL": KL(), "CAVI": CAVI(), "EP": EP()}
Transform = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class Entry:
    """A likelihood, and how its targets are made from draws of the one inside."""

    make: Callable[[], Any]
    inside: Callable[[Any], Any] = lambda likelihood: likelihood
    targets: Transform = lambda y, generator: y
    latents: int | None = None

    def prior(self, covariance: Tensor) -> MultivariateNormal:
        """Return N(0, covariance), of a log scale as well if there is one."""
        if self.latents is None:
            return MultivariateNormal(torch.zeros_like(covariance[0]), to_linear_operator(covariance))
        both = torch.stack([covariance, _OF_SCALE * covariance])
        return MultivariateNormal(torch.zeros_like(both[..., 0]), to_linear_operator(both))


_OF_SCALE = 0.25


def _censor(y: Tensor, generator: torch.Generator) -> Tensor:
    """Return pairs: a third exact, a third only known to be above a limit, a third in an interval."""
    kind = torch.arange(len(y)) % 3
    gap = torch.rand(len(y), generator=generator, dtype=y.dtype)
    lower = torch.where(kind == 0, y, y - gap)
    return torch.stack([lower, torch.where(kind == 0, y, torch.where(kind == 1, torch.inf, y + gap))], -1)


def _with_number(low: float, high: float) -> Transform:
    def transform(y: Tensor, generator: torch.Generator) -> Tensor:
        number = low + (high - low) * torch.rand(len(y), generator=generator, dtype=torch.float64)
        return torch.stack([y.double(), number], -1)

    return transform


def _families(y: Tensor, generator: torch.Generator) -> Tensor:
    return torch.stack([(y > 0).double(), (torch.arange(len(y)) % 2).double()], -1)


def _inner(likelihood: Any) -> Any:
    return likelihood.likelihood


ENTRIES = {
    "Gaussian (gpytorch)": Entry(gpytorch.likelihoods.GaussianLikelihood),
    "StudentT": Entry(gl.StudentTLikelihood),
    "Laplace": Entry(gl.LaplaceLikelihood),
    "Matern32": Entry(gl.Matern32Likelihood),
    "BernoulliLogit": Entry(gl.BernoulliLogitLikelihood),
    "Bernoulli, probit (gpytorch)": Entry(gpytorch.likelihoods.BernoulliLikelihood),
    "OrdinalLogit(4)": Entry(lambda: gl.OrdinalLogitLikelihood(4)),
    "OrdinalProbit(4)": Entry(lambda: gl.OrdinalProbitLikelihood(4)),
    "Poisson": Entry(gl.PoissonLikelihood),
    "NegativeBinomialLogit": Entry(gl.NegativeBinomialLogitLikelihood),
    "NegativeBinomialLog": Entry(gl.NegativeBinomialLogLikelihood),
    "Gamma": Entry(gl.GammaLikelihood),
    "LogNormal": Entry(gl.LogNormalLikelihood),
    "Weibull": Entry(gl.WeibullLikelihood),
    "LogLogistic": Entry(gl.LogLogisticLikelihood),
    "GeneralizedPareto": Entry(gl.GeneralizedParetoLikelihood),
    "Tweedie": Entry(gl.TweedieLikelihood),
    "PairwiseProbit": Entry(gl.PairwiseProbitLikelihood),
    "PairwiseLogit": Entry(gl.PairwiseLogitLikelihood),
    "Censored(Gaussian)": Entry(lambda: gl.Censored(gpytorch.likelihoods.GaussianLikelihood()), _inner, _censor),
    "Censored(StudentT)": Entry(lambda: gl.Censored(gl.StudentTLikelihood()), _inner, _censor),
    "Weighted(BernoulliLogit)": Entry(
        lambda: gl.Weighted(gl.BernoulliLogitLikelihood()), _inner, _with_number(0.5, 3.0)
    ),
    "Offset(Poisson)": Entry(lambda: gl.Offset(gl.PoissonLikelihood()), _inner, _with_number(-1.0, 1.0)),
    "Truncated(Poisson, 1)": Entry(lambda: gl.Truncated(gl.PoissonLikelihood(), lower=1)),
    "ZeroInflated(Poisson)": Entry(lambda: gl.ZeroInflated(gl.PoissonLikelihood())),
    "Hurdle(Poisson)": Entry(lambda: gl.Hurdle(gl.PoissonLikelihood())),
    "Mixed(Poisson, BernoulliLogit)": Entry(
        lambda: gl.MixedLikelihood([gl.PoissonLikelihood(), gl.BernoulliLogitLikelihood()]),
        lambda likelihood: likelihood.likelihoods[0],
        _families,
    ),
    "HeteroscedasticGaussian": Entry(gl.HeteroscedasticGaussianLikelihood, latents=2),
    "HeteroscedasticStudentT": Entry(gl.HeteroscedasticStudentTLikelihood, latents=2),
}
_NODES, _REACH = 1200, 9.0
PAIR = torch.tensor([[1.0, 0.6], [0.6, 1.0]], dtype=torch.float64)


def drawn(entry: Entry, likelihood: Any, covariance: Tensor, seed: int) -> Tensor:
    """Return targets at a latent function drawn from N(0, covariance)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(covariance), entry.latents or 1)
    f = (torch.linalg.cholesky(covariance) @ torch.randn(shape, generator=generator, dtype=torch.float64)).mT
    f = f.squeeze(0) if entry.latents is None else f * torch.tensor([[1.0], [_OF_SCALE**0.5]], dtype=torch.float64)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        y = entry.inside(likelihood)(f).sample()
    return entry.targets(y, generator)


def exact(likelihood: Any, y: Tensor) -> float:
    """Return the log evidence of two data by a product rule, the nodes of the first datum one after another."""
    if num_latents(likelihood) is not None:
        return _exact_of_two_latents(likelihood, y)
    nodes = torch.linspace(-_REACH, _REACH, _NODES, dtype=torch.float64)
    log_weights = torch.log(2 * _REACH / (_NODES - 1) * torch.exp(-0.5 * nodes.square()) / (2 * np.pi) ** 0.5)
    root = torch.linalg.cholesky(PAIR)
    first = root[0, 0] * nodes
    parts = []
    for value, log_weight in zip(first, log_weights, strict=True):
        f = torch.stack([value.expand_as(nodes), root[1, 0] * value / root[0, 0] + root[1, 1] * nodes], -1)
        log_p = log_prob(likelihood, y, f).sum(-1)
        parts.append(log_weight + torch.logsumexp(log_p + log_weights, 0))
    return float(torch.logsumexp(torch.stack(parts), 0))


def _exact_of_two_latents(likelihood: Any, y: Tensor) -> float:
    """Return the log evidence of two data with a location and a log scale each: sum_gh W_gh (P_1 W P_2')_gh."""
    f = torch.linspace(-_REACH, _REACH, _NODES, dtype=torch.float64)
    g = _OF_SCALE**0.5 * torch.linspace(-_REACH, _REACH, _NODES // 4, dtype=torch.float64)
    of_f, of_g = _joint_weights(f, PAIR), _joint_weights(g, _OF_SCALE * PAIR)
    at = torch.stack([f.expand(len(g), -1), g.unsqueeze(-1).expand(-1, len(f))]).flatten(1)  # (2, G F)
    p = [log_prob(likelihood, y[i], at).exp().view(len(g), len(f)) for i in (0, 1)]
    return float((of_g * (p[0] @ of_f @ p[1].mT)).sum().log())


def _joint_weights(nodes: Tensor, covariance: Tensor) -> Tensor:
    """Return N(a, b | 0, covariance) times the area of a cell for nodes a and b."""
    grid = torch.stack(torch.meshgrid(nodes, nodes, indexing="ij"), -1)
    density = torch.distributions.MultivariateNormal(torch.zeros_like(covariance[0]), covariance).log_prob(grid)
    return density.exp() * (nodes[1] - nodes[0]).square()


def log_prob(likelihood: Any, y: Tensor, f: Tensor) -> Tensor:
    """Return log p(y | f) (..., 2) of gpext's or gpytorch's likelihoods."""
    with torch.no_grad():
        return conditional_log_prob(likelihood, y, f)


def run(ledger: Ledger, options: argparse.Namespace) -> None:
    """Measure the missing rows."""
    size, pairs = (50, 1) if options.quick else (1000, 10)
    x = torch.linspace(0, 1, size, dtype=torch.float64)
    distance = 5**0.5 * (x[:, None] - x).abs() / 0.3
    covariance = (1 + distance + distance.square() / 3) * torch.exp(-distance)
    covariance = covariance + 1e-8 * torch.eye(size, dtype=torch.float64)
    for name in options.likelihoods:
        for rule in RULES:
            key = f"{name}/{rule}"
            ledger.get(key, lambda e=ENTRIES[name], r=RULES[rule]: measured(e, r, covariance, pairs))


def measured(entry: Entry, rule: Rule, covariance: Tensor, pairs: int) -> Row:
    """Return the error of the evidence and the time, or why the rule does not serve the likelihood."""
    likelihood = entry.make().double().requires_grad_(False)
    errors = []
    try:
        for seed in range(pairs):
            y = drawn(entry, likelihood, PAIR, seed)
            found = rule.infer(entry.prior(PAIR), likelihood, y)
            errors.append(float(found.log_evidence.detach()) - exact(likelihood, y))
        y = drawn(entry, likelihood, covariance, 0)
        prior = entry.prior(covariance)
        seconds = []
        for _ in range(3):
            started = time.process_time()
            result = rule.infer(prior, likelihood, y)
            seconds.append(time.process_time() - started)
    except TypeError as error:
        return {"refused": str(error).split("\n")[0][:100]}
    return {"error": float(np.mean(errors)), "seconds": min(seconds), "status": result.status.name}


def report(ledger: Ledger) -> str:
    """Return the table."""
    rows = []
    for name in ENTRIES:
        cells = []
        for rule in RULES:
            (row,) = ledger.of(f"{name}/{rule}") or [{}]
            if "error" not in row:
                cells.append("")
                continue
            mark = "" if row["status"] == "CONVERGED" else f" ({row['status'].lower()})"
            cells.append(f"{row['error']:+.1e}, {row['seconds']:.2f} s{mark}")
        rows.append([name, *cells])
    return table(["likelihood", *RULES], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = command_line(__doc__, quick="50 data, one pair")
    parser.add_argument("--likelihoods", nargs="+", choices=tuple(ENTRIES), default=list(ENTRIES))
    measure_and_report(parser.parse_args(arguments), run, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
