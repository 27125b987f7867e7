r"""Many classes and rows: `GPClassifier()`, untuned, beside one-vs-rest with calibration, and boosting.

Sets: letter (26 classes), satimage (6), shuttle (7), usps (10), with the split of the file, and covtype (7) of 100,000
training rows. Of covtype a systematic sample of 11,318 rows is at hand; 30 % of it are for the test, and the training
rows are drawn from the others with replacement, with noise of 1 % of a standard deviation added to the ten columns of
numbers. So they are no more informative than 7,923 rows, and only the time is that of 100,000.

* gpext: `GPClassifier()`, the softmax of one latent function a class, no samples anywhere;
* svm: `SVC()`, whose decision function of each class is calibrated against the rest by a sigmoid, in three folds
  (`CalibratedClassifierCV`), to 20,000 training rows;
* nystroem: logistic regression on 500 Nystroem features of that kernel, one class against the rest, calibrated likewise
  in three folds;
* boosting: `HistGradientBoostingClassifier()`.

Scores are the mean log probability of the class of a test row, the share of errors, the expected calibration error in
15 bins, and seconds of training and prediction together. The log density of a method that gives probability zero to a
class that occurs is minus infinity; "clipped" is the same with probabilities of at least 1e-6.

    GPEXT_DATA=folder OMP_NUM_THREADS=2 python -m benchmarks.many_classes --threads 2 --output many_classes.jsonl
    python -m benchmarks.many_classes --quick
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.datasets import load
from benchmarks.estimators import Split, class_scores
from benchmarks.ledger import Ledger, Row, command_line, measure_and_report
from benchmarks.tables import table

SETS = ("letter", "satimage", "shuttle", "usps", "covtype")
COVTYPE_ROWS = 100_000
COVTYPE_NUMBERS = 10  # its first columns; the others are indicators
MOST_OF_SVM = 20_000
LEAST_PROBABILITY = 1e-6


def split(name: str) -> Split:
    """Return training and test rows of a set of `benchmarks.datasets`."""
    data = load(name if name == "usps" else f"{name}_classes", test_fraction=0.3)
    train_x, test_x = data.train_x.numpy(), data.test_x.numpy()
    train_y, test_y = data.train_y.long().numpy(), data.test_y.long().numpy()
    if name == "covtype":
        rng = np.random.default_rng(0)
        drawn = rng.integers(len(train_y), size=COVTYPE_ROWS)
        train_x, train_y = train_x[drawn], train_y[drawn]
        train_x[:, :COVTYPE_NUMBERS] += 0.01 * rng.standard_normal((COVTYPE_ROWS, COVTYPE_NUMBERS))
    return Split(train_x, train_y, test_x, test_y, int(max(train_y.max(), test_y.max())) + 1)


def generated() -> Split:
    """Return four classes in the plane, of few rows."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((240, 2))
    y = (x[:, 0] + 0.3 * rng.standard_normal(240) > 0) + 2 * (x[:, 1] > 0)
    return Split(x[:160], y[:160], x[160:], y[160:], 4)


def gpext(data: Split) -> Any:
    """Return a classifier of gpext."""
    from gpext.estimators import GPClassifier

    return GPClassifier()


def svm(data: Split) -> Any:
    """Return support vector machines, calibrated one class against the rest; None for too many rows."""
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVC

    if len(data.train_y) > MOST_OF_SVM:
        return None
    return CalibratedClassifierCV(make_pipeline(StandardScaler(), SVC()), cv=3)


def nystroem(data: Split) -> Any:
    """Return logistic regressions on Nystroem features, one class against the rest."""
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.kernel_approximation import Nystroem
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    features = Nystroem(gamma=1 / data.train_x.shape[1], n_components=min(500, len(data.train_y) // 2), random_state=0)
    each = OneVsRestClassifier(LogisticRegression(C=100.0, max_iter=300))
    return CalibratedClassifierCV(make_pipeline(StandardScaler(), features, each), cv=3)


def boosting(data: Split) -> Any:
    """Return gradient boosting of histograms."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    return HistGradientBoostingClassifier(random_state=0)


METHODS: dict[str, Callable[[Split], Any]] = {"gpext": gpext, "svm": svm, "nystroem": nystroem, "boosting": boosting}


def measure(name: str, method: str, data: Split) -> Row:
    """Return the scores of a method, and its time."""
    row: Row = {"set": name, "method": method, "rows": len(data.train_y), "classes": data.num_classes}
    model = METHODS[method](data)
    if model is None:
        return row
    wall, cpu = time.perf_counter(), time.process_time()
    model.fit(data.train_x, data.train_y)
    row |= {"fit_wall": time.perf_counter() - wall}
    found = model.predict_proba(data.test_x)
    row |= {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    probabilities = np.zeros((len(found), data.num_classes or 0))
    probabilities[:, model.classes_] = found
    chosen = probabilities[np.arange(len(data.test_y)), data.test_y]
    row |= class_scores(probabilities, data.test_y)
    row |= {"clipped": float(np.log(chosen.clip(LEAST_PROBABILITY)).mean())}
    if method == "gpext":
        row |= {"status": model.fit_result_.status.name, "report": str(model.report_)}
    return row


def run(ledger: Ledger, options: argparse.Namespace) -> None:
    """Measure what is missing."""
    for name in ("generated",) if options.quick else options.sets:
        data = generated() if options.quick else split(name)
        for method in options.methods:

            def make(method: str = method, name: str = name, data: Split = data) -> Row:
                return measure(name, method, data)

            ledger.get(f"{name} {method}", make)


def report(ledger: Ledger) -> str:
    """Return a table of all that was measured."""
    head = "set", "rows", "classes", "method", "log density", "clipped", "error", "calibration", "wall s", "CPU s"
    cells = []
    for row in ledger.rows.values():
        first = [row["set"], f"{row['rows']}", f"{row['classes']}", row["method"]]
        if "cpu" in row:
            scores = [f"{row[key]:.4f}" for key in ("log_density", "clipped", "error", "calibration")]
            cells.append([*first, *scores, f"{row['wall']:.0f}", f"{row['cpu']:.0f}"])
        else:
            cells.append([*first, "too many rows", *5 * [""]])
    return table(head, cells)


def main(arguments: Sequence[str] | None = None) -> Ledger:
    """Measure, and print the table."""
    parser = command_line(__doc__, quick="four generated classes")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    return measure_and_report(parser.parse_args(arguments), run, report)


if __name__ == "__main__":
    main()
