"""A fitted model as it stands: its data and its predictions, in the figure that belongs to their kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution

from gpext.distributions.circular.distribution import CircularDistribution
from gpext.inference import outlier_report
from gpext.likelihoods.composed import ComposedLikelihood, values_of
from gpext.likelihoods.heteroscedastic import HeteroscedasticLikelihood
from gpext.models import LatentGP
from gpext.plots.circle import angle_band
from gpext.plots.classes import class_probabilities
from gpext.plots.maps import class_map, surface_map
from gpext.plots.outliers import outliers
from gpext.plots.regression import observations, predictive_band
from gpext.plots.style import GREEN, axes_or_new, check_one_number, name_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARGIN = 0.05  # of the range of the inputs, on either side


def fitted(
    model: Any,
    *,
    level: float = 0.95,
    num_points: int | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw what a fitted model predicts between its data, and the data: a curve and its band, classes, or a map.

    Over one input, numbers and counts are the median and the central interval of new observations, angles their arc,
    classes their probabilities. Over two, numbers are a map of the predictive mean, classes one of the likeliest.

    Args:
        model: a :class:`gpext.models.LatentGP` or gpytorch's ExactGP, with the data that it was made with.
        level: share of new observations within the band.
        num_points: of the grid, along each input; 200 along one, 40 along each of two by default.
        ax: where to draw; a new figure if None.

    Raises:
        TypeError: no such model, or predictions of a kind that has no such figure (proportions, several counts).
        ValueError: the inputs have neither one column nor two, or `level` is not between 0 and 1.

    Example:
        >>> import gpytorch, torch, gpext
        >>> class Model(gpext.models.LatentGP):
        ...     def __init__(self, x, y):
        ...         super().__init__(x, y, gpext.likelihoods.StudentTLikelihood())
        ...         self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), gpytorch.kernels.RBFKernel()
        ...
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
        >>> x = torch.linspace(0, 6, 20).double()
        >>> type(fitted(Model(x, torch.sin(x)).double().eval(), num_points=20)).__name__
        'Axes'
    """
    train_x, train_y = _data(model)
    _check_level(level)
    columns = train_x.size(-1)
    if train_x.dim() != 2 or columns > 2:
        raise ValueError(
            f"expected inputs (N, 1) or (N, 2); got shape {tuple(train_x.shape)}. Draw a slice of your own: predict on "
            "it, and hand the numbers to predictive_band, surface_map, class_probabilities or class_map."
        )
    lines = [_line(column, num_points or (200 if columns == 1 else 40)) for column in train_x.unbind(-1)]
    grid = torch.cartesian_prod(*lines).reshape(-1, columns)
    with _evaluated(model):
        predictive = model.likelihood(model(grid))
        if isinstance(model.likelihood, ComposedLikelihood):  # without weights; of censored data those that are exact
            index, train_y = values_of(model.likelihood, train_y)
            train_x = train_x[index]
        draw = _over_one_input if columns == 1 else _over_two_inputs
        return draw(predictive, grid, train_x, train_y, level, ax)


