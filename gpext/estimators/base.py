"""The common part of the estimators: tables in, one trained model, predictions a thousand rows at a time."""

from __future__ import annotations

import copy
import time
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor
from torch.distributions import Distribution

from gpext import saving
from gpext.bounds import num_latents
from gpext.estimators import persistence
from gpext.estimators.averaging import averaged, hyperparameter_draws, members_of
from gpext.estimators.models import (
    DenseGP,
    SparseGP,
    default_kernel,
    hyperparameters_of,
    plain_kernels,
    start_from,
)
from gpext.estimators.plan import choose_plan
from gpext.estimators.report import Report, report_of
from gpext.estimators.rows import Rows, distinct_rows
from gpext.estimators.table import Columns, fit_columns, read_table
from gpext.estimators.task import Rules, Settings, Task, Trained
from gpext.estimators.training import train, try_out
from gpext.inference import EP, KL, Laplace, OutlierReport, Rule, outlier_report
from gpext.inference.expansion import require_curvature
from gpext.likelihoods import LatentLikelihood, Weighted
from gpext.models.latent_gp import check_rule
from gpext.training import FitResult, FitStatus

if TYPE_CHECKING:
    from typing_extensions import Self

_ROWS = 1000  # predicted at once
_ROWS_BY_NEIGHBOURS = 4000  # likewise: they share work, and need less memory each
_FEW = 400  # rows up to which predictions are averages over hyperparameters
_TRIED = 300  # rows of the models that decide about a transform, of up to four latent functions
MODE = 1e-4  # tolerance of Laplace's mode while training, in posterior standard deviations
FINE = (FitStatus.CONVERGED, FitStatus.STALLED, FitStatus.NOISE_FLOOR)


