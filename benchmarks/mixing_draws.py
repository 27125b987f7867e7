"""Do the mixing variables of Gibbs sampling follow their distributions, and how many are drawn in a second?

For every family of mixing densities and every tilt: a Kolmogorov-Smirnov test of a million draws against the exact cdf,
and their mean and variance in standard errors; the same for draws by numerical inversion of phi alone, with the largest
error of that inversion's cdf. Then Polya-Gamma draws a second, taking turns with the C package `polyagamma` (where it
can be imported), with the sum of 200 gammas and with the numerical inversion.

    OMP_NUM_THREADS=1 python -m benchmarks.mixing_draws --output benchmarks/results/mixing_draws.json
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor
from torch.distributions import Distribution
from tqdm import tqdm

from benchmarks.augmented_svi import machine, package_versions, write_atomically
from gpext.augmentations import (
    AutomaticRadial,
    ExponentialRadial,
    Matern32Radial,
    RadialFunction,
    SechRadial,
    StudentTRadial,
)
from gpext.distributions import Gamma, PolyaGamma

F64 = torch.float64
TILTS = (0.0, 0.1, 1.0, 10.0, 100.0)
CDF_TILTS = (0.0, 1e-8, *TILTS[1:], 1e4)
COUNTS = (0.3, 1.0, 2.3, 10.0, 40.0, 64.0, 1e3, 1e6)
_CHUNK = 1 << 15  # values of a cdf at a time: 24 complex nodes each


def log_sech(r: Tensor) -> Tensor:
    """Return log 1 / cosh(sqrt r), also of complex r."""
    c = torch.sqrt(r)
    return math.log(2) - c - torch.log(1 + torch.exp(-2 * c))


def log_matern32(r: Tensor) -> Tensor:
    """Return log (1 + x) e^-x, x = sqrt(3 r), also of complex r."""
    x = torch.sqrt(3 * r)
    return torch.log(1 + x) - x


def number(value: float) -> Tensor:
    """Return a float64 scalar."""
    return torch.tensor(value, dtype=F64)


# The closed-form radial functions, and their log phi as a user would write it.
FAMILIES: dict[str, tuple[RadialFunction, Callable[[Tensor], Tensor]]] = {
    "student_t (nu = 4)": (StudentTRadial(number(4.0)), lambda r: -2.5 * torch.log(1 + r / 4)),
    "student_t (nu = 0.5)": (StudentTRadial(number(0.5)), lambda r: -0.75 * torch.log(1 + 2 * r)),
    "laplace, svm": (ExponentialRadial(), lambda r: -torch.sqrt(r)),
    "matern32": (Matern32Radial(), log_matern32),
    "logistic": (SechRadial(number(1.0)), log_sech),
    "negative binomial (b = 2.3)": (SechRadial(number(2.3)), lambda r: 2.3 * log_sech(r)),
    "negative binomial (b = 80)": (SechRadial(number(80.0)), lambda r: 80 * log_sech(r)),
}


def exact_cdf(law: Distribution, values: Tensor) -> Tensor:
    """Return P(W <= value) for a vector of values; for the Gamma from scipy, as torch's is wrong by 1e-9."""
    if isinstance(law, Gamma):
        return torch.from_numpy(stats.gamma.cdf(values.numpy(), law.concentration.item(), scale=1 / law.rate.item()))
    return torch.cat([law.cdf(part) for part in values.split(_CHUNK)])


def tested(law: Distribution, draws: Tensor) -> dict[str, float]:
    """Return the Kolmogorov-Smirnov p value, and mean and variance errors in standard errors (nan if there is none)."""
    uniform = exact_cdf(law, draws).numpy()
    num = len(draws)
    variance = law.variance
    mean_error = (draws.mean() - law.mean) / (variance / num).sqrt()
    fourth = (draws - law.mean).pow(4).mean()
    variance_error = (draws.var() - variance) / ((fourth - variance.square()) / num).sqrt()
    return {
        "p_value": float(stats.kstest(uniform, "uniform").pvalue),
        "mean_error": float(mean_error) if variance.isfinite() else math.nan,
        "variance_error": float(variance_error) if variance.isfinite() else math.nan,
    }