def fitted_noise(
    model: LatentGP,
    *,
    level: float = 0.95,
    num_points: int = 200,
    ax: Axes | None = None,
) -> Axes:
    """Draw the scale e^g of the noise of a fitted heteroscedastic model over its input: the median and its interval.

    Under q(g) = N(m, v) at an input, e^g is log-normal, with the quantiles exp(m + z_p v^1/2). The scale is in the
    units of the targets: the standard deviation of Gaussian noise, the scale of a Student-t.

    Args:
        model: a :class:`gpext.models.LatentGP` with a heteroscedastic likelihood.
        level: posterior probability of the interval at an input.
        num_points: of the grid.
        ax: where to draw; a new figure if None.

    Raises:
        TypeError: another kind of model or likelihood.
        ValueError: the inputs have more than one column, or `level` is not between 0 and 1.

    Example:
        >>> import gpytorch, torch, gpext
        >>> class Model(gpext.models.LatentGP):
        ...     def __init__(self, x, y):
        ...         super().__init__(x, y, gpext.likelihoods.HeteroscedasticGaussianLikelihood())
        ...         two = torch.Size([2])
        ...         self.mean_module = gpytorch.means.ZeroMean(batch_shape=two)
        ...         self.covar_module = gpytorch.kernels.RBFKernel(batch_shape=two)
        ...
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
        >>> x = torch.linspace(0, 6, 20).double()
        >>> type(fitted_noise(Model(x, torch.sin(x)).double().eval(), num_points=20)).__name__
        'Axes'
    """
    train_x, _ = _data(model)
    if not isinstance(model.likelihood, HeteroscedasticLikelihood):
        raise TypeError(
            "expected a HeteroscedasticGaussianLikelihood or HeteroscedasticStudentTLikelihood, whose second latent is "
            f"the log scale of the noise; got {type(model.likelihood).__name__}."
        )
    _check_level(level)
    if train_x.dim() != 2 or train_x.size(-1) != 1:
        raise ValueError(f"expected inputs (N, 1); got shape {tuple(train_x.shape)}. Draw a slice by predictive_band.")
    grid = _line(train_x[:, 0], num_points)
    with _evaluated(model):
        latent = model(grid.unsqueeze(-1))
        tasks = isinstance(latent, MultitaskMultivariateNormal)  # (S, 2), otherwise (2, S)
        mean, stddev = (t[..., 1] if tasks else t[1] for t in (latent.mean, latent.stddev))
    z = math.sqrt(2) * float(torch.erfinv(torch.tensor(level, dtype=torch.float64)))
    lower, center, upper = ((mean + z_p * stddev).exp() for z_p in (-z, 0.0, z))
    ax = axes_or_new(ax)
    name_axes(ax, "x", "scale of the noise")
    name = f"{100 * level:g} % interval of the scale"
    return predictive_band(grid, center, lower, upper, ax=ax, label="median of the scale", band_label=name, color=GREEN)


def fitted_outliers(model: LatentGP, *, num_named: int = 5, ax: Axes | None = None) -> Axes:
    """Draw the outlier report of a fitted model, over its input if that is one number, else over the data's index.

    Args:
        model: a :class:`gpext.models.LatentGP`.
        num_named: how many of the most surprising to name by their index.
        ax: where to draw; a new figure if None.

    Raises:
        TypeError: another kind of model.
        ValueError: a batch of models.

    Example:
        >>> import gpytorch, torch, gpext
        >>> class Model(gpext.models.LatentGP):
        ...     def __init__(self, x, y, likelihood):
        ...         super().__init__(x, y, likelihood, gpext.inference.Laplace())
        ...         self.mean_module = gpytorch.means.ConstantMean()
        ...         self.covar_module = gpytorch.kernels.RBFKernel()
        ...
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
        >>> x = torch.linspace(0, 1, 20).double()
        >>> y = torch.sin(6 * x).index_fill(0, torch.tensor([7]), 5.0)
        >>> model = Model(x, y, gpext.likelihoods.StudentTLikelihood()).double()
        >>> type(fitted_outliers(model)).__name__
        'Axes'
    """
    if not isinstance(model, LatentGP):
        raise TypeError(
            f"expected a LatentGP, whose result says what each datum contributes; got {type(model).__name__}."
        )
    report = outlier_report(model.result)
    if report.index.dim() > 1:
        raise ValueError(f"expected one model; got a batch of shape {tuple(report.index.shape[:-1])}.")
    inputs = model.train_inputs[0]
    x = inputs.squeeze(-1) if inputs.size(-1) == 1 and model.design is None else None
    # What a site of no curvature is relative to is unknown where no site is regular.
    relative = report.relative_precision.nan_to_num(nan=0.0)
    return outliers(report.log_loo, relative, x=x, order=report.index, num_named=num_named, ax=ax)


