r"""Integrals over the D correlated Gaussian latents of a datum.

    log_joint_expectation:  log int exp(l(f)) N(f | m, V) df          joint_expectation:  int g(f) N(f | m, V) df

With V = L L' and f = m + L z the first integrand is exp(l - |z|^2 / 2). It is centred at its mode and scaled by its
curvature there, z = z^ + C x, C C' = (I + L' U L)^-1, found by Newton's method, so that a likelihood much narrower than
the Gaussian is seen; for the second z = x. Up to three latents the trapezoidal rule in x does the rest, whose error
falls geometrically with the step for what is smooth; step and cube change until two rules agree. Above, Sobol points,
whose error independent scrambles measure. For derivatives the nodes stay fixed in z.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gpext.quadrature.adaptive import QuadratureWarning

_CHUNK = 2**20  # numbers in one evaluation
_PART = 32  # data that share their nodes
_TOLERANCE = 1e-9  # two trapezoidal rules agree
_TOLERATED = 5e-3  # error above which there is a warning
_MOST_NODES = (2**12, 2**16, 2**17)  # of one, two and three latents
_FALL = 25.0  # logarithm of the density that may be lost at the faces of the cube
_STEP, _REACH = 0.9, 7.5  # of the first rule, in standard deviations
_SCRAMBLES, _POINTS = 8, 2**12
_WIDER = 1.2  # Sobol points than the curvature says, for tails that are longer
_LEAST = 0.1  # curvature in z by which a step or a scale is made; it is 1 without a likelihood
_MOST_NEWTON_STEPS, _MOST_HALVINGS = 50, 30

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class SecondOrder:
    """l(f), its gradient and its negative second derivative, datum by datum."""

    value: Tensor  # (..., N)
    gradient: Tensor  # (..., D, N)
    precision: Tensor  # U (..., D, D, N)


def log_joint_expectation(
    function: Function, expand: Callable[[Tensor], SecondOrder], mean: Tensor, covariance: Tensor
) -> Tensor:
    """Return log int exp(l(f)) N(f | mean, covariance) df (..., N), differentiable once.

    To 1e-8 for up to three latents; above, by Sobol points, with a :class:`QuadratureWarning` if their error is above
    5e-3. The same call gives the same number.

    Args:
        function: l, maps f (Q, ..., D, N) to (Q, ..., N).
        expand: l to second order at f (..., D, N).
        mean: (..., D, N).
        covariance: of the latents of each datum (..., D, D, N).

    Raises:
        ValueError: a covariance is not positive semidefinite.
    """
    root = _root(covariance)
    with torch.no_grad():
        centre, scale = _mode(expand, mean.double(), root)
        volume = torch.linalg.slogdet(scale).logabsdet

    def terms(x: Tensor) -> Tensor:  # log of the integrand, without the weights
        z = centre + torch.einsum("...nde,qe->q...nd", scale, x)
        log_p = function(_latents(mean, root, z).to(mean.dtype)).double()
        return log_p + volume - 0.5 * (z.square().sum(-1) + z.size(-1) * math.log(2 * math.pi))

    def log_integral(x: Tensor, log_weight: Tensor) -> Tensor:
        return torch.stack([_add(terms(x), w).logsumexp(0) for x, w in _chunks(x, log_weight, mean)]).logsumexp(0)

    def log_largest(x: Tensor) -> Tensor:
        return torch.stack([terms(x).amax(0) for x, _ in _chunks(x, x[:, 0], mean)]).amax(0)

    with torch.no_grad():
        x, log_weight, value = _settle(log_integral, mean, log_largest, _WIDER)
    return (log_integral(x, log_weight) if torch.is_grad_enabled() else value).to(mean.dtype)


def joint_expectation(function: Function, mean: Tensor, covariance: Tensor) -> Tensor:
    """Return int g(f) N(f | mean, covariance) df (..., N) or (..., C, N), differentiable once.

    Args:
        function: g, maps f (Q, ..., D, N) to (Q, ..., N) or (Q, ..., C, N); smooth.
        mean: (..., D, N).
        covariance: of the latents of each datum (..., D, D, N).

    Raises:
        ValueError: a covariance is not positive semidefinite.
    """
    root = _root(covariance)

    def integral(x: Tensor, log_weight: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=mean.device)
        for part, log_w in _chunks(x, log_weight, mean):
            z = part.view(len(part), *(1,) * (mean.dim() - 1), part.size(-1))
            values = function(_latents(mean, root, z).to(mean.dtype)).double()
            log_density = -0.5 * (part.square().sum(-1) + part.size(-1) * math.log(2 * math.pi))
            total = total + torch.tensordot((log_density + log_w).exp(), values, 1)
        return total

    with torch.no_grad():
        x, log_weight, value = _settle(integral, mean, None, 1.0)
    return (integral(x, log_weight) if torch.is_grad_enabled() else value).to(mean.dtype)


def in_parts(
    integral: Callable[..., Tensor],
    mean: Tensor,
    covariance: Tensor,
    targets: Tensor | None = None,
    dim: int = -1,
    part: int = _PART,
) -> Tensor:
    """Return integral(mean, covariance[, targets]) (..., N), a few data at a time, so that few share their nodes.

    Args:
        integral: one of the above, of such arguments.
        mean: (..., D, N).
        covariance: (..., D, D, N).
        targets: data along `dim`, or one for all.
        dim: negative.
        part: how many at a time.
    """
    size = mean.size(-1)
    parts = [mean.split(part, -1), covariance.split(part, -1)]
    if targets is not None:
        shared = targets.dim() >= -dim and targets.size(dim) == size
        parts.append(targets.split(part, dim) if shared else (targets,) * len(parts[0]))
    return torch.cat([integral(*part) for part in zip(*parts, strict=True)], -1)


def _latents(mean: Tensor, root: Tensor, z: Tensor) -> Tensor:
    """Return f = m + L z (Q, ..., D, N) for z (Q, ..., N, D)."""
    return (mean.double().mT + (root @ z.unsqueeze(-1)).squeeze(-1)).mT


def _root(covariance: Tensor) -> Tensor:
    """Return L (..., N, D, D), with a ridge of the size of rounding where the covariance is singular.

    Raises:
        ValueError: it is not positive semidefinite.
    """
    V = covariance.double().movedim(-1, -3)
    root, info = torch.linalg.cholesky_ex(V)
    if not bool((info == 0).all()):
        size = V.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
        ridge = 10 * torch.finfo(covariance.dtype).eps * size + 1e-280
        root, info = torch.linalg.cholesky_ex(V + ridge * torch.eye(V.size(-1), dtype=V.dtype, device=V.device))
    if not bool((info == 0).all()):
        index = tuple((info != 0).nonzero()[0].tolist())
        raise ValueError(
            f"a covariance of the latents of a datum is not positive semidefinite, first at index {index}."
        )
    return root


def _mode(expand: Callable[[Tensor], SecondOrder], mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mode z^ (..., N, D) of exp(l - |z|^2 / 2) and C (..., N, D, D), by Newton's method with halvings."""
    z = torch.zeros_like(mean.mT)
    for _ in range(_MOST_NEWTON_STEPS):
        at = expand(_latents(mean, root, z))
        slope = (root.mT @ at.gradient.mT.unsqueeze(-1)).squeeze(-1) - z
        bend, axes = _curvature(root.mT @ at.precision.movedim(-1, -3) @ root)
        step = (axes @ ((axes.mT @ slope.unsqueeze(-1)) / bend.unsqueeze(-1))).squeeze(-1)
        if bool(((slope * step).sum(-1) < 1e-8).all()):
            break
        here, rate = at.value - 0.5 * z.square().sum(-1), torch.ones_like(at.value)
        for _ in range(_MOST_HALVINGS):
            moved = z + rate.unsqueeze(-1) * step
            there = expand(_latents(mean, root, moved)).value - 0.5 * moved.square().sum(-1)
            risen = there >= here
            if bool(risen.all()):
                break
            rate = torch.where(risen, rate, rate / 2)
        z = torch.where(risen.unsqueeze(-1), moved, z)
    return z, axes * bend.rsqrt().unsqueeze(-2)


