r"""Ordered classes 0, ..., K - 1 with cumulative links: one latent function, K - 1 learnable cutpoints.

    p(y <= k | f) = G(b_k - f),   b_0 < ... < b_{K-2},   G the logistic or the normal distribution function
    p(y = k | f) = G(b_k - f) - G(b_{k-1} - f),   b_{-1} = -inf,   b_{K-1} = inf

[KMM12 Sec. 4] has the logit, [Cha13] the probit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch.constraints import Interval, Positive
from gpytorch.distributions import MultivariateNormal
from gpytorch.priors import Prior
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.functional import logsigmoid

from gpext.bounds import Quadrature, SoftplusTerms
from gpext.checks import whole_number
from gpext.distributions import OrderedCategorical
from gpext.likelihoods.checks import check_classes, floating
from gpext.likelihoods.latent import STRIP, LatentLikelihood
from gpext.quadrature import gauss_legendre
from gpext.special import log_ndtr


@dataclass(frozen=True)
class _Edges:
    """The interval (lower, upper) of each target's class; an edge at infinity has a finite stand-in and a mark."""

    lower: Tensor  # (..., N), like all
    upper: Tensor
    gap: Tensor  # upper - lower, without cancellation; meaningless at the ends
    is_first: Tensor
    is_last: Tensor

    def log_width(self) -> Tensor:
        """Return log(1 - e^{-gap}), 0 for the first and the last class."""
        at_end = self.is_first | self.is_last
        return torch.where(at_end, 0.0, torch.log(-torch.expm1(-torch.where(at_end, 1.0, self.gap))))


