"""The data sets of the benchmarks, split and standardised the same way for every method.

A set is read from ``$GPEXT_DATA/FILE.csv.gz`` (one header row, targets last, an optional first column ``split``) when
that folder is given, otherwise its public original is downloaded through scikit-learn, which keeps its own cache.
Sets without an original that scikit-learn can fetch need the folder.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

TEST_FRACTION = 0.1
_A_MILLION = 1_111_112  # rows, of which a million are to train on


@dataclass(frozen=True)
class Dataset:
    """Standardised training and test data in float64.

    Attributes:
        name: Key in :data:`SOURCES`.
        task: ``"regression"`` (targets standardised with the training mean and scale), ``"binary"`` (targets 0, 1),
            ``"classes"`` or ``"ordinal"`` (targets 0, 1, ..., K - 1), ``"angles"`` (radians), ``"composition"``
            (targets of D parts that sum to one, as they are), ``"survival"`` (times in years, and 1 for an event, 0
            where censored), ``"counts"``, ``"points"`` (places, no features).
        train_x: (N, d)
        train_y: (N,), compositions (N, D), survival (N, 2)
        test_x: (N*, d)
        test_y: like train_y
        target_mean: Subtracted from the regression targets; 0 for classes.
        target_scale: The regression targets were divided by it; 1 for classes. A log density in original
            units is the standardised one minus ``log(target_scale)``.
    """

    name: str
    task: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    target_mean: float
    target_scale: float


@dataclass(frozen=True)
class Table:
    """A raw data set: features (N, d), targets (N,) or (N, D), its usual split (N,) with 1 for test rows, if any."""

    features: np.ndarray
    targets: np.ndarray
    is_test: np.ndarray | None = None


@dataclass(frozen=True)
class Source:
    """Where a data set comes from and which of its columns is the target, or which are its parts."""

    task: str
    file: str | None
    target: str | tuple[str, ...] = "y"
    positive: float | None = None  # the class that counts as 1 when the file has more than two
    fetch: Callable[[], Table] | None = None
    prepare: Callable[[Table], Table] | None = None  # of what the file has


def _openml(data_id: int, positive: str | None = None) -> Callable[[], Table]:
    def fetch() -> Table:
        from sklearn.datasets import fetch_openml

        features, targets = fetch_openml(data_id=data_id, as_frame=False, return_X_y=True)
        targets = targets == positive if positive is not None else targets
        return Table(np.asarray(features, float), np.asarray(targets, float))

    return fetch


def _openml_classes(data_id: int) -> Callable[[], Table]:
    def fetch() -> Table:
        from sklearn.datasets import fetch_openml

        features, targets = fetch_openml(data_id=data_id, as_frame=False, return_X_y=True)
        return Table(np.asarray(features, float), np.unique(targets, return_inverse=True)[1].astype(float))

    return fetch


def _covtype() -> Table:
    """Every 50th row after the 15120 class-balanced ones, lodgepole pine (class 2 of 1..7) against the rest."""
    from sklearn.datasets import fetch_covtype

    features, targets = fetch_covtype(return_X_y=True)
    return Table(np.asarray(features[15120::50], float), np.asarray(targets[15120::50] == 2, float))


def _california() -> Table:
    from sklearn.datasets import fetch_california_housing

    return Table(*fetch_california_housing(return_X_y=True))


def _diabetes() -> Table:
    from sklearn.datasets import load_diabetes

    return Table(*load_diabetes(return_X_y=True))


def _synthetic(binary: bool, size: int = 1200) -> Callable[[], Table]:
    """A smooth surface in 4 dimensions with heavy-tailed noise or logit labels: for tests, and where no data are."""

    def draw() -> Table:
        rng = np.random.default_rng(0)
        x = rng.standard_normal((size, 4))
        f = 2 * np.sin(1.5 * x[:, 0]) + x[:, 1] * x[:, 2]
        if binary:
            return Table(x, (rng.random(len(x)) < 1 / (1 + np.exp(-2 * f))).astype(float))
        return Table(x, f + 0.3 * rng.standard_t(3, len(x)))

    return draw


def _wind_of_nights(table: Table) -> Table:
    """Time in days, of which day and minute are parts."""
    return Table(table.features[:, 2:], table.targets)


def _wind_by_the_clock(table: Table) -> Table:
    """Time in hours, and where the hour of the day is on the dial."""
    time, dial = table.features[:, 0], table.features[:, 1] * np.pi / 12
    return Table(np.column_stack([time, np.cos(dial), np.sin(dial)]), table.targets)


def _wind_by_the_weather(table: Table) -> Table:
    """Station JFK: season and hour on their dials, temperature, dew point, humidity, wind speed."""
    here = table.features[:, 0] == 1
    _, hours, _, hour, *weather = table.features[here].T
    season, dial = hours * 2 * np.pi / (365 * 24), hour * np.pi / 12
    seasonal = [np.cos(season), np.sin(season), np.cos(dial), np.sin(dial)]
    return Table(np.column_stack([*seasonal, *weather]), table.targets[here])


def _synthetic_angles() -> Table:
    """Angles about a line that winds: for tests, and where no data are."""
    rng = np.random.default_rng(0)
    x = np.sort(rng.uniform(0, 4, 60))
    return Table(x[:, None], np.angle(np.exp(1j * (1.5 * x + 0.3 * rng.standard_normal(60)))))


def _leukemia(table: Table) -> Table:
    """Place, age, sex, the logarithm of the white blood cell count, and deprivation; not the label of the district."""
    x, y, age, sex, white, deprivation, _ = table.features.T
    return Table(np.column_stack([x, y, age, sex, np.log1p(white), deprivation]), table.targets / [365.25, 1])


def _synthetic_survival() -> Table:
    """Times whose hazard falls with time and depends on six covariates, of which the effect of the third wears off."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 6))
    early = np.exp(np.sin(1.5 * x[:, 0]) + 0.5 * x[:, 2])  # the hazard until time 1
    late = 0.3 * np.exp(np.sin(1.5 * x[:, 0]))
    target = rng.exponential(size=len(x))
    time = np.where(target < early, target / early, 1 + (target - early) / late)
    censored = rng.uniform(0.5, 8, len(x))
    return Table(x, np.column_stack([np.minimum(time, censored), time <= censored]).astype(float))


