r"""Integration over one hyperparameter on a grid [JVV11 Sec. 6.2, "EP3"].

    p(f_* | D) ~ sum_j w_j q(f_* | D, theta_j, nu_j),     theta_j = argmax_theta q(theta | D, nu_j)
    w_j        = q(theta_j, nu_j | D) / sum_k q(theta_k, nu_k | D)

The hyperparameter nu is held at each of a few values while all others are trained; each value is weighted by the
evidence that it reaches. A hyperparameter on which the data carry little information, such as the degrees of freedom of
a Student-t, is then not reduced to a point estimate.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from gpytorch.constraints import Interval
from gpytorch.mlls import ExactMarginalLogLikelihood, MarginalLogLikelihood
from torch import Tensor
from torch.nn import Module, Parameter

from gpext.distributions import Mixture
from gpext.models import LatentGP
from gpext.progress import Progress
from gpext.training.fitting import fit
from gpext.training.result import FitResult, FitStatus

_DEG_FREE = torch.linspace(math.log(math.log(1.5)), math.log(math.log(20.0)), 15, dtype=torch.float64).cpu().exp().exp()


@dataclass(frozen=True)
class GridFit:
    """The outcome of :func:`gpext.fit_grid`; printing it shows a table.

    Attributes:
        parameter: the name of the hyperparameter.
        values: where it was held, (J,), increasing.
        mlls: a trained copy of the objective for each value, in eval mode.
        results: of each training. One that has not converged is weighted by the evidence it reached.
        log_evidence: N times the objective at the end, (J,): the log evidence (or its bound) plus the log densities of
            registered priors; -inf where training broke down at its start.
        weights: (J,), of sum one.

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
        >>> x = torch.linspace(0, 1, 8).double()
        >>> y = torch.tensor([0.0, 0.5, 0.9, 1.0, 5.0, 0.3, -0.3, -0.8]).double()
        >>> model = Model(x, y, gpext.likelihoods.StudentTLikelihood()).double()
        >>> mll = gpext.mlls.LatentMarginalLogLikelihood(model.likelihood, model)
        >>> grid = gpext.fit_grid(mll, x, y, parameter="likelihood.deg_free", values=[3.0, 30.0], progress=False)
        >>> grid.weights.sum().round(decimals=6)
        tensor(1., dtype=torch.float64)
    """

    parameter: str
    values: Tensor
    mlls: tuple[MarginalLogLikelihood, ...]
    results: tuple[FitResult, ...]
    log_evidence: Tensor
    weights: Tensor

    @property
    def models(self) -> tuple[Module, ...]:
        """The trained copies of the model."""
        return tuple(mll.model for mll in self.mlls)

    def latent(self, x: Tensor) -> Mixture:
        """Return the mixture of the posteriors of f at inputs x, as `model(x)` gives them."""
        return self._mix(lambda mll: mll.model(x))

    def predict(self, x: Tensor) -> Mixture:
        """Return the mixture of the predictive distributions of new observations at x, `likelihood(model(x))`.

        Where the weights leave any degrees of freedom up to 2, its variance is infinite, as it has to be.
        """
        return self._mix(lambda mll: mll.likelihood(mll.model(x)))

    def _mix(self, component: Callable[[MarginalLogLikelihood], torch.distributions.Distribution]) -> Mixture:
        kept = (self.weights > 0).tolist()
        components = [component(mll) for mll, keep in zip(self.mlls, kept, strict=True) if keep]
        return Mixture(self.weights[self.weights > 0], components)

    def __str__(self) -> str:
        lines = [f"{self.parameter:>24}{'log evidence':>16}{'weight':>10}{'steps':>7}  status"]
        lines += [
            f"{value:>24.6g}{evidence:>16.4f}{weight:>10.4f}{result.num_steps:>7}  {result.status.name}"
            for value, evidence, weight, result in zip(
                self.values.tolist(), self.log_evidence.tolist(), self.weights.tolist(), self.results, strict=True
            )
        ]
        return "\n".join(lines)


@torch.inference_mode(False)
@torch.enable_grad()
def fit_grid(
    mll: MarginalLogLikelihood,
    x: Tensor,
    y: Tensor,
    *,
    parameter: str = "likelihood.deg_free",
    values: Sequence[float] | Tensor | None = None,
    log_prior: Callable[[Tensor], Tensor] | None = None,
    max_steps: int | None = None,
    tolerance: float = 1e-4,
    progress: bool = True,
) -> GridFit:
    """Train at each of several values of one hyperparameter, and weigh the values by their evidence.

    Each value starts from its trained neighbour, the one nearest to the current value from the model as it is. The
    model itself does not change: copies are trained.

    Args:
        mll: an objective that :func:`gpext.fit` takes.
        x: inputs, as for `fit`.
        y: targets, as for `fit`.
        parameter: the hyperparameter's name from the mll, without the `raw_` of a constrained one: "likelihood.noise",
            "model.covar_module.outputscale". It must be a scalar.
        values: where to hold it, increasing. Default for degrees of freedom: the paper's 15 from 1.5 to 20, equally
            spaced in log log nu, or those of them that its constraint allows: gpytorch's are all larger than 2.
        log_prior: (J,) values -> (J,) log prior masses of the grid points, up to a constant. Without it, all have the
            same (a uniform prior in whatever scale they are equally spaced), unless a prior is registered that depends
            on the parameter: then a point has that prior's density times its share of the range.
        max_steps: maximum number of L-BFGS iterations for each value, 200 by default.
        tolerance: of each training, as in :func:`gpext.fit`.
        progress: show a bar on a terminal, or lines in the log "gpext".

    Returns:
        The trained copies, their weights, and mixtures of their predictions. A training that has not converged keeps
        its status and is weighted by the evidence it reached.

    Raises:
        ValueError: no such scalar parameter, a value that its constraint refuses, values that do not increase, both a
            log_prior and a registered prior, no value with a finite evidence; bad data, as :func:`gpext.fit`.
        KeyboardInterrupt: on Ctrl-C; there is no result of a part of the grid.

    Example:
        >>> grid = gpext.fit_grid(mll, train_x, train_y)  # doctest: +SKIP
        >>> grid.predict(test_x).log_prob(test_y)  # doctest: +SKIP
    """
    first = copy.deepcopy(mll)
    raw, constraint = _resolve(first, parameter)
    points = _points(parameter, values, constraint)
    raw_points = [_raw_value(parameter, raw, constraint, value) for value in points.tolist()]
    registered = _has_prior(first, raw)
    if registered and log_prior is not None:
        raise ValueError(
            f"{parameter} has a registered prior already: give no log_prior, or take the other out of the model."
        )
    num_terms = _num_terms(mll, x)
    present = (raw.detach() if constraint is None else constraint.transform(raw.detach())).item()
    members: dict[int, MarginalLogLikelihood] = {}
    results: dict[int, FitResult] = {}
    with Progress("fit_grid", len(points), shown=progress) as bar:
        for index, neighbour in _outwards(len(points), int((points - present).abs().argmin())):
            member = first if neighbour is None else copy.deepcopy(members[neighbour])
            held, _ = _resolve(member, parameter)
            held.requires_grad_(False).copy_(raw_points[index])
            results[index] = _fit(member, x, y, max_steps=max_steps, tolerance=tolerance)
            members[index] = member
            bar.update(numbers={parameter: f"{points[index]:.4g}"})
    order = range(len(points))
    log_evidence = torch.tensor([num_terms * results[j].objective for j in order], dtype=torch.float64, device="cpu")
    log_evidence = torch.where(log_evidence.isfinite(), log_evidence, -math.inf)
    if not bool((log_evidence > -math.inf).any()):
        raise ValueError(f"training broke down at every value of {parameter}: {results[0].message}")
    if log_prior is not None:
        log_mass = log_prior(points).to(points)
    else:
        log_mass = _log_spacing(points) if registered else torch.zeros_like(points)
    return GridFit(
        parameter=parameter,
        values=points,
        mlls=tuple(members[j] for j in order),
        results=tuple(results[j] for j in order),
        log_evidence=log_evidence,
        weights=torch.softmax(log_evidence + log_mass, 0),
    )


def _fit(mll: MarginalLogLikelihood, x: Tensor, y: Tensor, *, max_steps: int | None, tolerance: float) -> FitResult:
    result = fit(mll, x, y, max_steps=max_steps, tolerance=tolerance, progress=False)
    if result.status is FitStatus.INTERRUPTED:
        raise KeyboardInterrupt
    return result


def _outwards(size: int, start: int) -> Iterator[tuple[int, int | None]]:
    """Yield each index with the neighbour it starts from: from `start` up to the end, then down to 0."""
    yield start, None
    for index in range(start + 1, size):
        yield index, index - 1
    for index in range(start - 1, -1, -1):
        yield index, index + 1


# ---- the parameter -------------------------------------------------------------------------------------------------


def _resolve(mll: MarginalLogLikelihood, name: str) -> tuple[Parameter, Interval | None]:
    """Return the tensor behind a hyperparameter's name, and its constraint."""
    path, _, leaf = name.rpartition(".")
    try:
        owner = mll.get_submodule(path)
    except AttributeError:
        owner = None
    for raw_name in (f"raw_{leaf}", leaf):
        raw = getattr(owner, "_parameters", {}).get(raw_name)
        if raw is not None and raw.numel() == 1:
            return raw, getattr(owner, f"{raw_name}_constraint", None)
    scalars = [n.replace("raw_", "") for n, p in mll.named_parameters(remove_duplicate=False) if p.numel() == 1]
    raise ValueError(f"the objective has no scalar parameter {name!r}; it has {', '.join(sorted(scalars)) or 'none'}.")


