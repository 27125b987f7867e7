"""The tables of `benchmarks.robust_regression`: scores with Bayesian bootstrap intervals, differences, times, verdicts.

A score is a mean over all test points of all folds. Its 95 % interval is that of the mean under weights drawn from a
flat Dirichlet distribution over the points [Rubin 1981; Vehtari & Lampinen 2002]; the points of a data set count as
independent. The same draws serve all methods, so differences are paired.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DRAWS = 4000
CHUNK = 250
ENOUGH_FOLDS = 5  # to resample folds
STANDARD_EP = ("EP1", "EP2", "EP3")
HEAD = """# Robust regression: Student-t models by Laplace, EP, CAVI and KL

The comparison of JVV11 (Sec. 6.2, Fig. 6 and Tab. 1) by `python -m benchmarks.robust_regression`, whose docstring
describes the data sets, the folds and the methods. GA: Gaussian noise; 1: nu = 4; 2: nu trained; 3: nu integrated on
the paper's grid; EPf: EP of power 1/2; CAVI: the factorising approximation, fVB. Every model starts from the same
hyperparameters and is trained once, without hyperpriors (the paper's are flat on its scales). MLPD: mean log predictive
density, of the observations or, for Friedman, of the noiseless test values under the posterior of f; MAE: mean absolute
error; both in the units of the data. In brackets: 95 % intervals by the Bayesian bootstrap over the test points.
"Significantly" means that such an interval of the difference excludes zero."""


@dataclass(frozen=True)
class Score:
    """A mean over test points, (M,) for M methods, and the same of each bootstrap draw, (DRAWS, M)."""

    methods: tuple[str, ...]
    mean: Tensor
    draws: Tensor

    def interval(self, method: str, against: str | None = None) -> tuple[float, float, float]:
        """Mean and 95 % interval of a method's score, or of its difference to another's."""
        j = self.methods.index(method)
        mean, draws = self.mean[j], self.draws[:, j]
        if against is not None:
            k = self.methods.index(against)
            mean, draws = mean - self.mean[k], draws - self.draws[:, k]
        low, high = draws.quantile(torch.tensor([0.025, 0.975], dtype=draws.dtype)).tolist()
        return mean.item(), low, high

    def best(self, among: Sequence[str], sign: int) -> str:
        """The method with the highest (sign 1) or lowest (-1) mean."""
        return max(among, key=lambda method: sign * self.mean[self.methods.index(method)].item())


def bootstrap(methods: Sequence[str], values: Tensor, folds: Sequence[int] | None = None) -> Score:
    """Score values (P, M) of P points by M methods; with the sizes of the folds, these have weights of their own."""
    generator = torch.Generator().manual_seed(0)
    draws = []
    for _ in range(DRAWS // CHUNK):
        weights = torch.empty(CHUNK, len(values), dtype=values.dtype).exponential_(generator=generator)
        if folds is not None:
            each = torch.empty(CHUNK, len(folds), dtype=values.dtype).exponential_(generator=generator)
            weights = weights * each.repeat_interleave(torch.tensor(folds), -1)
        draws.append(weights @ values / weights.sum(-1, keepdim=True))
    return Score(tuple(methods), values.mean(0), torch.cat(draws))


def report(head: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Everything as markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in head["versions"].items())
    sections = [HEAD, f"{head['machine']['cpu']}, {head['machine']['cores']} cores, one thread; {versions}."]
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    relative = {}
    for name in datasets:
        found = {(row["fold"], row["method"]): row for row in rows if row["dataset"] == name}
        text, seconds = _dataset(name, found)
        sections.append(text)
        if seconds.get("LA1"):
            relative[name] = {method: value / seconds["LA1"] for method, value in seconds.items()}
    sections += [_times(relative), _fixed({row["dataset"]: row["rules"] for row in rows if row["method"] == "fixed"})]
    return "\n\n".join(section for section in sections if section) + "\n"


def _dataset(name: str, found: Mapping[tuple[int, str], Mapping[str, Any]]) -> tuple[str, dict[str, float]]:
    """The table of a data set and its verdicts, and CPU seconds a fit by method."""
    methods = list(dict.fromkeys(method for _, method in found if method != "fixed"))
    failed = sorted({f"{m} (fold {fold}): {row['error']}" for (fold, m), row in found.items() if _has_failed(row)})
    complete = [m for m in methods if not any(text.startswith(f"{m} ") for text in failed)]
    folds = [f for f in sorted({f for f, _ in found}) if all((f, m) in found for m in methods)]
    if not folds or not complete:
        return "", {}
    density = "latent_log_density" if name == "friedman" else "log_density"

    def score(key: str, *, by_fold: bool = False) -> Score:
        columns = [[v for fold in folds for v in found[fold, m][key]] for m in complete]
        sizes = [len(found[fold, complete[0]][key]) for fold in folds] if by_fold else None
        return bootstrap(complete, torch.tensor(columns, dtype=torch.float64).mT.contiguous(), sizes)

    scores = {"MLPD": (score(density), 1), "MAE": (score("error"), -1)}
    standard = [m for m in STANDARD_EP if m in complete]
    reference = {key: s.best(standard, sign) for key, (s, sign) in scores.items()} if standard else {}
    seconds = {m: sum(found[fold, m]["seconds"] for fold in folds) / len(folds) for m in complete}
    columns = ["method"]
    for key in scores:
        columns += [key] + ([f"minus {reference[key]}"] if reference else [])
    columns += ["CPU seconds", "trained to convergence", "inferences that did not converge"]
    lines = [_line(columns), "| --- |" + " ---: |" * (len(columns) - 1)]
    for m in complete:
        cells = [m]
        for key, (s, _) in scores.items():
            cells += [_interval(*s.interval(m))]
            if reference:
                cells += [_interval(*s.interval(m, reference[key])) if m != reference[key] else ""]
        converged = sum(found[fold, m]["status"] == "CONVERGED" for fold in folds)
        unconverged = sum(found[fold, m]["unconverged"] for fold in folds)
        lines.append(_line([*cells, f"{seconds[m]:.1f}", f"{converged} of {len(folds)}", str(unconverged)]))
    size = found[folds[0], complete[0]]["num_train"]
    text = [f"## {name}: {len(folds)} folds, {size} training points", "\n".join(lines)]
    text += [_verdict(key, s, sign, reference[key], standard) for key, (s, sign) in scores.items() if reference]
    if reference and len(folds) >= ENOUGH_FOLDS:  # the points of a fold share what its training set happened to be
        again = {"MLPD": score(density, by_fold=True), "MAE": score("error", by_fold=True)}
        worse = [
            f"{key}: {', '.join(_better(again[key], reference[key], sign)) or 'none'}"
            for key, (_, sign) in scores.items()
        ]
        text.append(f"Significantly better than the best EP if the folds are resampled as well: {'; '.join(worse)}.")
    if name == "friedman":
        other = score("log_density")
        cells = ", ".join(f"{m} {other.mean[j]:.3f}" for j, m in enumerate(complete))
        text.append(
            f"Mean log density of the same values as if they were observations, the noise model included: {cells}."
        )
    left_out = len({f for f, _ in found}) - len(folds)
    if left_out:
        text.append(f"{left_out} more folds have not been run by all of these methods.")
    return "\n\n".join(text + [f"Failed: {f}." for f in failed]), seconds


def _has_failed(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("error"), str)


def _verdict(key: str, score: Score, sign: int, reference: str, standard: Sequence[str]) -> str:
    """Which method is first, and which are significantly better than EP."""
    first = score.best(score.methods, sign)
    parts = [f"{than}: {', '.join(_better(score, than, sign)) or 'none'}" for than in standard if than != reference]
    return (
        f"{key}: first is {first}. Significantly better than the best EP, {reference}: "
        f"{', '.join(_better(score, reference, sign)) or 'none'}; than {'; than '.join(parts)}."
    )


def _better(score: Score, than: str, sign: int) -> list[str]:
    """Return the methods whose interval of the difference to `than` is on the better side of zero."""
    better = []
    for method in score.methods:
        _, low, high = score.interval(method, than)
        if method != than and (low > 0 if sign > 0 else high < 0):
            better.append(method)
    return better


def _times(relative: Mapping[str, Mapping[str, float]]) -> str:
    """CPU times of training and prediction over those of LA1 [JVV11 Tab. 1]."""
    if not relative:
        return ""
    methods = list(next(iter(relative.values())))
    lines = [_line(["over LA1", *methods]), "| --- |" + " ---: |" * len(methods)]
    lines += [_line([name, *(f"{row.get(m, float('nan')):.1f}" for m in methods)]) for name, row in relative.items()]
    for label, pick in (("mean", lambda v: sum(v) / len(v)), ("max", max)):
        lines.append(
            _line([label, *(f"{pick([row[m] for row in relative.values() if m in row]):.1f}" for m in methods)])
        )
    return "## CPU time of training and prediction\n\n" + "\n".join(lines)


def _fixed(rules: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """CPU times of inference and prediction at fixed hyperparameters, over Laplace's."""
    if not rules:
        return ""
    names = list(next(iter(rules.values())))
    lines = [_line(["over LA", *names]), "| --- |" + " ---: |" * len(names)]
    means = dict.fromkeys(names, 0.0)
    for dataset, row in rules.items():
        base = torch.tensor(row["LA"]["seconds"], dtype=torch.float64)
        total, median, worst = [], [], []
        for name in names:
            seconds = torch.tensor(row[name]["seconds"], dtype=torch.float64)
            means[name] += (seconds.sum() / base.sum()).item() / len(rules)
            total.append(f"{seconds.sum() / base.sum():.1f}")
            median.append(f"{(seconds / base).median():.1f}")
            worst.append(f"{sum(status == 'CONVERGED' for status in row[name]['statuses'])}")
        lines.append(_line([f"{dataset}, sum of {len(base)}", *total]))
        lines.append(_line([f"{dataset}, median", *median]))
        lines.append(_line([f"{dataset}, converged", *worst]))
    lines.append(_line(["mean of the sums", *(f"{means[name]:.1f}" for name in names)]))
    return "## CPU time at fixed hyperparameters\n\n" + "\n".join(lines)


def _interval(mean: float, low: float, high: float) -> str:
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