def _over_one_input(
    predictive: Distribution, grid: Tensor, train_x: Tensor, train_y: Tensor, level: float, ax: Axes | None
) -> Axes:
    x, known = grid.squeeze(-1), train_x.squeeze(-1)
    share = f"{100 * level:g} %"
    if (probabilities := _class_probabilities(predictive)) is not None:
        return class_probabilities(x, probabilities, ax=ax)
    if isinstance(predictive, CircularDistribution):
        arc = predictive.credible_arc(level)
        ax = angle_band(x, arc.centre, arc.half_width, ax=ax, band_label=f"{share} of new angles")
        turned = torch.remainder(train_y + torch.pi, 2 * torch.pi) - torch.pi
        return observations(known, turned, ax=ax)
    lower, center, upper = _quantiles(predictive, level)
    ax = predictive_band(x, center, lower, upper, ax=ax, band_label=f"{share} of new observations")
    return observations(known, train_y, ax=ax)


def _over_two_inputs(
    predictive: Distribution, grid: Tensor, train_x: Tensor, train_y: Tensor, level: float, ax: Axes | None
) -> Axes:
    if (probabilities := _class_probabilities(predictive)) is not None:
        return class_map(grid, probabilities, observed=train_x, targets=train_y, ax=ax)
    if isinstance(predictive, CircularDistribution):
        raise TypeError("angles over two inputs: draw plots.headings of likelihood(model(x)).mean.")
    check_one_number(predictive)
    center = predictive.mean
    if not bool(center.isfinite().all()):  # a Student-t of few degrees of freedom has none
        center = _quantiles(predictive, level)[1]
        return surface_map(grid, center, observed=train_x, targets=train_y, ax=ax, label="predictive median")
    return surface_map(grid, center, observed=train_x, targets=train_y, ax=ax)


def _class_probabilities(predictive: Distribution) -> Tensor | None:
    """Return the probabilities of classes (S, K), or (S,) of class 1 of two, or None of what are no classes."""
    return predictive.probs if isinstance(predictive, (Categorical, Bernoulli)) else None


def _quantiles(predictive: Distribution, level: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the lower edge, the median and the upper edge of the central interval (S,)."""
    check_one_number(predictive)
    tail = 0.5 * (1 - level)
    if isinstance(predictive, torch.distributions.MultivariateNormal):
        predictive = torch.distributions.Normal(predictive.mean, predictive.variance.sqrt())
    of: Callable[[Tensor], Tensor] = predictive.icdf
    lower, center, upper = (of(predictive.mean.new_tensor(q)) for q in (tail, 0.5, 1 - tail))
    return lower, center, upper


def _data(model: Any) -> tuple[Tensor, Tensor]:
    """Return the inputs (N, d) and the targets that a model holds."""
    from gpytorch.models import ExactGP

    if not isinstance(model, (LatentGP, ExactGP)) or model.train_inputs is None:
        raise TypeError(
            f"expected a LatentGP or an ExactGP with its data; got {type(model).__name__}. Of any other model predict, "
            "and hand the numbers to predictive_band, surface_map, class_probabilities or class_map."
        )
    if isinstance(model, LatentGP) and model.design is not None:
        raise TypeError(
            "the data of a model with a design are at no input. Draw f by predictive_band or surface_map of model(x), "
            "or new data by those of likelihood(design(model(x))) with a design at x."
        )
    (inputs,) = model.train_inputs
    return inputs if inputs.dim() > 1 else inputs.unsqueeze(-1), model.train_targets


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1; got {level!r}.")


def _line(column: Tensor, num_points: int) -> Tensor:
    low, high = column.min(), column.max()
    margin = _MARGIN * (high - low)
    return torch.linspace(float(low - margin), float(high + margin), num_points, dtype=column.dtype).to(column.device)


@contextmanager
def _evaluated(model: Any) -> Iterator[None]:
    """Put a model and its likelihood into eval mode for a while, without gradients."""
    modes = [(module, module.training) for module in (model, model.likelihood)]
    try:
        for module, _ in modes:
            module.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.train(training)