def seconds(function: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def check_family(name: str, tilt: float, num_draws: int, seed: int) -> dict[str, Any]:
    """Check draws of both kinds at one tilt."""
    radial, log_phi = FAMILIES[name]
    generator = torch.Generator().manual_seed(seed)
    exact = radial.mixing(number(tilt**2))
    numerical = AutomaticRadial(log_phi=log_phi).mixing(number(tilt**2))
    row: dict[str, Any] = {"family": name, "tilt": tilt}
    for kind, law in (("exact", exact), ("numerical", numerical)):
        law.sample((1000,), generator=generator)  # makes the tables
        start = time.perf_counter()
        draws = law.sample((num_draws,), generator=generator)
        row[kind] = {"nanoseconds": 1e9 * (time.perf_counter() - start) / num_draws, **tested(exact, draws)}
    return row


def cdf_error(name: str, tilt: float) -> float:
    """Return the largest error of the numerical cdf at 400 probabilities between 1e-12 and 1 - 1e-12."""
    radial, log_phi = FAMILIES[name]
    tail = torch.logspace(-12, math.log10(0.5), 200, dtype=F64)
    numerical = AutomaticRadial(log_phi=log_phi).mixing(number(tilt**2))
    w = numerical.icdf(torch.cat([tail, 1 - tail]))
    return float((numerical.cdf(w) - exact_cdf(radial.mixing(number(tilt**2)), w)).abs().max())


def sum_of_gammas(tilt: Tensor, generator: torch.Generator, terms: int = 200) -> Tensor:
    """Draw PG(1, tilt) with its series truncated after some terms."""
    k = torch.arange(1, terms + 1, dtype=F64, device=tilt.device)
    rates = 2 * math.pi**2 * (k - 0.5).square() + 0.5 * tilt.square().unsqueeze(-1)
    return (torch.empty_like(rates).exponential_(generator=generator) / rates).sum(-1)


def speed(tilts: Tensor, num_rounds: int, seed: int) -> dict[str, float]:
    """Return million draws a second of PG(1, tilts): medians over rounds in which the contestants take turns."""
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    law = PolyaGamma(torch.ones_like(tilts), tilts)
    numerical = AutomaticRadial(lambda r: 1 / torch.cosh(torch.sqrt(r))).mixing((0.5 * tilts).square())
    few = tilts[: len(tilts) // 20]
    contestants: dict[str, tuple[Callable[[], object], int]] = {
        "gpext": (lambda: law.sample(generator=generator), len(tilts)),
        "numerical": (lambda: numerical.sample(generator=generator), len(tilts)),
        "200 gammas": (lambda: sum_of_gammas(few, generator), len(few)),
    }
    if importlib.util.find_spec("polyagamma"):
        from polyagamma import random_polyagamma

        array = tilts.numpy()
        contestants["polyagamma"] = (lambda: random_polyagamma(1, array, random_state=rng), len(tilts))
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(num_rounds + 1):
        for name, (draw, num) in contestants.items():
            rate = num / seconds(draw) / 1e6
            if turn >= 1:  # the first round makes tables and warms the allocator
                times[name].append(rate)
    return {name: statistics.median(values) for name, values in times.items()}


def count_speed(count: float, num_draws: int, num_rounds: int, seed: int) -> dict[str, float]:
    """Return million draws a second of PG(count, z), z from a normal distribution of standard deviation 3."""
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    tilts = 3 * torch.randn(num_draws, generator=generator, dtype=F64)
    law = PolyaGamma(torch.full_like(tilts, count), tilts)
    contestants: dict[str, Callable[[], object]] = {"gpext": lambda: law.sample(generator=generator)}
    if importlib.util.find_spec("polyagamma"):
        from polyagamma import random_polyagamma

        array = tilts.numpy()
        contestants["polyagamma"] = lambda: random_polyagamma(count, array, random_state=rng)
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(num_rounds + 1):
        for name, draw in contestants.items():
            rate = num_draws / seconds(draw) / 1e6
            if turn >= 1:
                times[name].append(rate)
    return {name: statistics.median(values) for name, values in times.items()}


def report(results: Mapping[str, Any]) -> str:
    """Return the markdown tables."""
    lines = [
        f"{results['num_draws']} draws each on {results['machine']['cpu']}, one thread, float64. p: Kolmogorov-Smirnov "
        "against the exact cdf; z: errors of mean and variance in standard errors.",
        "",
        "| family | tilt | exact: p | z mean | z var | ns | numerical: p | z mean | z var | ns | cdf error |",
        "| --- | ---: |" + " ---: |" * 9,
    ]
    for row in results["families"]:
        cells = []
        for kind in ("exact", "numerical"):
            one = row[kind]
            cells += [f"{one['p_value']:.3f}", f"{one['mean_error']:+.1f}", f"{one['variance_error']:+.1f}"]
            cells.append(f"{one['nanoseconds']:.0f}")
        error = f"{results['cdf_errors'][row['family']][str(row['tilt'])]:.1e}"
        lines.append(f"| {row['family']} | {row['tilt']:g} | " + " | ".join([*cells, error]) + " |")
    values = [row[kind]["p_value"] for row in results["families"] for kind in ("exact", "numerical")]
    errors = [
        abs(row[kind][moment])
        for row in results["families"]
        for kind in ("exact", "numerical")
        for moment in ("mean_error", "variance_error")
        if math.isfinite(row[kind][moment])
    ]
    worst = max(error for of_family in results["cdf_errors"].values() for error in of_family.values())
    lines += [
        "",
        f"Smallest of {len(values)} p values {min(values):.1e}; largest of {len(errors)} z {max(errors):.1f}; largest "
        f"error of a numerical cdf, tilts {', '.join(f'{t:g}' for t in CDF_TILTS)}: {worst:.1e}.",
        "",
        "Million draws a second of PG(1, z) (and gpext's ratio to each):",
        "",
    ]
    names = list(results["speed"][0]["rates"])
    lines += ["| z | " + " | ".join(names) + " |", "| --- |" + " ---: |" * len(names)]
    for row in results["speed"]:
        own = row["rates"]["gpext"]
        cells = [f"{rate:.2f} ({own / rate:.2f})" for rate in row["rates"].values()]
        lines.append(f"| {row['tilt']} | " + " | ".join(cells) + " |")
    lines += ["", "Million draws a second of PG(b, z), z normal with standard deviation 3:", ""]
    names = list(results["counts"][0]["rates"])
    lines += ["| b | " + " | ".join(names) + " |", "| ---: |" + " ---: |" * len(names)]
    for row in results["counts"]:
        own = row["rates"]["gpext"]
        cells = [f"{rate:.2f} ({own / rate:.2f})" for rate in row["rates"].values()]
        lines.append(f"| {row['count']:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, test, time; print the tables and write the file."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few draws, some seconds")
    parser.add_argument("--draws", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=15, help="of the timings")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args(arguments)
    num_draws = 5_000 if options.quick else options.draws
    timed, rounds = (10_000, 2) if options.quick else (200_000, options.rounds)
    torch.set_num_threads(1)

    cells = [(name, tilt) for name in FAMILIES for tilt in TILTS]
    families = [
        check_family(name, tilt, num_draws, options.seed + k)
        for k, (name, tilt) in enumerate(tqdm(cells, disable=None, desc="families"))
    ]
    generator = torch.Generator().manual_seed(options.seed)
    mixed = 3 * torch.randn(timed, generator=generator, dtype=F64)
    speeds = {f"{z:g}": torch.full_like(mixed, z) for z in (0.0, 0.1, 1.0, 3.0, 10.0, 100.0)} | {"N(0, 3^2)": mixed}
    results = {
        "machine": machine(),
        "versions": package_versions(),
        "num_draws": num_draws,
        "families": families,
        "cdf_errors": {name: {str(tilt): cdf_error(name, tilt) for tilt in CDF_TILTS} for name in FAMILIES},
        "speed": [{"tilt": z, "rates": speed(tilts, rounds, options.seed)} for z, tilts in speeds.items()],
        "counts": [
            {"count": count, "rates": count_speed(count, timed // 10, max(rounds // 3, 1), options.seed)}
            for count in COUNTS
        ],
    }
    print(report(results))
    if options.output is not None:
        write_atomically(options.output, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