SOURCES: dict[str, Source] = {
    "protein": Source("regression", "protein_casp", fetch=_openml(44963)),
    "airline": Source("regression", "airline_delay_nyc13", target="y_delay"),
    "boston": Source("regression", "boston_housing", fetch=_openml(531)),
    "concrete": Source("regression", "concrete"),
    "census_house_8L": Source("regression", "census_house_8L", fetch=_openml(218)),
    # The first 20000 rows of the original are not a sample of it: 15120 of them are balanced over 7 classes (14 % of
    # class 1), the rest come from one region (79 %). The systematic sample keeps the natural 49 %, so it is the one
    # used, although it is smaller; the two overlap and are not combined.
    "covtype": Source("binary", "covtype_every50th", positive=1, fetch=_covtype),
    "susy": Source("binary", "susy_21k"),
    "magic": Source("binary", "magic04", fetch=_openml(1120, positive="g")),
    "spambase": Source("binary", "spambase", fetch=_openml(44, positive="1")),
    "electricity": Source("binary", "electricity"),
    "shuttle": Source("binary", "shuttle", positive=0),
    "letter": Source("binary", "letter", positive=0, fetch=_openml(6, positive="A")),
    "kin40k": Source("regression", "kin40k"),
    "pol": Source("regression", "pol"),
    "elevators": Source("regression", "elevators", fetch=_openml(216)),
    "california": Source("regression", "california_housing", fetch=_california),
    "naval": Source("regression", "naval", target="y_turbine"),
    "bike": Source("regression", "bike_hourly"),
    "mcycle": Source("regression", "mcycle"),
    "yacht": Source("regression", "yacht"),
    "abalone": Source("regression", "abalone"),
    "diabetes": Source("regression", None, fetch=_diabetes),
    "energy": Source("regression", "energy", target="y_heating"),
    "airfoil": Source("regression", "airfoil"),
    "kin8nm": Source("regression", "kin8nm"),
    "power_plant": Source("regression", "power_plant"),
    "wine_red": Source("regression", "wine_quality_red"),
    **{
        name: Source("regression", f"ordinal_{name}", target="y_cont") for name in ("auto_mpg", "machine_cpu", "stocks")
    },
    "australian": Source("binary", "australian"),
    "banana": Source("binary", "banana"),
    "breast_wisconsin": Source("binary", "breast_wisconsin"),
    "crabs": Source("binary", "crabs", target="y_sex"),
    **{f"{name}_0": Source("binary", name, positive=0) for name in ("satimage", "segment", "vehicle")},
    "heart": Source("binary", "heart_cleveland"),
    "heart_statlog": Source("binary", "heart_statlog", fetch=_openml(53, positive="present")),
    "ionosphere": Source("binary", "ionosphere", fetch=_openml(59, positive="g")),
    "sonar": Source("binary", "sonar", fetch=_openml(40, positive="Mine")),
    "usps_3vs5": Source("binary", "usps_3vs5"),
    "usps": Source("classes", "usps"),
    **{f"{name}_classes": Source("classes", name) for name in ("letter", "satimage", "shuttle")},
    "covtype_classes": Source("classes", "covtype_every50th"),
    "glass": Source("classes", "glass", fetch=_openml_classes(41)),
    "vehicle": Source("classes", "vehicle", fetch=_openml_classes(54)),
    **{
        f"ordinal_{name}": Source("ordinal", f"ordinal_{name}", target=target)
        for name, target in (("boston", "y5"), ("machine_cpu", "y5"), ("esl", "y"), ("lev", "y"), ("stocks", "y5"))
    },
    "wind_col_de_la_roa": Source("angles", "wind_col_de_la_roa", prepare=_wind_of_nights),
    "wind_texas": Source("angles", "wind_texas_hourly", prepare=_wind_by_the_clock),
    "wind_jfk": Source("angles", "wind_nyc13_hourly", prepare=_wind_by_the_weather),
    "periwinkles": Source("angles", "periwinkles"),
    "arctic_lake": Source("composition", "arctic_lake", target=("y_sand", "y_silt", "y_clay")),
    "gemas": Source("composition", "gemas_soil_texture", target=("y_sand", "y_silt", "y_clay")),
    "nmes": Source("counts", "nmes1988_visits"),
    "drowning": Source("counts", "drowning_monthly"),
    "synthetic_regression": Source("regression", None, fetch=_synthetic(binary=False)),
    "synthetic_binary": Source("binary", None, fetch=_synthetic(binary=True)),
    "leukemia": Source("survival", "leukemia_survival", target=("y_time", "y_event"), prepare=_leukemia),
    "bei": Source("counts", "bei_counts"),
    "redwood": Source("points", "redwood_points", target=("y_1", "y_2")),
    "million_binary": Source("binary", None, fetch=_synthetic(binary=True, size=_A_MILLION)),
    "million_regression": Source("regression", None, fetch=_synthetic(binary=False, size=_A_MILLION)),
    "synthetic_survival": Source("survival", None, fetch=_synthetic_survival),
    "synthetic_angles": Source("angles", None, fetch=_synthetic_angles),
}