class GPEstimator(BaseEstimator):
    """The base of the estimators; the options are those of each of them."""

    report_: Report
    model_: DenseGP | SparseGP
    likelihood_: Any
    fit_result_: FitResult
    likelihood_name_: str
    categories_: dict[Any, Any]
    _columns: Columns
    _is_weighted: bool
    _distinct: np.ndarray  # of each row of the table its distinct row, -1 without weight (n,); empty of sparse models
    _hyperparameters: np.ndarray  # draws (S, P)
    _members: list[DenseGP]  # a model for each of them; none where the one in `model_` predicts alone
    _other_hyperparameters: dict[str, dict[str, np.ndarray]]  # of models of other kernels, by what these are
    _others: list[DenseGP]  # these models
    _weights: np.ndarray  # of the predictions of `model_` and of each of the others, of sum one
    _averages = False  # whether few rows may have an average over hyperparameters
    _most_mixed = 0  # rows up to which predictions may be averages with those of other kernels
    _stored: tuple[str, ...] = (
        "n_features_in_",
        "feature_names_in_",
        "categories_",
        "likelihood_name_",
        "_distinct",
        "_hyperparameters",
        "_other_hyperparameters",
        "_weights",
    )

    def __init__(
        self,
        *,
        kernel: Kernel | None = None,
        inference: str | Rule = "auto",
        inducing_points: Any = "auto",
        neighbours: str | int | None = "auto",
        batch_size: str | int | None = "auto",
        skewed_columns: str = "auto",
        priors: bool = True,
        max_steps: int | None = None,
        tolerance: float = 1e-3,
        warm_start: bool = False,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.kernel = kernel
        self.inference = inference
        self.inducing_points = inducing_points
        self.neighbours = neighbours
        self.batch_size = batch_size
        self.skewed_columns = skewed_columns
        self.priors = priors
        self.max_steps = max_steps
        self.tolerance = tolerance
        self.warm_start = warm_start
        self.random_state = random_state
        self.verbose = verbose

    # ---- training ----------------------------------------------------------------------------------------------

    def _distinct_rows(self, raw: np.ndarray, targets: np.ndarray, sample_weight: Any) -> Rows:
        """Return the distinct rows; see :func:`distinct_rows`."""
        raw, targets, weights, self._distinct = distinct_rows(raw, targets, sample_weight)
        return Rows(raw, targets, weights)

    def _train(self, rows: Rows, likelihoods: dict[str, Callable[[], Any]]) -> None:
        """Train a model by each likelihood in turn, each from the one before, and keep that of the best predictions.

        Args:
            rows: distinct ones, their targets as the likelihoods take them, and positive weights.
            likelihoods: makers by name; with inducing points one of them alone.
        """
        started = time.perf_counter()
        settings = Settings(self.max_steps, self.tolerance, self._seed(), self.verbose > 0)
        first = next(iter(likelihoods.values()))
        self._columns, transform_reason, tried = self._choose_columns(rows, first, settings)
        inputs = torch.from_numpy(self._columns.transform(rows.raw))
        start, start_rows = self._start(), len(inputs)
        if start is None and tried is not None:
            start, start_rows = hyperparameters_of(tried.model, tried.likelihood), len(tried.model.train_inputs[0])
        found: dict[str, Trained] = {}
        sites = None
        reasons = [transform_reason]
        latents = max(num_latents(make()) or 1 for make in likelihoods.values())
        plan = choose_plan(
            len(inputs),
            latents,
            self.inducing_points,
            self.batch_size,
            self.neighbours,
            num_columns=inputs.size(-1),
            most_rough=self._most_rough(first()),
        )
        if plan.is_sparse:
            self._distinct = self._distinct[:0]
            if len(likelihoods) > 1:
                name, reason = self._choose_sparse(rows, likelihoods, settings)
                likelihoods = {name: likelihoods[name]}
                reasons.append(reason)
        for name, make in likelihoods.items():
            likelihood = make().to(inputs.dtype)
            reason, begins_anew = self._prepare(likelihood, found)
            if reason:
                reasons.append(f"noise {name!r} not trained: {reason}")
                continue
            if begins_anew:
                start, start_rows, sites = None, 0, None
            likelihood, y = self._weighted(likelihood, *rows.tensors, sparse=plan.is_sparse)
            task = Task(
                inputs,
                y,
                likelihood,
                self._own_kernel(inputs, self._columns),
                self._rules(likelihood, y),
                points=self._given_points(),
                has_categories=len(self._columns.categorical) > 0,
                priors=self.priors,
                start=start,
                start_rows=0 if start is None else start_rows,
                has_default_kernel=self.kernel is None,
                sites=sites,
            )
            found[name] = train(task, plan, settings)
            start, start_rows = hyperparameters_of(found[name].model, found[name].likelihood), len(inputs)
            sites = found[name].sites
            if found[name].result.status is FitStatus.INTERRUPTED:
                break
        chosen = max(found, key=lambda name: (found[name].result.status in FINE, found[name].score))
        self.likelihood_name_, self._is_weighted = chosen, bool((rows.weights != 1).any())
        self.model_, self.likelihood_ = found[chosen].model.eval(), found[chosen].likelihood.eval()
        self.fit_result_ = found[chosen].result
        reasons.append(self._average(found[chosen], settings))
        self.report_ = report_of(
            self,
            found,
            chosen,
            plan,
            len(inputs),
            float(rows.weights.sum()),
            time.perf_counter() - started,
            reasons,
        )
        if self.fit_result_.status not in FINE:
            warnings.warn(self.fit_result_.message, ConvergenceWarning, stacklevel=3)

    def _average(self, trained: Trained, settings: Settings) -> str:
        """Prepare what predictions of few rows are averages over; return a sentence if there is anything."""
        self._hyperparameters = self._draw_hyperparameters(trained, settings).numpy()
        self._other_hyperparameters = self._train_others(trained, settings)
        self._recall_average()
        self._weights = self._weigh_others()
        told = []
        if self._members:
            told.append(f"predictions are averages over {len(self._members)} draws of the hyperparameters")
        if self._others:
            weights = zip(self._other_hyperparameters, self._weights[1:], strict=True)
            names = ", ".join(f"{weight:.2f} of {name}" for name, weight in weights)
            told.append(f"predictions are averages with those of other kernels: {names}")
        return "; ".join(told)

    def _draw_hyperparameters(self, trained: Trained, settings: Settings) -> Tensor:
        """Return draws of the hyperparameters (S, P) for few rows; otherwise none, (0, 0)."""
        model = trained.model
        may = self._averages and self.priors and num_latents(trained.likelihood) is None
        if not may or not isinstance(model, DenseGP) or len(model.train_inputs[0]) > _FEW:
            return torch.zeros(0, 0)
        if trained.result.status not in FINE:
            return torch.zeros(0, 0)
        return hyperparameter_draws(model, self._rules(trained.likelihood, model.train_targets).train, settings.seed)

    def _train_others(self, trained: Trained, settings: Settings) -> dict[str, dict[str, np.ndarray]]:
        """Return the hyperparameters of other kernels, by what they are; none where there is no average."""
        model, numeric = trained.model, len(self._columns.numeric)
        few = isinstance(model, DenseGP) and len(model.train_inputs[0]) <= self._most_mixed
        is_single = num_latents(trained.likelihood) is None
        if not few or not is_single or numeric < 2 or self.kernel is not None or not self.priors:
            return {}
        (inputs,), targets, sites, found = model.train_inputs, model.train_targets, trained.sites, {}
        rule = self._rules(trained.likelihood, targets).begin
        rules = Rules(rule, rule)  # that of predictions infers when they are asked for
        for name, kernel in plain_kernels(numeric, len(self._columns.categorical)).items():
            likelihood = copy.deepcopy(trained.likelihood)
            task = Task(inputs, targets, likelihood, kernel.to(inputs), rules, sites=sites, has_default_kernel=True)
            other = try_out(task, settings)
            if other.result.status in FINE:
                values = hyperparameters_of(other.model, other.likelihood)
                found[name] = {key: value.numpy() for key, value in values.items()}
        return found

    def _weigh_others(self) -> np.ndarray:
        """Return the weights of the predictions of `model_` and of each other kernel: equal ones."""
        number = 1 + len(self._others)
        return np.full(number, 1 / number)

    def _recall_average(self) -> None:
        """Make what predictions are averages over, from what is stored."""
        self._members, self._others = [], []
        if not isinstance(self.model_, DenseGP):
            return
        self._members = members_of(self.model_, torch.from_numpy(self._hyperparameters))
        for name, values in self._other_hyperparameters.items():
            kernels = plain_kernels(len(self._columns.numeric), len(self._columns.categorical))
            (inputs,), targets, likelihood = self.model_.train_inputs, self.model_.train_targets, self.likelihood_
            rule = self._rules(likelihood, targets).last
            model = DenseGP(inputs, targets, copy.deepcopy(likelihood), rule, kernels[name]).to(inputs.dtype)
            start_from(model, {key: torch.from_numpy(value) for key, value in values.items()})
            if (sites := self.model_.variational_strategy.sites) is not None:
                model.variational_strategy.start_from(sites)
            self._others.append(model.eval())

    def _most_rough(self, likelihood: Any) -> int:
        """Return the number of rows of many columns up to which they have neighbours besides inducing points.

        Args:
            likelihood: that training begins with.
        """
        return 0

    def _choose_sparse(
        self, rows: Rows, likelihoods: dict[str, Callable[[], Any]], settings: Settings
    ) -> tuple[str, str]:
        """Return which of several likelihoods has inducing points, the last and most general one, and why."""
        return list(likelihoods)[-1], ""

    def _prepare(self, likelihood: Any, found: dict[str, Trained]) -> tuple[str, bool]:
        """Set where training begins, from models of other likelihoods.

        Return why not to train this one, or "", and whether the others tell nothing about where to begin.
        """
        return "", False

    def _choose_columns(
        self, rows: Rows, make: Callable[[], Any], settings: Settings
    ) -> tuple[Columns, str, Trained | None]:
        """Return the columns as they are or with skewed ones transformed, why, and the model that decided, if any.

        With "auto" a model of a few hundred rows is trained with each, and the leave-one-out predictions decide.
        """
        if self.skewed_columns not in ("auto", "keep", "yeo_johnson"):
            raise ValueError(f"skewed_columns must be 'auto', 'keep' or 'yeo_johnson'; got {self.skewed_columns!r}.")
        plain = fit_columns(self, rows.raw, rows.weights, power=False)
        if self.skewed_columns == "keep" or len(plain.skewed) == 0:
            return plain, "", None
        power = fit_columns(self, rows.raw, rows.weights, power=True)
        if self.skewed_columns == "yeo_johnson":
            return power, "", None
        latents = num_latents(make()) or 1
        some = rows.some(round(_TRIED * min(1, 4 / latents) ** (1 / 3)), settings.seed)
        first = self._train_on_some(some, plain, make, settings)
        start = hyperparameters_of(first.model, first.likelihood)
        found = first, self._train_on_some(some, power, make, settings, start)
        names = [plain.names[j] for j in plain.skewed]
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        scores = [each.score for each in found]
        verb = "transformed" if scores[1] > scores[0] else "left as they are"
        reason = (
            f"skewed columns {verb} ({shown}): leave-one-out log density of {len(some.raw)} rows {scores[0]:.4f} as "
            f"they are, {scores[1]:.4f} transformed"
        )
        chosen = int(scores[1] > scores[0])
        return (plain, power)[chosen], reason, found[chosen]

    def _train_on_some(
        self,
        some: Rows,
        columns: Columns,
        make: Callable[[], Any],
        settings: Settings,
        start: dict[str, Tensor] | None = None,
    ) -> Trained:
        """Train a model of all data roughly, of so few rows that it tells in seconds which of several is better."""
        inputs = torch.from_numpy(columns.transform(some.raw))
        likelihood, y = self._weighted(make().to(inputs.dtype), *some.tensors)
        task = Task(
            inputs,
            y,
            likelihood,
            self._own_kernel(inputs, columns),
            self._rules(likelihood, y),
            priors=self.priors,
            start=start,
            has_default_kernel=self.kernel is None,
        )
        return try_out(task, settings)

    def _start(self) -> dict[str, Tensor] | None:
        """Return the hyperparameters of the last training, to start from them, or None."""
        if not self.warm_start or not hasattr(self, "model_"):
            return None
        return hyperparameters_of(self.model_, self.likelihood_)

    def _weighted(
        self, likelihood: Any, targets: Tensor, weights: Tensor, *, sparse: bool = False
    ) -> tuple[Any, Tensor]:
        """Return the likelihood and the targets of weighted data, of gpext where a sparse model needs its sites."""
        if bool((weights == 1).all()) and not (sparse and not isinstance(likelihood, LatentLikelihood)):
            return likelihood, targets
        weighted = Weighted(likelihood)
        rows = targets.unsqueeze(-1) if targets.dim() == 1 else targets
        return weighted, torch.cat([rows, weights.unsqueeze(-1)], -1)

    def _rules(self, likelihood: Any, targets: Tensor) -> Rules:
        if isinstance(self.inference, str):
            if self.inference != "auto":
                raise ValueError(f"inference must be 'auto' or a rule of gpext.inference; got {self.inference!r}.")
            return self._default_rules(likelihood, targets)
        check_rule(self.inference)
        return Rules(self.inference, self.inference)

    def _default_rules(self, likelihood: Any, targets: Tensor) -> Rules:
        """Return Laplace's rule for training, KL where a mode may be a kink, and EP for predictions."""
        try:
            require_curvature(likelihood, targets, targets)
        except TypeError:
            return Rules(KL(), EP())
        return Rules(Laplace(tolerance=MODE), EP())

    def _own_kernel(self, inputs: Tensor, columns: Columns) -> Kernel:
        if self.kernel is not None:
            if not isinstance(self.kernel, Kernel):
                raise TypeError(f"kernel must be a gpytorch kernel or None; got {self.kernel!r}.")
            return copy.deepcopy(self.kernel).to(inputs)
        return default_kernel(len(columns.numeric), len(columns.categorical)).to(inputs)

    def _given_points(self) -> Tensor | None:
        if isinstance(self.inducing_points, str) or np.ndim(self.inducing_points) == 0:
            return None
        return torch.from_numpy(self._columns.transform(np.asarray(self.inducing_points, float)))

    def _seed(self) -> int:
        return 0 if self.random_state is None else int(check_random_state(self.random_state).randint(2**31 - 1))

    @abstractmethod
    def _candidates(self) -> dict[str, Callable[[], Any]]:
        """Return makers of the likelihoods to try, by name.

        Raises:
            ValueError: an option that names none.
        """

    # ---- the training table ------------------------------------------------------------------------------------

    def outlier_report(self, *, near_zero: float = 0.1) -> OutlierReport:
        """Return how surprising each row of the training table is to the model, given all other rows.

        `report.index` are rows of that table, the most surprising first; print the report to see them. Equal rows are
        one datum of the model, and rows without weight are unknown to it. Predictions are those of `model_`, not of an
        average with other kernels.

        Args:
            near_zero: relative precision of a site below which it counts as near zero.

        Raises:
            NotFittedError: before `fit`.
            ValueError: a model with inducing points, or a bad `near_zero`.

        Example:
            >>> import numpy as np
            >>> from gpext.estimators import GPRegressor
            >>> x = np.linspace(0, 6, 40)
            >>> y = np.sin(x)
            >>> y[7] += 3
            >>> report = GPRegressor("student_t").fit(x[:, None], y).outlier_report()
            >>> int(report.index[0])
            7
        """
        check_is_fitted(self, "model_")
        if not isinstance(self.model_, DenseGP):
            raise ValueError(
                "a model with inducing points alone does not predict each row from the others; use log_density(X, y), "
                "or fit with inducing_points=None."
            )
        report = outlier_report(self.model_.result, near_zero=near_zero)
        return report.take(torch.from_numpy(self._distinct))

    # ---- files -------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the trained estimator to one file, which contains the training data unless it has inducing points.

        Raises:
            NotFittedError: before `fit`.
            OSError: the file could not be written.
        """
        check_is_fitted(self, "model_")
        saving.write_content(persistence.content_of(self), path)

    @classmethod
    def load(cls, path: str | Path, **given: Any) -> Self:
        """Return the estimator that a file holds; reading it runs no code of the file's.

        Args:
            path: written by :meth:`save`.
            **given: the options of the saved estimator that were objects: `kernel`, `inference`, ....

        Raises:
            ValueError: the file is damaged, of another estimator or of a later format, or lacks an option.
            OSError: it cannot be read.
        """
        content = saving.read_content(path)
        if content.get("estimator") != cls.__name__:
            raise ValueError(f"{path} is not of a {cls.__name__}, but of {content.get('estimator', 'a model')}.")
        missing = sorted(set(content["given"]) - set(given))
        if missing:
            raise ValueError(
                f"{path} was saved with options that are objects and not a part of it; give them again: "
                f"{cls.__name__}.load(path, {', '.join(f'{name}=...' for name in missing)})."
            )
        return persistence.restored(Path(path), content, cls(**{**content["options"], **given}))

    # ---- prediction --------------------------------------------------------------------------------------------

    def _inputs(self, X: Any) -> Tensor:
        """Return a table as inputs of the kernel."""
        check_is_fitted(self, "model_")
        return torch.from_numpy(self._columns.transform(read_table(self, X, reset=False)))

    @torch.no_grad()
    def _by_rows(self, function: Callable[..., Tensor], *arrays: Tensor) -> np.ndarray:
        """Return a function of some rows of each array, put together for all rows (n, ...)."""
        nearest = isinstance(self.model_, DenseGP) and self.model_.variational_strategy.neighbours is not None
        parts = zip(*(each.split(_ROWS_BY_NEIGHBOURS if nearest else _ROWS) for each in arrays), strict=True)
        return torch.cat([function(*some) for some in parts]).numpy()

    def _latent(self, x: Tensor, *, jointly: bool = False) -> MultivariateNormal:
        """Return the posterior of f at inputs of the kernel (n, d), its covariances only where they are asked for."""
        return averaged(self._members, x, jointly=jointly) if self._members else self.model_(x)

    def _quantiles_of(self, predictive: Callable[..., Distribution], q: Any, *arrays: Tensor) -> np.ndarray:
        """Return quantiles of predictive(some rows of each array) at probabilities q: (n, Q), or (n,) of one.

        Raises:
            ValueError: a probability outside (0, 1).
        """
        levels = np.atleast_1d(np.asarray(q, float))
        if levels.ndim != 1 or not ((levels > 0) & (levels < 1)).all():
            raise ValueError(f"q must be probabilities between 0 and 1; got {q!r}.")

        def quantiles(*some: Any) -> Tensor:
            found = predictive(*some)
            return torch.stack([found.icdf(arrays[0].new_tensor(level)) for level in levels], -1)

        found = self._by_rows(quantiles, *arrays)
        return found[:, 0] if np.ndim(q) == 0 else found

    @abstractmethod
    def log_density(self, X: Any, y: Any) -> np.ndarray:
        """Return the log predictive density of each target (n,)."""

    def _calibration(self) -> Iterator[str]:
        """Yield sentences on the leave-one-out predictions of a model of all data, for the report."""
        return iter(())
