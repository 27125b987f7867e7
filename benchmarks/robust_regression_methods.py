"""The methods that `benchmarks.robust_regression` compares: one Gaussian and ten Student-t models, from one start.

All have a constant mean and an ARD squared exponential kernel, and are trained by `gpext.fit`. There is no hyperprior,
which is the paper's: flat in the logarithms of all scales and in log log nu [JVV11 Sec. 6.2]. The start is the paper's
as well (nu = 4, sigma = 0.5, magnitude 1), with one lengthscale sqrt(d) where the paper tried several at random.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor
from torch.distributions import Normal

import gpext
from benchmarks.datasets import Dataset
from gpext.distributions import Mixture
from gpext.inference import CAVI, EP, KL, InferenceWarning, Laplace
from gpext.likelihoods import StudentTLikelihood
from gpext.mlls import LatentMarginalLogLikelihood

DEG_FREE, NOISE, OUTPUTSCALE = 4.0, 0.25, 1.0
RULES: dict[str, Any] = {"LA": Laplace(), "EP": EP(), "EPf": EP(power=0.5), "CAVI": CAVI(), "KL": KL()}
DIGITS = 7  # of what is written for each test point
Row = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What a quick run cuts down."""

    max_steps: int | None = None
    grid: tuple[float, ...] | None = None  # of degrees of freedom; the paper's 15 by default
    configurations: int = 28


class CommonPrior:
    """The prior that all models share, set to the common start."""

    mean_module: Any
    covar_module: Any

    def begin(self, x: Tensor, scale: float = 1.0) -> None:
        """Make the mean and the kernel, for inputs whose columns have a standard deviation of `scale`."""
        self.mean_module = gpytorch.means.ConstantMean().to(x)
        kernel = gpytorch.kernels.RBFKernel(ard_num_dims=x.size(-1))
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel).to(x)
        self.covar_module.outputscale = OUTPUTSCALE
        kernel.lengthscale = scale * math.sqrt(x.size(-1))

    def forward(self, x: Tensor) -> MultivariateNormal:
        """The prior."""
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class ExactModel(CommonPrior, gpytorch.models.ExactGP):
    """gpytorch's exact GP."""

    def __init__(self, x: Tensor, y: Tensor, scale: float = 1.0) -> None:
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood().to(x))
        self.begin(x, scale)
        self.likelihood.noise = NOISE


class RobustModel(CommonPrior, gpext.models.LatentGP):
    """A Student-t GP; its degrees of freedom may be anything above 1, where log log nu begins."""

    def __init__(self, x: Tensor, y: Tensor, rule: Any, *, free: bool = True) -> None:
        likelihood = StudentTLikelihood(deg_free_constraint=gpytorch.constraints.GreaterThan(1.0)).to(x)
        super().__init__(x, y, likelihood, rule)
        self.begin(x)
        likelihood.deg_free, likelihood.noise = x.new_tensor(DEG_FREE), NOISE
        likelihood.raw_deg_free.requires_grad_(free)


def _gaussian(data: Dataset, settings: Settings) -> Row:
    model = ExactModel(data.train_x, data.train_y)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    result = gpext.fit(mll, data.train_x, data.train_y, max_steps=settings.max_steps, progress=False)
    with torch.no_grad():
        latent, predictive = model(data.test_x), model.likelihood(model(data.test_x))
    return {
        **_outcome(result, len(data.train_y)),
        "hyperparameters": hyperparameters(model),
        **_scores(data, Normal(latent.mean, latent.stddev), Normal(predictive.mean, predictive.stddev)),
    }


def _student_t(rule: Any, free: bool, data: Dataset, settings: Settings) -> Row:
    model = RobustModel(data.train_x, data.train_y, rule, free=free)
    mll = LatentMarginalLogLikelihood(model.likelihood, model)
    result = gpext.fit(mll, data.train_x, data.train_y, max_steps=settings.max_steps, progress=False)
    with torch.no_grad():
        latent = model(data.test_x)
        return {
            **_outcome(result, len(data.train_y)),
            "inference": model.result.message,
            "hyperparameters": hyperparameters(model),
            **_scores(data, Normal(latent.mean, latent.stddev), model.likelihood(latent)),
        }


def _integrated(rule: Any, data: Dataset, settings: Settings) -> Row:
    model = RobustModel(data.train_x, data.train_y, rule)
    mll = LatentMarginalLogLikelihood(model.likelihood, model)
    grid = gpext.fit_grid(
        mll, data.train_x, data.train_y, values=settings.grid, max_steps=settings.max_steps, progress=False
    )
    with torch.no_grad():
        latents = [member(data.test_x) for member in grid.models]
        marginal = Mixture(grid.weights, [Normal(latent.mean, latent.stddev) for latent in latents])
        return {
            "status": ", ".join(sorted({result.status.name for result in grid.results})),
            "num_steps": sum(result.num_steps for result in grid.results),
            "log_evidence": grid.log_evidence.tolist(),
            "values": grid.values.tolist(),
            "weights": grid.weights.tolist(),
            **_scores(data, marginal, grid.predict(data.test_x)),
        }