def _points(parameter: str, values: Sequence[float] | Tensor | None, constraint: Interval | None) -> Tensor:
    if values is None:
        if parameter.rpartition(".")[2] != "deg_free":
            raise ValueError(f"give the values of {parameter}: only degrees of freedom have a grid by default.")
        return _DEG_FREE[[constraint is None or constraint.check(value) for value in _DEG_FREE]]
    points = torch.as_tensor(values, dtype=torch.float64).detach().cpu()
    if points.dim() != 1 or not len(points) or not bool(points.isfinite().all() and (points.diff() > 0).all()):
        raise ValueError(f"values must be finite and increase; got {points.tolist()}.")
    return points


def _raw_value(parameter: str, raw: Tensor, constraint: Interval | None, value: float) -> Tensor:
    """Return the value of the raw parameter, in its shape."""
    wanted = torch.full_like(raw, value, requires_grad=False)
    if constraint is None:
        return wanted
    point = constraint.inverse_transform(wanted)
    if not (bool(point.isfinite().all()) and constraint.check(wanted)):
        leaf = parameter.rpartition(".")[2]
        raise ValueError(
            f"{parameter} = {value:.6g} is outside its constraint {constraint}: give other values, or make the model "
            f"with another {leaf}_constraint, such as gpytorch.constraints.Positive()."
        )
    return point


