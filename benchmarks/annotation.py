r"""Annotate pictures with the digits in them [Cha13 Sec. 4.3, Fig. 3].

The paper's images are not available; its task is reproduced with pictures composed of scikit-learn's digits: 482
pictures of 2 x 2 random digits, 300 for training and the rest for testing, 10 random splits, 10 labels that state only
which digits are present. Digits are equally frequent, or in proportion to 1, 1/2, ..., 1/10 from digit 0 to 9
("unequal"), as words are. Features are standardised root histograms: of the 17 intensities, which like the paper's
colour histograms have little information; or of 50 visual words (k-means on the 6 x 6 patches of the training
pictures), which have more.

Training targets of the Dirichlet GP are as in the synthetic experiment: labels that are present share equally, zeros
smoothed, y = (1 - e) share + e / 10, with e = 0.9, the best of 1 / 300 (which the error of DirichletLikelihood
proposes), 0.1, 0.3, 0.6 and 0.9 on pictures of another seed. Its latents share one squared exponential kernel and have
zero means. Pictures are annotated with the k labels of largest predictive mean. One-vs-all GPC has a squared
exponential kernel for each label, by Laplace (scikit-learn, logistic) and by EP (`gpext.inference.EP`, probit); "most
frequent" annotates every picture with the labels most frequent in training. All parameters maximise the marginal
likelihood. The F-score is that of each label over the test pictures, averaged over labels; "precise" is the share of
true labels among those given.

    python -m benchmarks.multivariate_efd annotation --output results/multivariate_efd.jsonl
"""

from __future__ import annotations

import argparse
import time
import warnings
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from tqdm import tqdm

from benchmarks.ledger import Ledger, Row
from benchmarks.simplex_models import RULES, DirichletGP, present_by_ep, train
from benchmarks.simplex_recovery import with_error

LABELS = 10
RANKS = range(1, 6)
SPLITS = 10
SEED = 0  # of the pictures
SIDE = 2  # of a picture, in digits
PATCH = 6
LEVELS = 17  # intensities
METHODS = {  # the rule and e of a Dirichlet GP
    "Dirichlet, Laplace, e = 0.9": ("Dirichlet, Laplace", 0.9),
    "one-vs-all GPC": ("", 0.0),
    "most frequent": ("", 0.0),
    "Dirichlet, Laplace, e = 0.3": ("Dirichlet, Laplace", 0.3),
    "Dirichlet, Laplace, e = 0.0033": ("Dirichlet, Laplace", 1 / 300),
    "Dirichlet, Taylor, e = 0.3": ("Dirichlet, Taylor", 0.3),
    "one-vs-all GPC, EP": ("", 0.0),
}
PEERS = ("one-vs-all GPC", "one-vs-all GPC, EP")
EVERYWHERE = list(METHODS)[:3]  # the other methods on the first task only


class Task(NamedTuple):
    """The features and the composition of pictures."""

    by_words: bool  # or by intensities
    unequal: bool


TASKS = {
    "intensities": Task(False, False),
    "words": Task(True, False),
    "intensities, unequal": Task(False, True),
    "words, unequal": Task(True, True),
}


class Split(NamedTuple):
    """Features and labels, present or not."""

    x: np.ndarray  # (N, words)
    present: np.ndarray  # (N, 10)
    test_x: np.ndarray
    test_present: np.ndarray


