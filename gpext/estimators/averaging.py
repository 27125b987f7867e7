r"""Averages over hyperparameters and over kernels of small data, which leave many lengthscales uncertain.

With phi the logarithms of the positive hyperparameters, phi* where training has ended and J the evidence times priors,

    phi | y  ~  N(phi*, H^-1),   H = -d^2 log J / dphi^2                       [R&W Sec. 5.2; MacKay 1992]
    q(f) = N(mean_s m_s, mean_s V_s + cov_s m_s)

over draws phi_s, each with its own posterior N(m_s, V_s): the moments of their mixture. The likelihood stays that of
phi*. H is a difference of gradients, one for each hyperparameter. No deviation by H^-1 is above 1/2: far from phi* the
evidence is no parabola, and the moments of a mixture are dominated by its widest member. Draws come in pairs phi* +- d.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from gpytorch import Module as GPyTorchModule
from gpytorch.constraints import Interval
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import MarginalLogLikelihood
from linear_operator.operators import DiagLinearOperator
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor
from torch.nn import Parameter

from gpext.estimators.dense_training import evidence_of
from gpext.estimators.models import DenseGP
from gpext.inference import EP, KL, Laplace, Rule, Status
from gpext.inference.result import without_inference_warnings

DRAWS = 8
_MOST_STEPS = 100  # of the inference of a part: most take 30, and one that does not converge would take all it may
_LEAST_CURVATURE = 4.0  # of -log J: no deviation above 1/2
_LEAST = 1e-8  # of a parameter above its bound
_STEP = 0.01  # of phi, for differences of gradients
_STACKING_STEPS = 1000
_STACKED = 1e-6  # of the weights of models


class Positive:
    """The trained positive parameters of a module as their logarithms phi (P,), above their lower bounds."""

    def __init__(self, module: GPyTorchModule) -> None:
        found: dict[int, tuple[Parameter, Interval]] = {}
        for _, parameter, constraint in module.named_parameters_and_constraints():
            if parameter.requires_grad and constraint is not None and bool(torch.isinf(constraint.upper_bound).all()):
                found[id(parameter)] = parameter, constraint
        self._parts = list(found.values())
        self._sizes = [parameter.numel() for parameter, _ in self._parts]

    @torch.no_grad()
    def get(self) -> Tensor:
        """Return phi."""
        values = [c.transform(raw) - c.lower_bound for raw, c in self._parts]
        return torch.cat([torch.zeros(0), *(value.flatten() for value in values)]).clamp_min(_LEAST).log()

    @torch.no_grad()
    def set(self, phi: Tensor) -> None:
        """Set the parameters to exp(phi)."""
        for (raw, constraint), part in zip(self._parts, phi.split(self._sizes), strict=True):
            raw.copy_(constraint.inverse_transform(part.exp().view_as(raw) + constraint.lower_bound))

    def gradient(self, objective: MarginalLogLikelihood, phi: Tensor) -> Tensor:
        """Return d log J / dphi (P,)."""
        self.set(phi)
        model = objective.model
        value = objective(model(*model.train_inputs), model.train_targets) * len(model.train_inputs[0])
        slopes = torch.autograd.grad(value, [raw for raw, _ in self._parts], materialize_grads=True)
        with torch.enable_grad():
            values = [constraint.transform(raw).sum() for raw, constraint in self._parts]
            by_raw = torch.autograd.grad(values, [raw for raw, _ in self._parts])
        parts = [(slope / unit).flatten() for slope, unit in zip(slopes, by_raw, strict=True)]
        return torch.cat(parts) * phi.exp()


def hyperparameter_draws(model: DenseGP, rule: Rule, seed: int) -> Tensor:
    """Return draws of phi (S, P) from its approximate posterior; none, (0, P), where that cannot be computed.

    Args:
        model: a trained one, with its priors.
        rule: that it was trained by.
        seed: of the draws.
    """
    model = copy.deepcopy(model).train()
    model.inference = rule
    objective, positive = evidence_of(model), Positive(model)
    center = positive.get()
    if not len(center):
        return center.unsqueeze(0)[:0]
    steps = _STEP * torch.eye(len(center), dtype=center.dtype)
    try:
        with without_inference_warnings():
            at_center = positive.gradient(objective, center)
            rows = [at_center - positive.gradient(objective, center + step) for step in steps]
    except (NotPSDError, NanError):
        return center.unsqueeze(0)[:0]
    curvature = torch.stack(rows) / _STEP
    values, vectors = torch.linalg.eigh(0.5 * (curvature + curvature.mT))
    normal = torch.randn(DRAWS // 2, len(center), generator=torch.Generator().manual_seed(seed), dtype=center.dtype)
    moves = normal / values.clamp_min(_LEAST_CURVATURE).sqrt() @ vectors.mT
    return torch.cat([center + moves, center - moves])


def members_of(model: DenseGP, draws: Tensor) -> list[DenseGP]:
    """Return a copy of a model for each draw (S, P) of its hyperparameters whose inference converges."""
    members = []
    for phi in draws:
        member = copy.deepcopy(model)
        member.inference = limited(model.inference)
        Positive(member).set(phi)
        with without_inference_warnings():
            if member.eval().result.status is Status.CONVERGED:
                members.append(member)
    return members


def limited(rule: Rule) -> Rule:
    """Return a rule of at most a hundred steps, for a part of an average that is left out if it does not converge."""
    if isinstance(rule, EP | KL | Laplace):
        return replace(rule, max_steps=min(rule.max_steps, _MOST_STEPS))
    return rule


def averaged(members: Sequence[DenseGP], x: Tensor, *, jointly: bool) -> MultivariateNormal:
    """Return the Gaussian with the moments of an equal mixture of posteriors at inputs (n, d).

    Args:
        members: the models.
        x: inputs of the kernel.
        jointly: with covariances; otherwise the variances alone.
    """
    found = [member(x) for member in members]
    means = torch.stack([each.mean for each in found])
    mean = means.mean(0)
    apart = means - mean
    if jointly:
        within = torch.stack([each.covariance_matrix for each in found]).mean(0)
        return MultivariateNormal(mean, within + apart.mT @ apart / len(found))
    within = torch.stack([each.variance for each in found]).mean(0)
    return MultivariateNormal(mean, DiagLinearOperator(within + apart.square().mean(0)))


@torch.no_grad()
def stacking_weights(log_densities: Tensor) -> Tensor:
    r"""Return weights (J,) of J models whose mixture predicts data best that the models have not seen.

    They maximise sum_i log sum_j w_j p_j(y_i | y_-i) + sum_j log w_j [Yao et al. 2018, Sec. 3.1, with a prior], by
    expectation maximisation. The prior, one datum for each model, keeps few data from a choice of one model: the
    leave-one-out density of a model of many hyperparameters is too good, since they were learnt from y_i, too.

    Args:
        log_densities: log p_j(y_i | y_-i) (J, N). Data that a model has no finite one of are left out.
    """
    kept = log_densities[:, log_densities.isfinite().all(0)]
    number, size = kept.shape
    weights = kept.new_full((number,), 1 / number)
    for _ in range(_STACKING_STEPS):
        shares = torch.softmax(kept + weights.log().unsqueeze(-1), 0).sum(-1)
        weights, before = (shares + 1) / (size + number), weights
        if bool((weights - before).abs().max() < _STACKED):
            break
    return weights