def _curvature(bend: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues (..., D), made positive, and eigenvectors of I + L' U L, or of I where that has overflown.

    Positive they are wherever l is concave; elsewhere their size still makes a step, and a scale, upwards.
    """
    unit = torch.eye(bend.size(-1), dtype=bend.dtype, device=bend.device)
    total = unit + 0.5 * (bend + bend.mT)
    finite = total.isfinite().all(-1).all(-1)[..., None, None]
    values, axes = torch.linalg.eigh(torch.where(finite, total, unit))
    return values.abs().clamp_min(_LEAST), axes


def _settle(
    integral: Callable[[Tensor, Tensor], Tensor],
    mean: Tensor,
    log_largest: Callable[[Tensor], Tensor] | None,
    spread: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return nodes x (Q, D), the logarithms of their weights in int dx (Q,), and the integral with them.

    Args:
        integral: of nodes and log weights, or its logarithm.
        mean: of the latents (..., D, N).
        log_largest: the logarithm of the largest value at some nodes, where the cube is to be found out.
        spread: the standard deviation of Sobol points.
    """
    latents = mean.size(-2)
    if latents > len(_MOST_NODES):
        parts = [_sobol(latents, seed, spread, mean.device) for seed in range(_SCRAMBLES)]
        values = torch.stack([integral(*part) for part in parts])
        x, log_weight = (torch.cat(t) for t in zip(*parts, strict=True))
        _warn_if_above(float(values.std(0).max()) / math.sqrt(_SCRAMBLES))
        log_weight = log_weight - math.log(_SCRAMBLES)
        return x, log_weight, integral(x, log_weight)
    step, reach, before = _STEP, _REACH, None
    while True:
        x, log_weight = _cube(latents, step, reach, mean.device)
        value = integral(x, log_weight)
        change = math.inf if before is None else float(((value - before).abs() / (1 + value.abs())).max())
        is_face = x.abs().amax(-1) == x.max()
        is_cut = log_largest is not None and bool((log_largest(x[is_face]) > value - _FALL).any())
        enough = change <= _TOLERANCE and not is_cut
        step, reach, before = 0.75 * step, (1.4 if is_cut else 1.0) * reach, value
        if enough or (2 * reach / step + 1) ** latents > _MOST_NODES[latents - 1]:
            _warn_if_above(change)
            return x, log_weight, value


def _warn_if_above(error: float) -> None:
    if error > _TOLERATED:
        warnings.warn(
            f"an integral over the latents of a datum has a relative error of up to about {error:.1e}.",
            QuadratureWarning,
            stacklevel=5,
        )


def _cube(latents: int, step: float, reach: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the nodes and log weights of the trapezoidal rule on a cube."""
    half = math.ceil(reach / step)
    line = step * torch.arange(-half, half + 1, dtype=torch.float64, device=device)
    x = torch.cartesian_prod(*[line] * latents).view(-1, latents)
    return x, torch.full_like(x[:, 0], latents * math.log(step))


def _sobol(latents: int, seed: int, spread: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return points of N(0, spread^2 I) and the log weights with which they stand for dx."""
    engine = torch.quasirandom.SobolEngine(latents, scramble=True, seed=seed)
    uniform = engine.draw(_POINTS, dtype=torch.float64).to(device) * (1 - 2**-31) + 2**-32  # inside (0, 1)
    x = torch.special.ndtri(uniform)
    log_density = -0.5 * x.square().sum(-1) - latents * math.log(spread * math.sqrt(2 * math.pi))
    return spread * x, -log_density - math.log(_POINTS)


def _chunks(x: Tensor, log_weight: Tensor, like: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Return nodes and log weights, so many at a time that memory suffices."""
    size = max(_CHUNK // max(like.numel(), 1), 1)
    return zip(x.split(size), log_weight.split(size), strict=True)


def _add(values: Tensor, log_weight: Tensor) -> Tensor:
    """Return (Q, ..., N) with a weight for each of Q."""
    return values + log_weight.view(-1, *(1,) * (values.dim() - 1))
