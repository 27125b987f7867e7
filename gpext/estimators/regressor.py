"""Regression with Gaussian, heavy-tailed, input-dependent or any other noise, a scikit-learn estimator."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gpytorch
import numpy as np
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.distributions import MultivariateNormal
from sklearn.base import RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_array, column_or_1d
from torch import Tensor
from torch.distributions import Distribution, Normal

from gpext.bounds import num_latents
from gpext.checks import whole_number
from gpext.distributions.predictive.mixture import Mixture
from gpext.estimators.averaging import limited, stacking_weights
from gpext.estimators.base import MODE, GPEstimator
from gpext.estimators.failures import all_or_nothing
from gpext.estimators.gaussian_evidence import has_closed_form
from gpext.estimators.rows import unweighted
from gpext.estimators.table import read_table
from gpext.estimators.tails import fit_tails
from gpext.estimators.task import Rules, Settings, Trained
from gpext.inference import KL, Laplace, Status
from gpext.inference.result import without_inference_warnings
from gpext.likelihoods import HeteroscedasticGaussianLikelihood, LaplaceLikelihood, StudentTLikelihood
from gpext.likelihoods.composed import ArgumentLikelihood

_LEAST_NOISE = 1e-6  # variance of Gaussian noise beside that of the targets; gpytorch's own least is 1e-4


def _gaussian() -> gpytorch.likelihoods.GaussianLikelihood:
    return gpytorch.likelihoods.GaussianLikelihood(noise_constraint=GreaterThan(_LEAST_NOISE))


_NOISES: dict[str, Callable[[], Any]] = {
    "gaussian": _gaussian,
    "student_t": StudentTLikelihood,
    "laplace": LaplaceLikelihood,
    "heteroscedastic": HeteroscedasticGaussianLikelihood,
}

_MOST_ROUGH = 50_000  # rows of many columns that have neighbours
_MOST_INFERRED = 20_000  # the same under noise that takes many factors an evaluation
_OUTLIERS = 0.25  # nats a row, the same gain from which Gaussian noise has explained outliers, and tells nothing
HEAVY = 0.003  # nats a row, the gain of a Student-t fitted to residuals from which its model is trained
_SITES = 1e-3  # tolerance of KL's sites of a Student-t, of whose evidence the error is its square
_MOST_STEPS = 200  # of KL there
_MOST_ROUGH_STEPS = 50  # of Laplace, where training begins
_LEAST_SCALE = 0.1  # of a Student-t, in Gaussian standard deviations, from which training begins


class TargetEstimator(RegressorMixin, GPEstimator):
    """The common part of estimators of numbers: predictive moments, quantiles, densities and draws."""

    _center, _scale = 0.0, 1.0  # of the targets
    _stored = (*GPEstimator._stored, "_center", "_scale")

    def _targets(self, y: Any, size: int) -> np.ndarray:
        if y is None:
            raise ValueError("requires y to be passed, but the target y is None.")
        targets = column_or_1d(check_array(y, ensure_2d=False, dtype=np.float64, input_name="y"), warn=True)
        if len(targets) != size:
            raise ValueError(f"X and y must be equally long; got {size} rows and {len(targets)} targets.")
        return targets

    def _predictive(self, x: Tensor, offset: Tensor) -> Distribution:
        """Return p(y), of standardised targets, at inputs (n, d) and offsets (n,) of the latent function."""
        found = [_observed(self.likelihood_, self._latent(x))]
        found += [_observed(other.likelihood, other(x)) for other in self._others]
        return Mixture(torch.from_numpy(self._weights), found) if self._others else found[0]

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the predictive means (n,), in the units of y, and with `return_std` the standard deviations.

        They are moments of a new observation: noise is part of the deviation.

        Raises:
            NotFittedError, TypeError, ValueError: before `fit`, or another table than at training.
        """
        return self._moments(*self._places(X), return_std)

    def predict_quantiles(self, X: Any, q: Any = (0.05, 0.5, 0.95)) -> np.ndarray:
        """Return the predictive quantiles (n, Q) at probabilities q (Q,), or (n,) of one probability.

        Raises:
            NotFittedError, TypeError, ValueError: as :meth:`predict`, or a probability outside (0, 1).
        """
        return self._quantiles(*self._places(X), q)

    def predict_interval(self, X: Any, coverage: float = 0.9) -> np.ndarray:
        """Return central predictive intervals (n, 2), which contain a new observation with probability `coverage`.

        Raises:
            NotFittedError, TypeError, ValueError: as :meth:`predict_quantiles`.
        """
        return self._quantiles(*self._places(X), ends_of(coverage))

    def log_density(self, X: Any, y: Any) -> np.ndarray:
        """Return the log predictive density (n,) of targets, in the units of y.

        Raises:
            NotFittedError, TypeError, ValueError: as :meth:`predict`, or targets that are not finite.
        """
        return self._log_density(*self._places(X), y)

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = None) -> np.ndarray:
        """Return draws (n, n_samples) of new observations: f jointly at all rows, then y given f.

        Args:
            X: of few thousand rows at most, whose joint covariance is dense.
            n_samples: number of draws.
            random_state: a seed or a RandomState; None for NumPy's global one.

        Raises:
            NotFittedError, TypeError, ValueError: as :meth:`predict`.
        """
        return self._draws(*self._places(X), n_samples, random_state)

    def _places(self, X: Any, offset: Any = None) -> tuple[Tensor, Tensor]:
        """Return the inputs of the kernel (n, d) and offsets of the latent function (n,)."""
        inputs = self._inputs(X)
        return inputs, inputs.new_zeros(len(inputs)) if offset is None else torch.from_numpy(offset).to(inputs)

    def _moments(self, inputs: Tensor, offset: Tensor, return_std: bool) -> Any:
        def moments(x: Tensor, some: Tensor) -> Tensor:
            found = self._predictive(x, some)
            return torch.stack([found.mean, found.variance.sqrt()], -1) if return_std else found.mean

        found = self._by_rows(moments, inputs, offset)
        if not return_std:
            return self._center + self._scale * found
        return self._center + self._scale * found[:, 0], self._scale * found[:, 1]

    def _quantiles(self, inputs: Tensor, offset: Tensor, q: Any) -> np.ndarray:
        return self._center + self._scale * self._quantiles_of(self._predictive, q, inputs, offset)

    def _log_density(self, inputs: Tensor, offset: Tensor, y: Any) -> np.ndarray:
        targets = torch.from_numpy((self._targets(y, len(inputs)) - self._center) / self._scale)
        found = self._by_rows(lambda x, o, t: self._predictive(x, o).log_prob(t), inputs, offset, targets)
        return found - math.log(self._scale)

    def _draws(self, inputs: Tensor, offset: Tensor, n_samples: int, random_state: Any) -> np.ndarray:
        number = whole_number("n_samples", n_samples, 1)
        seed = int(check_random_state(random_state).randint(2**31 - 1))
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            chosen = torch.multinomial(torch.from_numpy(self._weights), number, replacement=True)
            posteriors = [self._latent(inputs, jointly=True), *(other(inputs) for other in self._others)]
            likelihoods = [self.likelihood_, *(other.likelihood for other in self._others)]
            draws = inputs.new_empty(number, len(inputs))
            for j in chosen.unique().tolist():
                f = posteriors[j].sample(torch.Size([int((chosen == j).sum())]))
                draws[chosen == j] = conditional(likelihoods[j], f + offset).sample()
        return self._center + self._scale * draws.mT.numpy()

    def _calibration(self) -> Iterator[str]:
        tail = self.model_.result.loo_tail.double()
        tail = tail[~tail.isnan()]  # unknown of several latents, and where a cavity is not proper
        if len(tail) == 0:
            return
        for level in (0.5, 0.9):
            inside = 100 * float((tail > 1 - level).double().mean())
            yield f"{100 * level:.0f} % intervals contain {inside:.1f} % of the data"