def _read(path: Path, target: str | tuple[str, ...], positive: float | None) -> Table:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        names = file.readline().strip().split(",")
        values = np.loadtxt(file, delimiter=",", dtype=float, ndmin=2)
    features = [i for i, c in enumerate(names) if c not in ("split", "y", "y5", "y10") and not c.startswith("y_")]
    targets = values[:, names.index(target) if isinstance(target, str) else [names.index(part) for part in target]]
    if positive is not None:
        targets = (targets == positive).astype(float)
    is_test = values[:, names.index("split")] == 1 if "split" in names else None
    return Table(values[:, features], targets, is_test)


def _raw(name: str, source: Source) -> Table:
    folder = os.environ.get("GPEXT_DATA")
    if source.file is None:
        assert source.fetch is not None
        return source.fetch()
    if folder:
        path = Path(folder) / f"{source.file}.csv.gz"
        if not path.is_file():
            raise FileNotFoundError(f"GPEXT_DATA has no {path.name}, which the data set {name!r} needs.")
        table = _read(path, source.target, source.positive)
        return table if source.prepare is None else source.prepare(table)
    remedy = f"Set GPEXT_DATA to a folder that has {source.file}.csv.gz."
    if source.fetch is None:
        raise FileNotFoundError(f"The data set {name!r} has no original that scikit-learn can download. {remedy}")
    try:
        return source.fetch()
    except Exception as error:
        raise FileNotFoundError(f"The original of the data set {name!r} could not be downloaded. {remedy}") from error


