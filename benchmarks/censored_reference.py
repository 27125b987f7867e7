r"""Censored data under every rule, against Gibbs sampling and independent estimates of the evidence.

Thirty data on [0, 1] from a Matern-5/2 prior (variance 1, length scale 0.3): exact, censored on the left, on the right,
and in an interval, a quarter each; noise of scale 0.4, Gaussian (the Tobit model) or Student-t with 4 degrees of
freedom.

* The posterior: a Gibbs sampler that draws the unseen y from normal laws between their limits, for Student-t noise its
  scales w from Gamma laws, and f from its Gaussian law given both [Chib 1992; Geweke 1993]. Independent chains, so that
  the errors of means and variances are those of independent numbers.
* The evidence, by two estimators that share nothing with the rules and have standard errors of their own: importance
  sampling of f from a multivariate t distribution with twice the covariance of the Gibbs draws, and, of Gaussian noise,
  the GHK simulator: the exact data have a density, the others given them the probability of a rectangle, factor by
  factor [Geweke 1991; Hajivassiliou & McFadden 1998].

    OMP_NUM_THREADS=1 python -m benchmarks.censored_reference --output censored_reference.jsonl
    python -m benchmarks.censored_reference --quick     # a hundredth of the draws
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator import to_linear_operator
from torch import Tensor

from benchmarks.ledger import Ledger, Row, command_line, measure_and_report
from benchmarks.tables import table
from gpext.inference import EP, KL, Laplace, Rule, Taylor
from gpext.likelihoods import Censored, StudentTLikelihood

RULES: dict[str, Rule] = {"Taylor": Taylor(), "Laplace": Laplace(), "KL": KL(), "EP": EP()}
SIZE, SCALE, DEG_FREE = 30, 0.4, 4.0
CHAINS = 400
_PROPOSAL_DEG_FREE = 8.0


@dataclass(frozen=True)
class Problem:
    """A prior N(0, K), pairs of limits, and noise: normal if there are no degrees of freedom."""

    covariance: Tensor  # (N, N)
    targets: Tensor  # (N, 2)
    scale: float
    deg_free: float | None

    def likelihood(self) -> Censored:
        """Return the likelihood with this noise."""
        if self.deg_free is None:
            inside = gpytorch.likelihoods.GaussianLikelihood().double().initialize(noise=self.scale**2)
        else:
            inside = StudentTLikelihood().double().initialize(noise=self.scale**2, deg_free=self.deg_free)
        return Censored(inside).requires_grad_(False)

    def prior(self) -> MultivariateNormal:
        """Return the prior of f."""
        return MultivariateNormal(torch.zeros(len(self.targets)).double(), to_linear_operator(self.covariance))


def problem(deg_free: float | None, size: int = SIZE, seed: int = 0) -> Problem:
    """Return data drawn from the model, a quarter of them of each kind."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.linspace(0, 1, size, dtype=torch.float64)
    d = 5**0.5 * (x[:, None] - x).abs() / 0.3
    covariance = (1 + d + d.square() / 3) * torch.exp(-d) + 1e-8 * torch.eye(size, dtype=torch.float64)
    f = torch.linalg.cholesky(covariance) @ torch.randn(size, generator=generator, dtype=torch.float64)
    noise = torch.randn(size, generator=generator, dtype=torch.float64)
    if deg_free is not None:
        noise = noise / gamma(torch.full_like(f, deg_free / 2), generator).div(deg_free / 2).sqrt()
    y, gap = f + SCALE * noise, torch.rand(size, 2, generator=generator, dtype=torch.float64)
    kind = torch.arange(size) % 4  # exact, left, right, interval
    lower = torch.where(kind == 1, -torch.inf, torch.where(kind >= 2, y - gap[:, 0], y))
    upper = torch.where(kind == 2, torch.inf, torch.where(kind % 2 == 1, y + gap[:, 1], y))
    return Problem(covariance, torch.stack([lower, upper], -1), SCALE, deg_free)


def gamma(shape: Tensor, generator: torch.Generator) -> Tensor:
    """Return draws from Gamma(shape, 1)."""
    return torch._standard_gamma(shape, generator=generator)