def _observed(likelihood: Any, q: MultivariateNormal) -> Distribution:
    """Return p(y) by a likelihood at the marginals of q."""
    found = likelihood(q)
    return Normal(found.mean, found.variance.sqrt()) if isinstance(found, MultivariateNormal) else found


def conditional(likelihood: Any, f: Tensor) -> Distribution:
    """Return p(y | f) of one observation, without weights and offsets of the data."""
    while isinstance(likelihood, ArgumentLikelihood):
        likelihood = likelihood.likelihood
    return likelihood.forward(f)


class _LeftOut(NamedTuple):
    """Leave-one-out predictions under Gaussian noise."""

    residuals: np.ndarray  # by the deviations of the predictions (n,)
    weights: np.ndarray  # of the rows (n,)
    is_exact: bool  # whether most predictions of f are better than the least noise


def _left_out(trained: Trained) -> _LeftOut:
    """Return what a Gaussian model predicts of each row from the others."""
    mean, variance = trained.model.result.conditioned.leave_one_out
    targets, noise = trained.model.train_targets, unweighted(trained.likelihood).noise.detach()
    is_weighted = unweighted(trained.likelihood) is not trained.likelihood
    y, weights = targets.unbind(-1) if is_weighted else (targets, torch.ones_like(targets))
    residuals = (y - mean) / (variance + noise / weights).sqrt()
    is_exact = max(float(noise), float(variance.median())) < 2 * _LEAST_NOISE
    return _LeftOut(residuals.numpy(), weights.numpy(), is_exact)