def raw_table(name: str) -> Table:
    """Return one data set as it is, neither split nor standardised.

    Args:
        name: A key of :data:`SOURCES`.

    Raises:
        ValueError: The name is unknown.
        FileNotFoundError: The data are neither in ``$GPEXT_DATA`` nor could they be downloaded.
    """
    if name not in SOURCES:
        raise ValueError(f"unknown data set {name!r}; expected one of {sorted(SOURCES)}.")
    return _raw(name, SOURCES[name])


def load(
    name: str,
    *,
    seed: int = 0,
    max_train: int | None = None,
    test_fraction: float = TEST_FRACTION,
    fold: tuple[int, int] | None = None,
) -> Dataset:
    """Read, split and standardise one data set.

    Args:
        name: A key of :data:`SOURCES`.
        seed: Chooses which rows are the test part, unless the set brings a split of its own.
        test_fraction: How much is the test part, unless the set brings a split of its own.
        fold: (k, K) for cross-validation: the k-th (from 0) of K equal parts is the test part, whatever the fraction;
            training rows are in the order of the parts k + 1, ..., K - 1, 0, ..., k - 1.
        max_train: Keep at most so many training rows, for quick runs; the standardisation uses the kept rows.

    Returns:
        The data in float64. Features that are constant on the training part are dropped.

    Raises:
        ValueError: The name is unknown.
        FileNotFoundError: The data are neither in ``$GPEXT_DATA`` nor could they be downloaded.
    """
    raw = raw_table(name)
    source = SOURCES[name]
    order = np.random.default_rng(seed).permutation(len(raw.targets))
    if fold is not None:
        parts = np.array_split(order, fold[1])
        test, *parts = parts[fold[0] :] + parts[: fold[0]]  # so that `max_train` keeps other rows in each fold
        train = np.concatenate(parts)
    elif raw.is_test is None:
        num_test = round(test_fraction * len(order))
        train, test = order[num_test:], order[:num_test]
    else:
        train, test = order[~raw.is_test[order]], np.flatnonzero(raw.is_test)
    train = train[:max_train]

    centre, scale = raw.features[train].mean(0), raw.features[train].std(0)
    kept = scale > 0
    x = (raw.features[:, kept] - centre[kept]) / scale[kept]
    mean, spread = 0.0, 1.0
    if source.task == "regression":
        mean, spread = float(raw.targets[train].mean()), float(raw.targets[train].std())
    y = (raw.targets - mean) / spread
    return Dataset(
        name=name,
        task=source.task,
        train_x=torch.from_numpy(x[train]),
        train_y=torch.from_numpy(y[train]),
        test_x=torch.from_numpy(x[test]),
        test_y=torch.from_numpy(y[test]),
        target_mean=mean,
        target_scale=spread,
    )
