"""Integrals against a Gaussian to a tolerance; the documentation is the package's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from gpext.callers import warn_caller
from gpext.quadrature.gauss_kronrod import FINEST, LOG_SQRT_2PI, Function, Panels, initial_edges


class QuadratureWarning(UserWarning):
    """Some integrals did not reach the requested tolerance.

    Example:
        >>> issubclass(QuadratureWarning, UserWarning)
        True
    """


class QuadratureStatus(Enum):
    """The outcome of an adaptive integration; the text is the remedy.

    Example:
        >>> QuadratureStatus.CONVERGED.name
        'CONVERGED'
    """

    CONVERGED = "every integral reached the tolerance"
    MAX_ROUNDS = "pass knots where the integrand has kinks or narrow features, or increase max_rounds"
    NON_FINITE = "the function returned nan or +-inf where the Gaussian has mass: check its formula at the mean"


@dataclass(frozen=True)
class QuadratureResult:
    """Outcome of `integrate`.

    Attributes:
        value: (*shape) the integral, or its logarithm.
        error: (*shape) estimated absolute error of `value`; inf or nan where the integrand is not finite.
        resolved: (*shape) bool, whether the error is within the tolerance, or within the rounding of f and of the
            exponent that no rule can avoid (a function 1e-9 wide is known to 1e-7 at f = 1); `error` includes it.
        nodes: (Q, *shape) float64 nodes f of the frozen rule.
        log_weights: (Q, *shape) float64 logarithms of its weights, the Gaussian density included:
            value = sum_q exp(log_weights_q) g(nodes_q).
        num_evaluations: evaluations of the function per datum.
        num_rounds: rounds of refinement.
        status: the worst outcome over the data.

    Example:
        >>> import torch
        >>> from gpext.quadrature import integrate
        >>> result = integrate(torch.exp, torch.zeros(1).double(), torch.ones(1).double())
        >>> result.value, result.status.name
        (tensor([1.6487], dtype=torch.float64), 'CONVERGED')
    """

    value: Tensor
    error: Tensor
    resolved: Tensor
    nodes: Tensor
    log_weights: Tensor
    num_evaluations: int
    num_rounds: int
    status: QuadratureStatus


def expectation(
    function: Function,
    mean: Tensor,  # (*shape), broadcast with variance
    variance: Tensor,  # (*shape)
    *,
    knots: Tensor | None = None,  # (J, *shape) or broadcastable
    relative_tolerance: float | None = None,
    absolute_tolerance: float = 0.0,
    max_rounds: int = 40,
    finest: float = FINEST,
) -> Tensor:
    """E[function(f)] for f ~ N(mean, variance), elementwise.

    Args:
        function: maps f (Q, *shape), float64, to values broadcastable to (Q, *shape); elementwise in f.
        mean: means of the Gaussians.
        variance: their variances, zero allowed.
        knots: where the function has a kink or a feature much narrower than the Gaussian, e.g. a likelihood's target.
        relative_tolerance: accepted error over E|function(f)|; default 1e-10 in float64, 1e-6 in float32.
        absolute_tolerance: accepted error whatever E|function(f)| is.
        max_rounds: rounds of refinement before a `QuadratureWarning`.
        finest: the smallest initial panel at a knot, in standard deviations, where the narrowest feature is known.

    Returns:
        (*shape), in the dtype of mean and variance; differentiable in them and in what `function` closes over.

    Raises:
        ValueError: mean, variance or knots are not finite, or variance is negative.

    Example:
        >>> import torch
        >>> expectation(torch.exp, torch.zeros(1).double(), torch.ones(1).double())  # exp(1/2)
        tensor([1.6487], dtype=torch.float64)
    """
    result = integrate(
        function,
        mean,
        variance,
        knots=knots,
        relative_tolerance=relative_tolerance,
        absolute_tolerance=absolute_tolerance,
        max_rounds=max_rounds,
        finest=finest,
    )
    warn_unresolved(result)
    return result.value


def log_expectation(
    log_function: Function,
    mean: Tensor,  # (*shape), broadcast with variance
    variance: Tensor,  # (*shape)
    *,
    knots: Tensor | None = None,  # (J, *shape) or broadcastable
    relative_tolerance: float | None = None,
    max_rounds: int = 40,
) -> Tensor:
    """Log E[exp(log_function(f))] for f ~ N(mean, variance), elementwise; no underflow however far the mass lies.

    Arguments, result and errors are those of `expectation`. The tolerance is relative to E[exp(log_function(f))], so
    absolute for its logarithm.

    Example:
        >>> import torch
        >>> log_expectation(lambda f: f, torch.zeros(1).double(), torch.ones(1).double())  # log E[exp f]
        tensor([0.5000], dtype=torch.float64)
    """
    result = integrate(
        log_function,
        mean,
        variance,
        log_space=True,
        knots=knots,
        relative_tolerance=relative_tolerance,
        max_rounds=max_rounds,
    )
    warn_unresolved(result)
    return result.value


def integrate(
    function: Function,
    mean: Tensor,
    variance: Tensor,
    *,
    log_space: bool = False,
    knots: Tensor | None = None,
    relative_tolerance: float | None = None,
    absolute_tolerance: float = 0.0,
    max_rounds: int = 40,
    finest: float = FINEST,
) -> QuadratureResult:
    """`expectation` (`log_expectation` if log_space) as a result with its error estimate, rule and status; never warns.

    The rule serves for further expectations under the same weight, e.g. the moments of a tilted distribution:
    `(result.log_weights + log_function(result.nodes)).softmax(0)` are probabilities of the nodes.

    Example:
        >>> import torch
        >>> result = integrate(torch.exp, torch.zeros(1).double(), torch.ones(1).double())
        >>> result.status.name, bool(result.error < 1e-6)
        ('CONVERGED', True)
    """
    dtype = torch.promote_types(mean.dtype, variance.dtype)
    if relative_tolerance is None:
        relative_tolerance = 1e-10 if dtype == torch.float64 else 1e-6
    mean, variance = torch.broadcast_tensors(mean, variance)
    require(mean, torch.isfinite(mean), "mean must be finite")
    require(variance, torch.isfinite(variance) & (variance >= 0), "variance must be finite and not negative")
    mean, variance = mean.double(), variance.double()
    with torch.no_grad():
        sd = variance.sqrt()
        centres = _standardised_knots(knots, mean, sd)
        panels = Panels(function, mean, sd, log_space, initial_edges(centres, mean, log_space, finest))
        num_rounds = 0
        while num_rounds < max_rounds and panels.refine(relative_tolerance, absolute_tolerance):
            num_rounds += 1
        shift, rows = panels.common()
        total, error, noise, allowed = panels.totals(rows, relative_tolerance, absolute_tolerance)
        resolved = error <= allowed
        error = error + noise
        z, widths = panels.freeze(rows, relative_tolerance, allowed)
        value = shift + total.log() if log_space else total
        if log_space:
            error = torch.where(total > 0, error / total, error)
        nodes = mean + sd * z
        log_weights = widths.log() - 0.5 * z.square() - LOG_SQRT_2PI
    if torch.is_grad_enabled():
        # One node suffices to see whether anything carries a gradient; the frozen rule is evaluated again only then.
        probe = function(mean.detach().unsqueeze(0))
        if probe.requires_grad or mean.requires_grad or variance.requires_grad:
            value = _with_gradient(function, mean, variance, z, widths, value, log_space)
    status = QuadratureStatus.CONVERGED
    if not bool(resolved.all()):
        status = QuadratureStatus.MAX_ROUNDS if bool(torch.isfinite(error).all()) else QuadratureStatus.NON_FINITE
    return QuadratureResult(
        value.to(dtype), error.to(dtype), resolved, nodes, log_weights, panels.num_evaluations, num_rounds, status
    )


def require(tensor: Tensor, valid: Tensor, expected: str) -> None:
    """Raise ValueError, with the first offending index, unless every entry is valid."""
    if bool(valid.all()):
        return
    index = tuple((~valid).nonzero()[0].tolist())
    raise ValueError(f"{expected}; got {tensor[index].item()} at index {index} of shape {tuple(tensor.shape)}.")


def warn_unresolved(result: QuadratureResult) -> None:
    """Warn if an integral did not reach its tolerance, with the remedy."""
    if result.status is not QuadratureStatus.CONVERGED:
        missed = ~result.resolved
        worst = result.error[missed].nan_to_num(nan=math.inf).max().item()
        warn_caller(
            f"{int(missed.sum())} of {missed.numel()} integrals did not reach the tolerance after "
            f"{result.num_rounds} rounds; worst estimated error {worst:.1e}, first at index "
            f"{tuple(missed.nonzero()[0].tolist())}. Remedy: {result.status.value}.",
            QuadratureWarning,
        )


def _standardised_knots(knots: Tensor | None, mean: Tensor, sd: Tensor) -> Tensor:  # (J, *shape)
    if knots is None:
        return mean.new_zeros((0, *mean.shape))
    knots = knots.detach().to(mean).expand(knots.shape[0], *mean.shape)
    require(knots, torch.isfinite(knots), "knots must be finite")
    # All nodes coincide when sd = 0, and z^2 must not overflow when sd is tiny.
    return torch.where(sd > 0, (knots - mean) / sd, torch.zeros_like(mean)).clamp(-1e100, 1e100)


def _with_gradient(
    function: Function, mean: Tensor, variance: Tensor, z: Tensor, widths: Tensor, value: Tensor, log_space: bool
) -> Tensor:
    """The frozen rule as a function of mean, variance and the function's own tensors.

    The nodes f are constants; z moves with mean and variance. It is written so that its value is exactly the frozen z.
    """
    alive = variance > 0
    sd = torch.where(alive, variance, 1.0).sqrt()
    frozen_mean, frozen_sd = mean.detach(), sd.detach()
    live_z = z * (frozen_sd / sd) - torch.where(alive, mean - frozen_mean, 0.0) / sd
    log_weights = widths.log() - 0.5 * live_z.square() - LOG_SQRT_2PI - (sd / frozen_sd).log()
    # Without width the derivative in the mean is the function's own.
    f = torch.where(alive, frozen_mean + frozen_sd * z, mean)  # (Q, *shape)
    values = function(f).to(f).expand(f.shape)
    if log_space:
        result = torch.logsumexp(log_weights + values, 0)
    else:
        # Sum of weights = 1, so a constant may be taken out: less rounding in the derivatives of a narrow Gaussian.
        constant = torch.where(value.isfinite(), value, 0.0)
        weights = log_weights.exp()
        result = constant + (weights * torch.where(weights > 0, values - constant, 0.0)).sum(0)
    if variance.requires_grad and not bool(alive.all()):
        result = result + torch.where(alive, 0.0, variance * _heat(function, frozen_mean, log_space))
    return result


def _heat(function: Function, mean: Tensor, log_space: bool) -> Tensor:  # (*shape)
    """d/dv at v = 0: E[g] obeys the heat equation d/dv = g''/2; in log space (l'' + l'^2) / 2."""
    f = mean.clone().requires_grad_()
    value = function(f.unsqueeze(0)).to(f).sum()
    first = second = torch.zeros_like(f)
    if value.requires_grad:
        (first,) = torch.autograd.grad(value, f, create_graph=True, allow_unused=True, materialize_grads=True)
    if first.requires_grad:
        (second,) = torch.autograd.grad(first.sum(), f, allow_unused=True, materialize_grads=True)
    return (second + first.square() if log_space else second).detach() / 2