def between(mean: Tensor, sd: Tensor, lower: Tensor, upper: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return draws of N(mean, sd^2) between limits from uniform u, and the log probability of the limits.

    On the side of the mean where the probability is the smaller, so that it does not round to one.
    """
    a, b = (lower - mean) / sd, (upper - mean) / sd
    flip = a + b > 0  # nan for none of both limits, which does not occur
    a, b = torch.where(flip, -b, a), torch.where(flip, -a, b)
    low, high = (0.5 * torch.special.erfc(-math.sqrt(0.5) * limit) for limit in (a, b))  # not ndtr: it is 1 + erf
    z = torch.special.ndtri(low + u * (high - low))
    return mean + sd * torch.where(flip, -z, z), torch.log(high - low)


def gibbs(p: Problem, sweeps: int, warmup: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the means and the second moments about zero of f by chain, (CHAINS, N) each, and no more of the draws."""
    lower, upper = p.targets.unbind(-1)
    exact, n = lower == upper, len(lower)
    some_lower, some_upper = torch.where(exact, -1.0, lower), torch.where(exact, 1.0, upper)
    f = torch.zeros(CHAINS, n, dtype=torch.float64)
    w = torch.ones_like(f)
    total, squares = torch.zeros_like(f), torch.zeros_like(f)
    for sweep in range(warmup + sweeps):
        u = torch.rand(CHAINS, n, generator=generator, dtype=torch.float64)
        drawn, _ = between(f, p.scale / w.sqrt(), some_lower, some_upper, u)
        y = torch.where(exact, lower, drawn)
        if p.deg_free is not None:  # w | y, f ~ Gamma((nu + 1) / 2, (nu + (y - f)^2 / s^2) / 2)
            shape = torch.full_like(f, 0.5 * (p.deg_free + 1))
            w = gamma(shape, generator) / (0.5 * (p.deg_free + ((y - f) / p.scale).square()))
        noise = p.scale**2 / w
        # Matheron's rule: a draw of the prior and of the noise, moved by K (K + D)^-1 (y - f0 - e0).
        if sweep == 0:
            root = torch.linalg.cholesky(p.covariance)
        prior = torch.randn(CHAINS, n, generator=generator, dtype=torch.float64) @ root.mT
        error = noise.sqrt() * torch.randn(CHAINS, n, generator=generator, dtype=torch.float64)
        if sweep == 0 or p.deg_free is not None:
            factor = torch.linalg.cholesky(p.covariance + torch.diag_embed(noise))
        f = prior + torch.cholesky_solve((y - prior - error).unsqueeze(-1), factor).squeeze(-1) @ p.covariance
        if sweep >= warmup:
            total, squares = total + f, squares + f.square()
    return total / sweeps, squares / sweeps


def importance(p: Problem, mean: Tensor, covariance: Tensor, draws: int, generator: torch.Generator) -> Row:
    """Return the log evidence by multivariate t proposals about a posterior, its standard error and sample size."""
    n, nu = len(mean), _PROPOSAL_DEG_FREE
    root = torch.linalg.cholesky(2 * covariance)
    prior = torch.distributions.MultivariateNormal(torch.zeros_like(mean), p.covariance)
    likelihood = p.likelihood()
    parts = []
    for _ in range(math.ceil(draws / 20000)):
        z = torch.randn(20000, n, generator=generator, dtype=torch.float64)
        chi = gamma(torch.full((20000, 1), nu / 2, dtype=torch.float64), generator) / (nu / 2)
        t = z / chi.sqrt()
        log_q = math.lgamma((nu + n) / 2) - math.lgamma(nu / 2) - 0.5 * n * math.log(math.pi * nu)
        log_q = log_q - root.diagonal().log().sum() - 0.5 * (nu + n) * torch.log1p(t.square().sum(-1) / nu)
        f = mean + t @ root.mT
        parts.append(prior.log_prob(f) + likelihood.unchecked_log_prob(p.targets, f).sum(-1) - log_q)
    return _mean_of(torch.cat(parts))


def ghk(p: Problem, draws: int, generator: torch.Generator) -> Row:
    """Return the log evidence under Gaussian noise, its standard error and effective sample size."""
    total = p.covariance + p.scale**2 * torch.eye(len(p.covariance), dtype=torch.float64)
    lower, upper = p.targets.unbind(-1)
    exact = lower == upper
    order = torch.cat([exact.nonzero(), (~exact).nonzero()]).squeeze(-1)
    root = torch.linalg.cholesky(total[order][:, order])
    low, high = lower[order], upper[order]
    z = torch.zeros(draws, len(order), dtype=torch.float64)
    log_weight = torch.zeros(draws, dtype=torch.float64)
    for j in range(len(order)):
        mean = z[:, :j] @ root[j, :j]
        if low[j] == high[j]:
            z[:, j] = (low[j] - mean) / root[j, j]
            log_weight = log_weight - 0.5 * z[:, j].square() - root[j, j].log() - 0.5 * math.log(2 * math.pi)
            continue
        u = torch.rand(draws, generator=generator, dtype=torch.float64)
        drawn, log_share = between(mean, root[j, j], low[j], high[j], u)
        z[:, j] = (drawn - mean) / root[j, j]
        log_weight = log_weight + log_share
    return _mean_of(log_weight)


def _mean_of(log_weight: Tensor) -> Row:
    """Return the log of the mean weight, its standard error by the delta method, and (sum w)^2 / sum w^2."""
    top = log_weight.max()
    w = (log_weight - top).exp()
    error = w.std() / w.mean() / math.sqrt(len(w))
    size = w.sum().square() / w.square().sum()
    return {"log_evidence": float(top + w.mean().log()), "error": float(error), "sample_size": float(size)}


def references(p: Problem, sweeps: int, draws: int, seed: int) -> Row:
    """Return the moments of the posterior by chain and the estimates of the evidence."""
    generator = torch.Generator().manual_seed(seed)
    means, squares = gibbs(p, sweeps, sweeps // 10 + 50, generator)
    start = EP().infer(p.prior(), p.likelihood(), p.targets).posterior  # of the proposal alone
    proposal = (means.mean(0), start.covariance_matrix.detach())
    row: Row = {
        "mean": means.tolist(),
        "square": squares.tolist(),
        "importance": importance(p, *proposal, draws, generator),
    }
    if p.deg_free is None:
        row["ghk"] = ghk(p, draws, generator)
    return row


def moments(row: Row) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return means and variances of the posterior (N,), each with its standard error over the chains."""
    means, squares = torch.tensor(row["mean"]).double(), torch.tensor(row["square"]).double()
    mean = means.mean(0)
    # E f^2 - mean^2 of each chain about the common mean, to first order the variance of all
    variance = squares - 2 * means * mean + mean.square()
    root = math.sqrt(len(means))
    return mean, variance.mean(0), means.std(0) / root, variance.std(0) / root


def of_rule(p: Problem, rule: Rule) -> Row:
    """Return what a rule makes of the problem."""
    found = rule.infer(p.prior(), p.likelihood(), p.targets)
    posterior = found.conditioned
    return {
        "mean": posterior.mean.tolist(),
        "variance": posterior.variance.tolist(),
        "log_evidence": float(found.log_evidence.detach()),
        "status": found.status.name,
    }


NOISES: dict[str, float | None] = {"Gaussian": None, "Student-t": DEG_FREE}


def run(ledger: Ledger, options: argparse.Namespace) -> None:
    """Measure the missing rows."""
    sweeps, draws = (50, 20000) if options.quick else (5000, 2_000_000)
    for name, deg_free in NOISES.items():
        p = problem(deg_free)
        ledger.get(f"{name}/reference", lambda p=p: references(p, sweeps, draws, 1))
        for rule in RULES:
            ledger.get(f"{name}/{rule}", lambda p=p, r=rule: of_rule(p, RULES[r]))


def report(ledger: Ledger) -> str:
    """Return the table of errors and that of the estimates of the evidence."""
    rows, estimates = [], []
    for name in NOISES:
        reference: Any = ledger.rows[f"{name}/reference"]
        mean, variance, mean_error, variance_error = moments(reference)
        sd = variance.sqrt()
        truth = reference.get("ghk", reference["importance"])
        for estimator in ("importance", "ghk"):
            if estimator in reference:
                found = reference[estimator]
                cells = [f"{found['log_evidence']:.5f}", f"{found['error']:.5f}", f"{found['sample_size']:.0f}"]
                estimates.append([name, {"importance": "importance sampling", "ghk": "GHK"}[estimator], *cells])
        chance = [f"{float((mean_error / sd).max()):.4f}", f"{float((variance_error / variance).max()):.4f}"]
        rows.append([name, "Gibbs sampling, standard error", *chance, f"{truth['error']:.5f}"])
        for rule in RULES:
            found = ledger.rows[f"{name}/{rule}"]
            off = ((torch.tensor(found["mean"]) - mean) / sd).abs().max()
            ratio = torch.tensor(found["variance"]) / variance - 1
            worst = float(ratio[ratio.abs().argmax()])
            gap = found["log_evidence"] - truth["log_evidence"]
            rows.append([name, rule, f"{float(off):.4f}", f"{worst:+.4f}", f"{gap:+.5f}"])
    head = ["noise", "rule", "mean, largest error / sd", "variance, largest relative error", "log evidence, error"]
    return "\n\n".join(
        [
            table(head, rows),
            table(["noise", "estimator", "log evidence", "standard error", "effective draws"], estimates),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the tables."""
    parser = command_line(__doc__, quick="a hundredth of the draws")
    measure_and_report(parser.parse_args(arguments), run, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