def pictures(unequal: bool, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return pictures (count, height, height) and which digits they show (count, 10)."""
    images, classes = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8)
    weight = 1 / (1 + np.arange(LABELS)) if unequal else np.ones(LABELS)
    shown = rng.choice(LABELS, (count, SIDE, SIDE), p=weight / weight.sum())
    chosen = np.empty(shown.shape, int)
    for label in range(LABELS):
        where = shown == label
        chosen[where] = rng.choice(np.flatnonzero(classes == label), where.sum())
    tiles = images[chosen]  # (count, side, side, 8, 8)
    composed = tiles.transpose(0, 1, 3, 2, 4).reshape(count, 8 * SIDE, 8 * SIDE)
    present = (shown.reshape(count, -1, 1) == np.arange(LABELS)).any(1)
    return composed, present.astype(float)


def patches(images: np.ndarray) -> np.ndarray:
    """Return all patches (count, patches, pixels) of pictures."""
    windows = np.lib.stride_tricks.sliding_window_view(images, (PATCH, PATCH), axis=(1, 2))
    return windows.reshape(len(images), -1, PATCH * PATCH)


def histograms(bins: np.ndarray, size: int) -> np.ndarray:
    """Return the root histogram (size,) of every row of bins."""
    return np.sqrt(np.stack([np.bincount(row, minlength=size) for row in bins]))


def features(train: np.ndarray, test: np.ndarray, by_words: bool, words: int) -> tuple[np.ndarray, np.ndarray]:
    """Return standardised features of the pictures."""
    if by_words:
        codebook = KMeans(words, n_init=1, random_state=0).fit(patches(train).reshape(-1, PATCH * PATCH)[::7])
        found = []
        for of in map(patches, (train, test)):
            word = codebook.predict(of.reshape(-1, PATCH * PATCH)).reshape(of.shape[:2])
            found.append(histograms(word, words))
    else:
        found = [histograms(images.reshape(len(images), -1).astype(int), LEVELS) for images in (train, test)]
    centre, scale = found[0].mean(0), found[0].std(0)
    scale = np.where(scale > 0, scale, 1)
    return (found[0] - centre) / scale, (found[1] - centre) / scale


def split(name: str, number: int, quick: bool) -> Split:
    """Return one of the random splits of a task's pictures."""
    count, num_train, words = (40, 25, 8) if quick else (482, 300, 50)
    task = TASKS[name]
    composed, present = pictures(task.unequal, count, np.random.default_rng(SEED))
    order = np.random.default_rng(number).permutation(count)
    train, test = order[:num_train], order[num_train:]
    x, test_x = features(composed[train], composed[test], task.by_words, words)
    return Split(x, present[train], test_x, present[test])


def by_dirichlet(rule: str, smoothing: float, given: Split, max_steps: int | None) -> tuple[np.ndarray, Row]:
    """Return predictive means (N*, 10), and the status of training."""
    shares = torch.from_numpy(given.present / given.present.sum(-1, keepdims=True))
    x = torch.from_numpy(given.x)
    y = (1 - smoothing) * shares + smoothing / LABELS
    model = DirichletGP(x, y, RULES[rule], shared=True, ard=False, constant=False)
    model.covar_module.base_kernel.lengthscale = x.size(-1) ** 0.5
    row = train(model, max_steps)
    with torch.no_grad():
        return model.likelihood(model(torch.from_numpy(given.test_x))).mean.numpy(), row


def one_against_all(given: Split) -> np.ndarray:
    """Return the labels' probabilities of being present (N*, 10)."""
    columns = []
    for present in given.present.T:
        kernel = ConstantKernel(1.0, (1e-4, 1e5)) * RBF(given.x.shape[1] ** 0.5, (1e-1, 1e4))
        with warnings.catch_warnings():  # about its bounds, and long steps of its line search
            for category in (ConvergenceWarning, RuntimeWarning):
                warnings.simplefilter("ignore", category)
            classifier = GaussianProcessClassifier(kernel).fit(given.x, present)
        columns.append(classifier.predict_proba(given.test_x)[:, 1])
    return np.stack(columns, -1)


def scores(predicted: np.ndarray, present: np.ndarray, rank: int) -> tuple[float, float]:
    """Return the F-score averaged over labels, and the precision, of annotation with this number of labels."""
    given = np.zeros_like(present)
    np.put_along_axis(given, np.argsort(-predicted, -1, kind="stable")[:, :rank], 1, -1)
    found = (given * present).sum(0)
    totals = given.sum(0) + present.sum(0)
    known = totals > 0
    return float(np.mean(2 * found[known] / totals[known])), float(found.sum() / given.sum())


def measure(name: str, method: str, number: int, quick: bool) -> Row:
    """Return the scores of a method on a split."""
    given = split(name, number, quick)
    started = time.perf_counter()
    how: Row = {}
    rule, smoothing = METHODS[method]
    if rule:
        predicted, how = by_dirichlet(rule, smoothing, given, 2 if quick else None)
    elif method == "most frequent":
        predicted = np.tile(given.present.mean(0), (len(given.test_present), 1))
    elif method == PEERS[0]:
        predicted = one_against_all(given)
    else:
        x, test_x, present = (torch.from_numpy(a) for a in (given.x, given.test_x, given.present))
        predicted = present_by_ep(x, present, test_x, 2 if quick else None, x.size(-1) ** 0.5).numpy()
    row: Row = {"task": name, "method": method, **how, "total_seconds": time.perf_counter() - started}
    found = [scores(predicted, given.test_present, rank) for rank in RANKS]
    return {**row, "f": [f for f, _ in found], "precise": [precise for _, precise in found]}


def run_annotation(ledger: Ledger, options: argparse.Namespace) -> None:
    """Measure every method on every split."""
    quick = options.quick
    prefix = "annotation/quick" if quick else "annotation"
    names, numbers = (list(TASKS)[:2], range(1)) if quick else (list(TASKS), range(SPLITS))
    keys = [(name, method, number) for name in names for method in METHODS for number in numbers]
    keys = [key for key in keys if key[0] == names[0] or key[1] in EVERYWHERE]
    for name, method, number in tqdm(keys, desc="annotation", disable=None):
        ledger.get(f"{prefix}/{name}/{number}/{method}", partial(measure, name, method, number, quick))


def report_annotation(ledger: Ledger) -> str:
    """Return the scores, and the gains of the first method over one-vs-all GPC, paired by split."""
    ranks = " | ".join(f"k = {rank}" for rank in RANKS)
    lines = [f"| pictures | method | score | {ranks} |", f"| --- | --- | --- |{' --- |' * len(RANKS)}"]
    rows = ledger.of("annotation/")
    for name in TASKS:
        for score in ("f", "precise"):
            for method in METHODS:
                found = _by_split(rows, name, method, score)
                if found:
                    cells = " | ".join(f"{value:.3f}" for value in np.mean(list(found.values()), 0))
                    lines.append(f"| {name} | {method} | {score} | {cells} |")
        for peer in PEERS:
            pairs = _pairs(*(_by_split(rows, name, method, "f") for method in (EVERYWHERE[0], peer)))
            if pairs:
                cells = " | ".join(with_error(list(gain)) for gain in np.subtract(*np.moveaxis(pairs, 1, 0)).T)
                lines.append(f"| {name} | {EVERYWHERE[0]}, minus {peer}, {len(pairs)} splits | f | {cells} |")
    return "\n".join(lines)


def _by_split(rows: list[Row], name: str, method: str, score: str) -> dict[str, list[float]]:
    """Return the scores at every rank, by the number of the split."""
    return {row["key"].split("/")[-2]: row[score] for row in rows if (row["task"], row["method"]) == (name, method)}


def _pairs(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> list[tuple[list[float], list[float]]]:
    """Return both methods' scores on the splits that both have."""
    return [(ours[number], theirs[number]) for number in ours if number in theirs]
