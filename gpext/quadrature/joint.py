r"""Integrals over the D correlated Gaussian latents of a datum.

    log_joint_expectation:  log int exp(l(f)) N(f | m, V) df          joint_expectation:  int g(f) N(f | m, V) df

With V = L L' and f = m + L z the first integrand is exp(l - |z|^2 / 2). It is centred at its mode and scaled by its
curvature there, z = z^ + C x, C C' = (I + L' U L)^-1, found by Newton's method, so that a likelihood much narrower than
the Gaussian is seen; for the second z = x. Up to three latents :mod:`gpext.quadrature.lattices` does the rest; above,
Sobol points, whose error eight independent scrambles estimate: what is said is 5.4 of their standard errors, which
Student's t of seven degrees of freedom is beyond in one case of a thousand. For derivatives the nodes stay fixed in z.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gpext.callers import warn_caller
from gpext.quadrature.adaptive import QuadratureWarning
from gpext.quadrature.lattices import MOST_VARIABLES, integrate_on_lattices

_CHUNK = 2**15  # numbers in one evaluation, which stay in cache
_PART = 16  # data that share their nodes
_TOLERANCE = (1e-11, 1e-11, 1e-9)  # of one, two and three latents, whose points cost
_TOLERATED = 5e-3  # error above which there is a warning
_SCRAMBLES, _POINTS = 8, 2**12
_ERRORS = 5.408  # standard errors that one error in a thousand is beyond: Student's t of seven degrees of freedom
_WIDER = 1.2  # times as wide as the curvature suggests: Sobol points for longer tails
_LEAST = 0.1  # curvature in z by which a step or a scale is made; it is 1 without a likelihood
_MOST_NEWTON_STEPS, _MOST_HALVINGS = 50, 30

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class SecondOrder:
    """l(f), its gradient and its negative second derivative, datum by datum.

    Example:
        >>> import torch
        >>> f = torch.zeros(1, 1)
        >>> SecondOrder(value=-0.5 * f.square().sum(-2), gradient=-f, precision=torch.ones(1, 1, 1)).precision.shape
        torch.Size([1, 1, 1])
    """

    value: Tensor  # (..., N)
    gradient: Tensor  # (..., D, N)
    precision: Tensor  # U (..., D, D, N)


def log_joint_expectation(
    function: Function, expand: Callable[[Tensor], SecondOrder], mean: Tensor, covariance: Tensor
) -> Tensor:
    """Return log int exp(l(f)) N(f | mean, covariance) df (..., N), differentiable once.

    To about 1e-8 for one and two latents, and for three whose standard deviations are about one (1e-5 at three); above,
    by Sobol points; with a :class:`QuadratureWarning` if the error is above 5e-3. The same call gives the same number.

    Args:
        function: l, maps f (Q, ..., D, N) to (Q, ..., N).
        expand: l to second order at f (..., D, N).
        mean: (..., D, N).
        covariance: of the latents of each datum (..., D, D, N).

    Raises:
        ValueError: a covariance is not positive semidefinite.

    Example:
        >>> import torch
        >>> def expand(f):  # l(f) = -f^2 / 2
        ...     return SecondOrder(-0.5 * f.square().sum(-2), -f, torch.ones(1, 1, 1).double())
        >>> one = torch.ones(1, 1).double()
        >>> log_z = log_joint_expectation(lambda f: -0.5 * f.square().sum(-2), expand, 0 * one, one.unsqueeze(0))
        >>> log_z.exp()  # 2^-1/2
        tensor([0.7071], dtype=torch.float64)
    """
    root = _root(covariance)
    with torch.no_grad():
        centre, scale = _mode(expand, mean.double(), root)
        volume = torch.linalg.slogdet(scale).logabsdet

    def terms(x: Tensor) -> Tensor:  # log of the integrand (Q, ..., N)
        z = centre + torch.einsum("...nde,qe->q...nd", scale, x)
        log_p = function(_latents(mean, root, z).to(mean.dtype)).double()
        return log_p + volume - 0.5 * (z.square().sum(-1) + z.size(-1) * math.log(2 * math.pi))

    def log_total(x: Tensor, log_weight: Tensor) -> Tensor:
        values = terms(x)
        return (values + log_weight.view(-1, *(1,) * (values.dim() - 1))).logsumexp(0)

    return _integral(log_total, mean, _WIDER, logarithm=True)


def joint_expectation(function: Function, mean: Tensor, covariance: Tensor) -> Tensor:
    """Return int g(f) N(f | mean, covariance) df (..., N) or (..., C, N), differentiable once.

    Args:
        function: g, maps f (Q, ..., D, N) to (Q, ..., N) or (Q, ..., C, N); smooth.
        mean: (..., D, N).
        covariance: of the latents of each datum (..., D, D, N).

    Raises:
        ValueError: a covariance is not positive semidefinite.

    Example:
        >>> import torch
        >>> mean, covariance = torch.zeros(2, 1).double(), torch.eye(2).double().unsqueeze(-1)
        >>> joint_expectation(lambda f: f[..., 0, :] * f[..., 1, :], mean, covariance).shape
        torch.Size([1])
    """
    root = _root(covariance)

    def total(x: Tensor, log_weight: Tensor) -> Tensor:
        z = x.view(len(x), *(1,) * (mean.dim() - 1), x.size(-1))
        log_density = -0.5 * (x.square().sum(-1) + x.size(-1) * math.log(2 * math.pi))
        values = function(_latents(mean, root, z).to(mean.dtype)).double()
        return torch.tensordot((log_density + log_weight).exp(), values, 1)

    return _integral(total, mean, 1.0, logarithm=False)


def independent_expectation(function: Function, mean: Tensor, covariance: Tensor) -> Tensor:
    """Return int g(f) N(f | mean, covariance) df (..., N) for uncorrelated latents, differentiable once in these alone.

    The derivatives cost no more than the value, as they need none of g's [Stein 1981]: with z = (f - m) / sigma,

        dE/dm = E[(g - g(m)) z] / sigma,    dE/dv = E[(g - g(m)) (z^2 - 1)] / (2 v)

    to about 1e-12 / v, relative to what g varies by.

    Args:
        function: g, maps f (Q, ..., D, N) to (Q, ..., N); smooth.
        mean: (..., D, N).
        covariance: (..., D, D, N), diagonal and positive.

    Example:
        >>> import torch
        >>> mean, covariance = torch.zeros(2, 1).double(), torch.eye(2).double().unsqueeze(-1)
        >>> independent_expectation(lambda f: f.square().sum(-2), mean, covariance).round(decimals=6)
        tensor([2.], dtype=torch.float64)
    """
    variance = covariance.diagonal(dim1=-3, dim2=-2).mT  # (..., D, N)
    m, v = mean.detach().double(), variance.detach().double()
    sigma = v.sqrt()
    with torch.no_grad():
        at_mean = function(m).double()

        def values(f: Tensor) -> Tensor:
            gap = (function(f) - at_mean).unsqueeze(-2)
            z = (f - m) / sigma
            return torch.cat([gap, gap * z, 0.5 * gap * (z.square() - 1)], -2)

        integrals = joint_expectation(values, m, covariance.detach().double())
        rise, by_mean, by_variance = integrals.split([1, m.size(-2), m.size(-2)], -2)
    moved = by_mean / sigma * (mean - mean.detach()) + by_variance / v * (variance - variance.detach())
    return (at_mean + rise.squeeze(-2) + moved.sum(-2)).to(mean.dtype)


def in_parts(
    integral: Callable[..., Tensor], mean: Tensor, covariance: Tensor, targets: Tensor | None = None, dim: int = -1
) -> Tensor:
    """Return integral(mean, covariance[, targets]) (..., N), a few data at a time, so that few share their nodes.

    Those whose latents vary as much go together: they need about as many.

    Args:
        integral: one of the above, of such arguments.
        mean: (..., D, N).
        covariance: (..., D, D, N).
        targets: data along `dim`, or one for all.
        dim: negative.

    Example:
        >>> import torch
        >>> from gpext.quadrature import joint_expectation
        >>> def second_moment(mean, covariance):
        ...     return joint_expectation(lambda f: f.square().sum(-2), mean, covariance)
        >>> in_parts(second_moment, torch.zeros(1, 3).double(), torch.ones(1, 1, 3).double()).round(decimals=6)
        tensor([1., 1., 1.], dtype=torch.float64)
    """
    size = mean.size(-1)
    spread = covariance.detach().diagonal(dim1=-3, dim2=-2).sum(-1)  # (..., N)
    order = spread.reshape(-1, size).amax(0).argsort()
    shared = targets is None or targets.dim() < -dim or targets.size(dim) != size
    parts = []
    for index in order.split(_PART):
        arguments = [mean[..., index], covariance[..., index]]
        if targets is not None:
            arguments.append(targets if shared else targets.index_select(dim, index))
        parts.append(integral(*arguments))
    return torch.cat(parts, -1)[..., order.argsort()]


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


def _integral(total: Callable[[Tensor, Tensor], Tensor], mean: Tensor, spread: float, *, logarithm: bool) -> Tensor:
    """Return the integral, or its logarithm; its graph keeps no evaluation, but repeats them.

    Args:
        total: the sum over nodes (Q, D) with their log weights (Q,), or its logarithm.
        mean: of the latents (..., D, N).
        spread: the standard deviation of Sobol points.
        logarithm: whether `total` is one.
    """

    def summed(x: Tensor, log_weight: Tensor) -> Tensor:
        size = max(_CHUNK // mean.numel(), 1)
        parts = zip(x.split(size), log_weight.split(size), strict=True)
        if torch.is_grad_enabled():
            sums = [checkpoint(total, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
        else:
            sums = [total(*part) for part in parts]
        return torch.stack(sums).logsumexp(0) if logarithm else torch.stack(sums).sum(0)

    with torch.no_grad():
        nodes, value, error = _nodes(summed, mean, spread, logarithm)
    if not bool(value.isfinite().all()):
        warn_caller(
            "an integral over the latents of a datum is not finite: the function has no finite value where the "
            "Gaussian has mass; check its formula at the mean.",
            QuadratureWarning,
        )
    elif error > _TOLERATED:
        warn_caller(
            f"an integral over the latents of a datum has a relative error of up to about {error:.1e}.",
            QuadratureWarning,
        )
    return (summed(*nodes) if torch.is_grad_enabled() else value).to(mean.dtype)


def _nodes(
    summed: Callable[[Tensor, Tensor], Tensor], mean: Tensor, spread: float, logarithm: bool
) -> tuple[tuple[Tensor, Tensor], Tensor, float]:
    """Return nodes (Q, D) with the logarithms of their weights in int dx (Q,), the integral and its error."""
    latents, device = mean.size(-2), mean.device
    if latents > MOST_VARIABLES:
        parts = [_sobol(latents, seed, spread, device) for seed in range(_SCRAMBLES)]
        values = torch.stack([summed(*part) for part in parts])
        x, log_weight = (torch.cat(t) for t in zip(*parts, strict=True))
        value = values.logsumexp(0) - math.log(_SCRAMBLES) if logarithm else values.mean(0)
        error = _ERRORS * float(values.std(0).max()) / math.sqrt(_SCRAMBLES)
        return (x, log_weight - math.log(_SCRAMBLES)), value, error
    rule = integrate_on_lattices(
        lambda x: summed(x, torch.zeros_like(x[:, 0])),
        latents,
        logarithm=logarithm,
        tolerance=_TOLERANCE[latents - 1],
        device=device,
    )
    return (rule.points, torch.full_like(rule.points[:, 0], rule.log_weight)), rule.value, rule.error


def _sobol(latents: int, seed: int, spread: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return points of N(0, spread^2 I) and the log weights with which they stand for dx."""
    engine = torch.quasirandom.SobolEngine(latents, scramble=True, seed=seed)
    uniform = engine.draw(_POINTS, dtype=torch.float64).to(device) * (1 - 2**-31) + 2**-32  # inside (0, 1)
    x = torch.special.ndtri(uniform)
    log_density = -0.5 * x.square().sum(-1) - latents * math.log(spread * math.sqrt(2 * math.pi))
    return spread * x, -log_density - math.log(_POINTS)