def _has_prior(mll: MarginalLogLikelihood, raw: Parameter) -> bool:
    """Return whether a registered prior depends on the parameter, which then requires a gradient."""
    raw.requires_grad_(True)
    with torch.enable_grad():
        terms = [prior.log_prob(closure(module)).sum() for _, module, prior, closure, _ in mll.named_priors()]
    gradients = [torch.autograd.grad(t, raw, allow_unused=True)[0] for t in terms if t.requires_grad]
    return any(gradient is not None for gradient in gradients)


def _log_spacing(points: Tensor) -> Tensor:
    """Return the log of the trapezoidal rule's weights."""
    gaps = torch.cat([points.new_zeros(1), points.diff(), points.new_zeros(1)])
    return torch.log(gaps[:-1] + gaps[1:]) if len(points) > 1 else torch.zeros_like(points)


def _num_terms(mll: MarginalLogLikelihood, x: Tensor) -> int:
    """Return the number by which the objective has been divided."""
    if isinstance(mll, ExactMarginalLogLikelihood):
        with torch.no_grad():
            return mll.model.forward(*mll.model.train_inputs).event_shape.numel()
    if isinstance(mll.model, LatentGP) and mll.model.design is not None:
        return mll.model.design.num_data
    return x.size(-2) if x.dim() > 1 else len(x)