METHODS: dict[str, Callable[[Dataset, Settings], Row]] = {
    "GA": _gaussian,
    "LA1": partial(_student_t, RULES["LA"], False),
    "LA2": partial(_student_t, RULES["LA"], True),
    "EP1": partial(_student_t, RULES["EP"], False),
    "EP2": partial(_student_t, RULES["EP"], True),
    "KL1": partial(_student_t, RULES["KL"], False),
    "KL2": partial(_student_t, RULES["KL"], True),
    "CAVI1": partial(_student_t, RULES["CAVI"], False),
    "CAVI2": partial(_student_t, RULES["CAVI"], True),
    "EPf1": partial(_student_t, RULES["EPf"], False),
    "EPf2": partial(_student_t, RULES["EPf"], True),
    "EP3": partial(_integrated, RULES["EP"]),
}


def measure(method: Callable[[Dataset, Settings], Row], data: Dataset, settings: Settings) -> Row:
    """Run a method: its scores, CPU seconds of training and prediction, and inferences that did not converge."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", InferenceWarning)
        started = time.process_time()
        try:
            row = method(data, settings)
        except (torch.linalg.LinAlgError, FloatingPointError, RuntimeError, ValueError) as error:
            row = {"error": f"{type(error).__name__}: {error}"}
        seconds = time.process_time() - started
    messages = [str(w.message) for w in caught if issubclass(w.category, InferenceWarning)]
    return {**row, "seconds": seconds, "unconverged": len(messages), "last_warning": messages[-1] if messages else ""}


def fixed(data: Dataset, centre: Mapping[str, Any], settings: Settings) -> dict[str, Row]:
    """CPU seconds of each rule from cold, and to predict, at fixed hyperparameters [JVV11 Tab. 1, "fixed"].

    The first configuration is `centre`; the others combine nu in {2, 4, 10} with a third, one and three times its sigma
    and magnitude, each with lengthscales between 1/e and e times its own, drawn once for all rules.
    """
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor(centre["lengthscale"], dtype=torch.float64)
    configurations = [(centre["deg_free"], centre["noise"], centre["outputscale"], scales)]
    for deg_free in (2.0, 4.0, 10.0):
        for noise in (1 / 9, 1.0, 9.0):
            for outputscale in (1 / 9, 1.0, 9.0):
                spread = 2 * torch.rand(len(scales), generator=generator, dtype=torch.float64) - 1
                point = (deg_free, noise * centre["noise"], outputscale * centre["outputscale"], scales * spread.exp())
                configurations.append(point)
    seconds: dict[str, list[float]] = {name: [] for name in RULES}
    statuses: dict[str, list[str]] = {name: [] for name in RULES}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InferenceWarning)  # the status says it
        for point in configurations[: settings.configurations]:
            for name, rule in RULES.items():
                best, status = _infer_once(data, rule, point)
                if best < 1:  # short times are noisy
                    best = min([best, *(_infer_once(data, rule, point)[0] for _ in range(2))])
                seconds[name].append(best)
                statuses[name].append(status)
    return {name: {"seconds": seconds[name], "statuses": statuses[name]} for name in RULES}


def _infer_once(data: Dataset, rule: Any, point: tuple[float, float, float, Tensor]) -> tuple[float, str]:
    model = RobustModel(data.train_x, data.train_y, rule)
    like = data.train_x
    model.likelihood.deg_free, model.likelihood.noise = like.new_tensor(point[0]), like.new_tensor(point[1])
    model.covar_module.outputscale, model.covar_module.base_kernel.lengthscale = like.new_tensor(point[2]), point[3]
    model.eval()
    started = time.process_time()
    with torch.no_grad():
        _ = model(data.test_x).variance
    return time.process_time() - started, model.result.status.name


def hyperparameters(model: Any) -> dict[str, Any]:
    """The kernel's and the likelihood's parameters by name."""
    values = {
        "noise": model.likelihood.noise.item(),
        "outputscale": model.covar_module.outputscale.item(),
        "lengthscale": model.covar_module.base_kernel.lengthscale.flatten().tolist(),
        "mean": model.mean_module.constant.item(),
    }
    return values if isinstance(model, ExactModel) else {**values, "deg_free": model.likelihood.deg_free.item()}


def _outcome(result: gpext.FitResult, num_data: int) -> Row:
    return {
        "status": result.status.name,
        "num_steps": result.num_steps,
        "log_evidence": num_data * result.objective,
    }


def _scores(
    data: Dataset, latent: torch.distributions.Distribution, predictive: torch.distributions.Distribution
) -> Row:
    """Log densities and absolute errors of the test points, in the units of the data."""
    log_scale = math.log(data.target_scale)
    y = data.test_y

    def rounded(values: Tensor) -> list[float]:
        return [float(f"{value:.{DIGITS}g}") for value in values.tolist()]

    return {
        "log_density": rounded(predictive.log_prob(y) - log_scale),
        "latent_log_density": rounded(latent.log_prob(y) - log_scale),
        "error": rounded((latent.mean - y).abs() * data.target_scale),
    }