class OrdinalLikelihood(LatentLikelihood):
    """The cutpoints and the predictions that the cumulative links share.

    Args:
        num_classes: K, at least 2.
        batch_shape: shape of a batch of cutpoints.
        first_cutpoint_prior: prior of `first_cutpoint`.
        gaps_prior: prior of `gaps`, elementwise.
        gaps_constraint: constraint of `gaps`; positive by default.

    The parameters are `first_cutpoint` (*batch_shape, 1), b_0, and `gaps` (*batch_shape, K - 2), the positive
    differences of neighbours; `cutpoints` reads and sets them all. They start two units apart, symmetric about 0. A
    class that no target has is learned as a gap that shrinks; nothing else is special about it.

    Raises:
        ValueError: fewer than two classes.
    """

    def __init__(
        self,
        num_classes: int,
        batch_shape: torch.Size = torch.Size(),  # noqa: B008  gpytorch's own signature; a Size is immutable
        *,
        first_cutpoint_prior: Prior | None = None,
        gaps_prior: Prior | None = None,
        gaps_constraint: Interval | None = None,
    ) -> None:
        super().__init__()
        num_classes = whole_number("num_classes", num_classes, 2)
        self.num_classes = num_classes
        self.register_parameter("first_cutpoint", torch.nn.Parameter(torch.zeros(*batch_shape, 1)))
        self.register_parameter("raw_gaps", torch.nn.Parameter(torch.zeros(*batch_shape, num_classes - 2)))
        self.register_constraint("raw_gaps", gaps_constraint if gaps_constraint is not None else Positive())
        if first_cutpoint_prior is not None:
            self.register_prior("first_cutpoint_prior", first_cutpoint_prior, "first_cutpoint")
        if gaps_prior is not None:
            self.register_prior("gaps_prior", gaps_prior, _get_gaps, _set_gaps)
        if gaps_constraint is None:
            self.gaps = 2.0
        self.initialize(first_cutpoint=-0.5 * self.gaps.detach().sum(-1, keepdim=True))

    @property
    def gaps(self) -> Tensor:
        """The differences of neighbouring cutpoints, (*batch_shape, K - 2)."""
        return self.raw_gaps_constraint.transform(self.raw_gaps)

    @gaps.setter
    def gaps(self, value: Tensor | float) -> None:
        value = torch.as_tensor(value, dtype=self.raw_gaps.dtype, device=self.raw_gaps.device)
        self.initialize(raw_gaps=self.raw_gaps_constraint.inverse_transform(value.expand_as(self.raw_gaps)))

    @property
    def cutpoints(self) -> Tensor:
        """The increasing cutpoints b_0, ..., b_{K-2}, (*batch_shape, K - 1)."""
        return torch.cat([self.first_cutpoint, self.first_cutpoint + self.gaps.cumsum(-1)], -1)

    @cutpoints.setter
    def cutpoints(self, value: Tensor | Sequence[float]) -> None:
        value = torch.as_tensor(value, dtype=self.first_cutpoint.dtype, device=self.first_cutpoint.device)
        if value.shape[-1:] != (self.num_classes - 1,):
            raise ValueError(
                f"{self.num_classes} classes have {self.num_classes - 1} cutpoints; got a value of shape "
                f"{tuple(value.shape)}."
            )
        if not bool(value.isfinite().all()) or not bool((value.diff(dim=-1) > 0).all()):
            raise ValueError(f"cutpoints must be finite and strictly increasing; got {value.tolist()}.")
        value = value.expand(*self.first_cutpoint.shape[:-1], self.num_classes - 1)
        self.gaps = value.diff(dim=-1)
        self.initialize(first_cutpoint=value[..., :1])

    def check_support(self, targets: Tensor) -> None:
        """Raise ValueError if a target is outside the support."""
        check_classes(targets, self.num_classes)

    def _edges(self, targets: Tensor) -> _Edges:
        """Return the interval of each target's class."""
        k = targets.long()
        cutpoints, gaps = self.cutpoints, self.gaps
        if self.num_classes == 2:  # no class has two neighbours
            gaps = torch.ones_like(self.first_cutpoint)
        return _Edges(
            lower=_take(cutpoints, (k - 1).clamp(min=0)),
            upper=_take(cutpoints, k.clamp(max=self.num_classes - 2)),
            gap=_take(gaps, (k - 1).clamp(0, max(self.num_classes - 3, 0))),
            is_first=k == 0,
            is_last=k == self.num_classes - 1,
        )

    def knots(self, targets: Tensor) -> Tensor:
        """Return latent values about which p(y | f) may be narrow."""
        edges = self._edges(targets)
        return torch.where(edges.is_last, edges.lower, edges.upper).detach().unsqueeze(0)

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Distribution:
        """Return p(y | f), an OrderedCategorical distribution with batch shape that of f."""
        log_probs = [self.unchecked_log_prob(label, function_samples) for label in self._classes(function_samples)]
        return OrderedCategorical(logits=torch.stack(log_probs, -1))

    def marginal(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> Distribution:
        """Return p(y) at the marginals of function_dist, an OrderedCategorical; small probabilities are exact."""
        mean, variance = self._marginals(function_dist)
        log_probs = [self.log_density(label, mean, variance) for label in self._classes(mean)]
        return OrderedCategorical(logits=torch.stack(log_probs, -1))

    def _classes(self, like: Tensor) -> list[Tensor]:
        return [torch.full(like.shape, k, dtype=torch.long, device=like.device) for k in range(self.num_classes)]


class OrdinalLogitLikelihood(OrdinalLikelihood):
    r""":math:`p(y \le k|f) = \sigma(b_k - f)`: the proportional odds model.

    :math:`\log p(y=k|f) = \log\sigma(b_k - f) + \log\sigma(f - b_{k-1}) + \log(1 - e^{-(b_k - b_{k-1})})`, a sum of two
    softplus functions. Arguments, parameters and errors are those of :class:`OrdinalLikelihood`.

    Example:
        >>> import torch
        >>> likelihood = OrdinalLogitLikelihood(3)
        >>> likelihood(torch.tensor([-10.0, 0.0, 10.0])).probs.argmax(-1)
        tensor([0, 1, 2])
    """

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log p(targets | f) (..., N), for targets in the support."""
        edges = self._edges(targets)
        below = torch.where(edges.is_last, 0.0, logsigmoid(edges.upper - f))
        above = torch.where(edges.is_first, 0.0, logsigmoid(f - edges.lower))
        return below + above + edges.log_width()

    def strip(self, targets: Tensor) -> Tensor:
        """Return half the width of a strip in which the logistic function has no poles."""
        return torch.full_like(floating(targets), STRIP)

    def softplus_terms(self, targets: Tensor) -> SoftplusTerms:
        """Return log p(y | f) as two softplus functions, of f - b_k and of b_{k-1} - f.

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        edges = self._edges(targets)
        one = torch.ones_like(edges.upper)
        present = torch.stack([one - edges.is_last.to(one), one - edges.is_first.to(one)])
        offset = torch.stack([-edges.upper, edges.lower])
        return SoftplusTerms(edges.log_width(), 0 * one, present, torch.stack([one, -one]), offset)

    def expected_log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return E[log p(y | f)] under N(mean, variance), elementwise, to rounding.

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        return self.softplus_terms(targets).lower_bound(Quadrature().expected_softplus, mean, variance)


class OrdinalProbitLikelihood(OrdinalLikelihood):
    r""":math:`p(y \le k|f) = \Phi(b_k - f)`: a Gaussian variable f + e, e ~ N(0, 1), observed through the cutpoints.

    The marginal is in closed form, the same probabilities at :math:`(b_k - m) / \sqrt{1 + v}`. Arguments, parameters
    and errors are those of :class:`OrdinalLikelihood`.

    Example:
        >>> import torch
        >>> likelihood = OrdinalProbitLikelihood(3)
        >>> likelihood(torch.tensor([-10.0, 0.0, 10.0])).probs.argmax(-1)
        tensor([0, 1, 2])
    """

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log p(targets | f) (..., N), for targets in the support."""
        return self._log_interval(targets, f, torch.ones((), dtype=f.dtype, device=f.device))

    def strip(self, targets: Tensor) -> Tensor:
        """Return half the width of a strip in which normal probabilities of intervals have no zeros."""
        return torch.full_like(floating(targets), STRIP)

    def log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return log int p(y | f) N(f | mean, variance) df, elementwise, in closed form.

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        self.check(targets)
        return self._log_interval(targets, mean, (1 + variance).rsqrt())

    def _log_interval(self, targets: Tensor, centre: Tensor, scale: Tensor) -> Tensor:
        """Return log[Phi((b_k - centre) scale) - Phi((b_{k-1} - centre) scale)], in float64 inside."""
        edges, dtype = self._edges(targets), torch.promote_types(centre.dtype, scale.dtype)
        centre, scale = centre.double(), scale.double()
        upper, lower = (edges.upper - centre) * scale, (edges.lower - centre) * scale
        bound, at_end = torch.where(edges.is_first, upper, -lower), edges.is_first | edges.is_last
        interval = (_log_normal_interval, (lower, edges.gap * scale))
        return _either(at_end, (log_ndtr, (bound,)), interval).to(dtype)


def _take(parameters: Tensor, index: Tensor) -> Tensor:  # (*batch_shape, J), (..., N) -> (..., N)
    """Return the parameter of each datum, of its own batch if there is one."""
    if parameters.dim() == 1:
        return parameters[index]
    shape = torch.broadcast_shapes(parameters.shape[:-1], index.shape[:-1])
    return parameters.expand(*shape, -1).gather(-1, index.expand(*shape, -1))


def _log_normal_interval(lower: Tensor, width: Tensor) -> Tensor:
    r"""Return log[Phi(lower + width) - Phi(lower)], relatively accurate in both tails and for every width, float64.

    Reflected so that the interval's centre c is not positive. A narrow one, with :math:`w \max(1, |c|) \le 2`, is
    :math:`\varphi(c) \int_{-w/2}^{w/2} e^{-c t - t^2/2} dt`, by Gauss-Legendre nodes; for the others
    :math:`\log\Phi(b) + \log(1 - \Phi(a)/\Phi(b))` does not cancel.
    """
    centre = -(lower + 0.5 * width).abs()
    is_narrow = width * centre.abs().clamp(min=1) <= 2
    return _either(is_narrow, (_log_by_nodes, (centre, width)), (_log_by_difference, (centre, width)))


def _log_by_nodes(centre: Tensor, width: Tensor) -> Tensor:
    inside = torch.zeros_like(centre)
    for node, weight in zip(*(rule.tolist() for rule in gauss_legendre(10)), strict=True):
        t = width * (node - 0.5)
        inside = inside + weight * torch.exp(-t * (centre + 0.5 * t))
    return (inside * width).log() - 0.5 * centre.square() - 0.5 * math.log(2 * math.pi)


def _log_by_difference(centre: Tensor, width: Tensor) -> Tensor:
    upper = log_ndtr(centre + 0.5 * width)
    return upper + torch.log1p(-torch.exp(log_ndtr(centre - 0.5 * width) - upper))


_Branch = tuple[Callable[..., Tensor], tuple[Tensor, ...]]  # a function and its arguments


def _either(condition: Tensor, yes: _Branch, no: _Branch) -> Tensor:
    """Return the one where the condition holds and the other elsewhere, each evaluated there only."""
    shape = torch.broadcast_shapes(condition.shape, *(a.shape for _, arguments in (yes, no) for a in arguments))
    condition = condition.expand(shape).reshape(-1)
    result = yes[1][0].new_empty(condition.shape)
    for where, (function, arguments) in ((condition, yes), (~condition, no)):
        index = where.nonzero().squeeze(-1)
        if len(index) == len(where) > 0:
            return function(*(a.expand(shape) for a in arguments))
        if len(index):
            found = function(*(a.expand(shape).reshape(-1)[index] for a in arguments))
            result = result.index_copy(0, index, found)
    return result.view(shape)


def _get_gaps(module: OrdinalLikelihood) -> Tensor:
    return module.gaps


def _set_gaps(module: OrdinalLikelihood, value: Tensor) -> None:
    module.gaps = value
