r"""The mode of the posterior of hyperparameters and the curvature there, on a subset of the data [FE15 Sec. 5.1].

M is the inverse of the negative Hessian of the log posterior at its mode, both for a subset of the data and exact; the
Hessian is scaled up to all data. In units of M the posterior is about a unit ball.
"""

from __future__ import annotations

import copy

import torch
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from gpext.optim import minimize_lbfgs
from gpext.samplers.targets.log_posterior import LogPosterior

_SUBSET = 500
_STEP = 1e-4  # of the finite differences, in unconstrained space
_FLATTEST = 0.1  # curvature in unconstrained space, below which a direction counts as this curved


def mode_and_scale(target: LogPosterior, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the mode of the log posterior of a subset of the data (P,) and M (P, P), in the coordinates of the target.

    Raises:
        ValueError: the log posterior is not finite where the search begins.
    """
    subset = _of_subset(target, generator)
    theta = subset.moved.read().cpu().requires_grad_()
    if subset.value(theta.detach()) == -torch.inf:
        raise ValueError(
            "the log posterior is not finite at the model's own hyperparameters: "
            + ", ".join(f"{name} {value.tolist()}" for name, value in subset.moved.constrained(theta.detach()).items())
            + ". Set others, inside their bounds and not on them, at which the covariance can be factorised."
        )

    def loss() -> Tensor:
        value = subset.value(theta.detach())
        if value == -torch.inf:
            raise torch.linalg.LinAlgError("no such model")
        theta.grad = -subset.gradient(theta.detach())
        return torch.tensor(-value, dtype=torch.float64, device=theta.device)

    minimize_lbfgs(loss, [theta], max_steps=200, tolerance=1e-6)
    mode = theta.detach()
    steps = _STEP * torch.eye(subset.moved.size, dtype=torch.float64, device=mode.device)
    columns = [(subset.gradient(mode - step) - subset.gradient(mode + step)) / (2 * _STEP) for step in steps]
    hessian = torch.stack(columns)
    values, axes = torch.linalg.eigh(0.5 * (hessian + hessian.mT) * (target.num_data / subset.num_data))
    values = values.clamp_min(_FLATTEST)
    return mode, (axes / values) @ axes.mT


def scattered(mode: Tensor, M: Tensor, number: int, generator: torch.Generator) -> Tensor:
    """Return starts of chains (C, P) drawn from N(mode, M)."""
    noise = torch.randn(number, len(mode), dtype=torch.float64, generator=generator, device="cpu")
    return mode + noise @ torch.linalg.cholesky(M).mT


def _of_subset(target: LogPosterior, generator: torch.Generator) -> LogPosterior:
    """Return the exact log posterior of some of the data."""
    model = copy.deepcopy(target.model)
    number = target.num_data
    if number > _SUBSET:
        index = torch.randperm(number, generator=generator, device="cpu")[:_SUBSET]
        inputs = tuple(x[index.to(x.device)] for x in model.train_inputs)
        model.set_train_data(inputs, model.train_targets[index.to(model.train_targets.device)], strict=False)
    exact = ExactMarginalLogLikelihood(model.likelihood, model)
    return LogPosterior(exact, [slot.name for slot in target.moved.slots], logarithms=target.logarithms)