def center_and_scale(targets: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Return the mean and the standard deviation of weighted targets, or, of targets with outliers, robust ones.

    These are the median and 1.4826 times the median absolute deviation, where the standard deviation is more than three
    times as large. The scale of constant targets is 1.
    """
    center, middle = float(np.average(targets, weights=weights)), _median(targets, weights)
    spread = math.sqrt(np.average((targets - center) ** 2, weights=weights))
    robust = 1.4826 * _median(np.abs(targets - middle), weights)
    if 0 < 3 * robust < spread:
        center, spread = middle, robust
    return center, spread if np.ptp(targets) > 10 * np.finfo(float).eps * abs(center) else 1.0


def _median(values: np.ndarray, weights: np.ndarray) -> float:
    """Return the weighted median, the smallest value that half of the weight does not exceed."""
    order = np.argsort(values, kind="stable")
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, 0.5 * total[-1])])


def ends_of(coverage: float) -> list[float]:
    """Return the probabilities of the ends of a central interval."""
    if not 0 < coverage < 1:
        raise ValueError(f"coverage must be between 0 and 1; got {coverage!r}.")
    return [0.5 * (1 - coverage), 0.5 * (1 + coverage)]


class GPRegressor(TargetEstimator):
    """Gaussian process regression with a choice of noise.

    Inputs and targets are standardised inside; predictions are in the units of y. Outliers do not spoil a fit under
    noise "student_t" or "laplace". Up to 400 distinct rows, predictions are averages over draws of the
    hyperparameters from their approximate posterior; below 500, with the default kernel and a noise given by name,
    they are mixtures with those of two kernels of one lengthscale, weighted by leave-one-out densities
    (docs/evidence/estimators.md). Neither is done if `priors` is False.

    Args:
        noise: "gaussian"; "student_t", with its degrees of freedom learnt; "laplace"; "heteroscedastic", Gaussian whose
            scale is another latent function; "auto", the better of the first two by leave-one-out log density, the
            second tried only where the residuals of the first have heavier tails than it expects and, with neighbours,
            on up to 20,000 rows, and kept only if its inference converges; or any likelihood of gpext or gpytorch for
            standardised targets, which is copied. "gaussian" noise has a deviation of at least 0.001 of that of the
            targets; the default kernel is trained a second time, from little noise, where 400 rows find a larger
            evidence by it.
        kernel: a gpytorch kernel over the standardised columns, numeric ones before categorical ones. None: Matern-5/2
            with a lengthscale for each numeric column, times a :class:`gpext.kernels.CategoricalKernel`.
        inference: a rule of :mod:`gpext.inference` for the full data; "auto" is exact for Gaussian noise, trains a
            Student-t by Laplace's until steps gain little, and then by KL, which predicts, too (with neighbours by
            Laplace's alone), and others by Laplace's to predict by EP.
        inducing_points: "auto": none while the full data are few enough, beyond that 200 beside neighbours and 64 or
            more without; None for the full data; a number; or points (M, d) in the units of X.
        neighbours: of each row, for the nearest-neighbour prior of :class:`gpext.models.LatentGP`, of what inducing
            points leave, if there are any. "auto", for a noise of one latent function, and with `inducing_points` at
            "auto": beyond 2500 distinct rows 20 of up to three columns, without inducing points, up to 100,000 rows,
            and 10 of more columns, up to 50,000 if noise is Gaussian and 20,000 if not. None: inducing points alone,
            which take less time, and cannot follow rough functions; or a number.
        batch_size: "auto": minibatches beyond 100,000 distinct rows; None for all data in each step; or a number.
        skewed_columns: numeric columns of a skewness above 1: "keep"; "yeo_johnson", transformed before they are
            standardised; "auto", the better of the two by leave-one-out predictions of a few hundred rows.
        priors: whether kernels get the priors of :mod:`gpext.priors` where they have none.
        max_steps: of each training; None for the default of :func:`gpext.fit`.
        tolerance: of the objective a datum, as in :func:`gpext.fit`; three tenths of it with inducing points.
        warm_start: whether another `fit` starts from the hyperparameters of the last.
        random_state: of inducing points, subsets and minibatches; None is one fixed seed.
        verbose: 1 shows progress.

    Attributes:
        model_, likelihood_: the gpytorch modules of the standardised targets, in eval mode, at the hyperparameters of
            the largest evidence. Data of the model are the distinct rows of the table, sorted: for outliers in the
            order of the table, compare `log_density(X, y)`.
        likelihood_name_: the noise that was chosen.
        report_: what was chosen and why; print it.
        fit_result_: of the training, a :class:`gpext.FitResult`.
        n_features_in_, feature_names_in_: of the table.

    Example:
        >>> import numpy as np
        >>> X = np.linspace(0, 6, 50)[:, None]
        >>> y = np.sin(X[:, 0]) + 0.1 * np.random.default_rng(0).standard_normal(50)
        >>> mean, deviation = GPRegressor().fit(X, y).predict(X[:2], return_std=True)
        >>> mean.shape, deviation.shape
        ((2,), (2,))
    """

    _averages = True
    _most_mixed = 499

    def __init__(
        self,
        noise: Any = "auto",
        *,
        kernel: Any = None,
        inference: Any = "auto",
        inducing_points: Any = "auto",
        neighbours: Any = "auto",
        batch_size: Any = "auto",
        skewed_columns: str = "auto",
        priors: bool = True,
        max_steps: int | None = None,
        tolerance: float = 1e-3,
        warm_start: bool = False,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            kernel=kernel,
            inference=inference,
            inducing_points=inducing_points,
            neighbours=neighbours,
            batch_size=batch_size,
            skewed_columns=skewed_columns,
            priors=priors,
            max_steps=max_steps,
            tolerance=tolerance,
            warm_start=warm_start,
            random_state=random_state,
            verbose=verbose,
        )
        self.noise = noise

    @all_or_nothing
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> GPRegressor:
        """Train on a table and targets.

        Args:
            X: (n, d), an array or a DataFrame of pandas or Polars, whose other than numeric columns are categories.
            y: targets (n,).
            sample_weight: weights (n,) of the rows, not negative: the density of a row is raised to that power.

        Returns:
            The estimator itself.

        Raises:
            TypeError, ValueError: bad data or options.
        """
        likelihoods = self._candidates()
        raw = read_table(self, X, reset=True)
        rows = self._distinct_rows(raw, self._targets(y, len(raw)), sample_weight)
        self._center, self._scale = center_and_scale(rows.targets, rows.weights)
        self._train(rows._replace(targets=(rows.targets - self._center) / self._scale), likelihoods)
        return self

    def _candidates(self) -> dict[str, Callable[[], Any]]:
        """Return the makers of the likelihoods to try, by name."""
        if isinstance(self.noise, gpytorch.likelihoods.Likelihood):
            return {type(self.noise).__name__: lambda: copy.deepcopy(self.noise)}
        if isinstance(self.noise, str) and self.noise == "auto":
            return {name: _NOISES[name] for name in ("gaussian", "student_t")}
        if isinstance(self.noise, str) and self.noise in _NOISES:
            return {self.noise: _NOISES[self.noise]}
        raise ValueError(
            f"noise must be 'auto', {', '.join(map(repr, _NOISES))}, or a likelihood of gpext or gpytorch; got "
            f"{self.noise!r}."
        )

    def _train_others(self, trained: Trained, settings: Settings) -> dict[str, dict[str, np.ndarray]]:
        return super()._train_others(trained, settings) if isinstance(self.noise, str) else {}

    def _recall_average(self) -> None:
        super()._recall_average()
        with without_inference_warnings():  # what does not converge has no weight
            for other in self._others:
                other.inference = limited(other.inference)
                _ = other.result

    def _weigh_others(self) -> np.ndarray:
        """Return stacking weights, zero of kernels whose inference did not converge."""
        if not self._others:
            return super()._weigh_others()
        models = [self.model_, *self._others]
        usable = [model is self.model_ or model.result.status is Status.CONVERGED for model in models]
        weights = np.zeros(len(models))
        found = torch.stack([model.result.log_loo for model, use in zip(models, usable, strict=True) if use])
        weights[usable] = stacking_weights(found).numpy()
        return weights

    def _most_rough(self, likelihood: Any) -> int:
        return _MOST_ROUGH if has_closed_form(likelihood, KL()) else _MOST_INFERRED

    def _prepare(self, likelihood: Any, found: dict[str, Trained]) -> tuple[str, bool]:
        """Begin a Student-t with the tails of residuals under Gaussian noise; leave it out where there are none."""
        if not found:
            return "", False
        before = found["gaussian"]
        left_out = _left_out(before)
        if left_out.is_exact:
            return "leave-one-out predictions under Gaussian noise are as exact as its least deviation, 0.001", False
        tails = fit_tails(left_out.residuals, left_out.weights)
        gain = (
            f"a Student-t fits the leave-one-out residuals of Gaussian noise by {tails.gain:.4f} nats a row better "
            "than a Gaussian"
        )
        if tails.gain < HEAVY:
            return f"{gain}, less than {HEAVY}", False
        if len(before.model.train_inputs[0]) > _MOST_INFERRED:
            far = f"beyond {_MOST_INFERRED} rows its training takes far longer; noise='student_t' trains it"
            return f"{gain}, but {far}", False
        if tails.gain > _OUTLIERS:
            return "", True
        noise = unweighted(before.likelihood).noise.detach()
        # No less than the least Gaussian noise: one that begins below its NoiseFloor would not be given that bound.
        start = (max(tails.scale, _LEAST_SCALE) ** 2 * noise).clamp_min(_LEAST_NOISE)
        likelihood.initialize(noise=start, deg_free=noise.new_tensor(tails.deg_free))
        return "", False

    def _default_rules(self, likelihood: Any, targets: Tensor) -> Rules:
        if num_latents(likelihood) is not None or has_closed_form(likelihood, KL()):
            return Rules(KL(), KL())  # of Gaussian noise exact, in one step
        if isinstance(unweighted(likelihood), StudentTLikelihood):
            rule = KL(tolerance=_SITES, max_steps=_MOST_STEPS)
            return Rules(rule, rule, Laplace(tolerance=MODE, max_steps=_MOST_ROUGH_STEPS))
        return super()._default_rules(likelihood, targets)
