"""Censored observations: an interval in place of a value."""

from __future__ import annotations

import torch
from gpytorch.likelihoods import Likelihood
from torch import Tensor

from gpext.checks import check_tensor, show_index
from gpext.distributions import log_interval
from gpext.likelihoods.composed import (
    Observed,
    WrappedLikelihood,
    check_inner,
    inner_density,
    inner_expected,
    inner_knots,
    inner_log_prob,
    inner_point,
    require_one_number,
)
from gpext.likelihoods.latent import strip_of


class Censored(WrappedLikelihood):
    r"""Targets are pairs (lower, upper), of which y is known to be between the two.

    :math:`\log p(l, u | f) = \log p(y | f)` where l = u = y, else :math:`\log P(l < Y \le u | f)`, for counts
    :math:`\log P(l \le Y \le u | f)`. An infinite limit is a datum that is censored on one side: (-inf, u) on the left,
    (l, inf) on the right. Tails are computed as logarithms and do not underflow; register
    :func:`gpext.distributions.log_tail` for a distribution of your own. With gpytorch's GaussianLikelihood it is the
    Tobit model.

    Predictions are of y itself, uncensored. The tail probability of a datum is nan unless it is exact.

    Args:
        likelihood: p(y | f) of numbers or counts, of one latent, whose tails are known: Gaussian, Student-t, Laplace,
            Matern-3/2 or super-Gaussian noise, Poisson and negative binomial counts, times, amounts. Of Tweedie's
            amounts (-inf, u) includes zero and (0, u) does not.

    Raises:
        TypeError: something else than a likelihood of one latent, or one whose target is several numbers; from its
            methods, a distribution without known tails.

    Example:
        >>> import gpytorch, torch
        >>> likelihood = Censored(gpytorch.likelihoods.GaussianLikelihood())
        >>> y = torch.tensor([[0.0, 0.0], [1.0, torch.inf]])  # 0, and more than 1
        >>> likelihood.initialize(**{"likelihood.noise": 1.0}).log_prob(y, torch.zeros(2)).detach()
        tensor([-0.9189, -1.8410])
    """

    def __init__(self, likelihood: Likelihood) -> None:
        super().__init__(likelihood)
        require_one_number(self)

    @property
    def target_numbers(self) -> int:
        """Two."""
        return 2

    def datum_shape(self, targets: Tensor) -> torch.Size:
        """Return the shape of the data (..., N)."""
        return targets.shape[:-1]

    def check(self, targets: Tensor) -> None:
        """Raise unless the targets are pairs of limits.

        Raises:
            TypeError: half precision.
            ValueError: other shapes; nan; a lower limit above the upper one; both infinite; or a limit that is outside
                the support of the likelihood inside.
        """
        check_tensor("targets", targets)
        if targets.dim() < 2 or targets.size(-1) != 2:
            raise ValueError(
                f"expected pairs (lower, upper), targets (..., N, 2); got {tuple(targets.shape)}. Of data that are all "
                "exact take the likelihood inside, or torch.stack([y, y], -1)."
            )
        lower, upper = targets.unbind(-1)
        for wrong, what, remedy in (
            (targets.isnan().any(-1), "limits must be numbers, or infinite", "Leave out a datum that is missing."),
            (lower > upper, "the lower limit must not be above the upper one", "Targets are (lower, upper)."),
            (
                (lower == -torch.inf) & (upper == torch.inf),
                "a datum must have a finite limit",
                "Leave out a datum that has none.",
            ),
            (
                (lower == torch.inf) | (upper == -torch.inf),
                "a lower limit may be -inf and an upper one inf",
                "Not below u is (u, inf), not above l is (-inf, l).",
            ),
        ):
            if bool(wrong.any()):
                index = tuple(wrong.nonzero()[0].tolist())
                pair = f"({float(lower[index]):g}, {float(upper[index]):g})"
                raise ValueError(f"{what}; got {pair} at index {show_index(index)}. {remedy}")
        for which, limit in (("lower", _finite(lower, upper)), ("upper", _finite(upper, lower))):
            try:
                check_inner(self.likelihood, limit)
            except ValueError as error:
                raise ValueError(f"of the {which} limits: {error}") from error

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return the log probability of the intervals given f, or the log density of the exact data, (..., N)."""
        shape = torch.broadcast_shapes(targets.shape[:-1], f.shape)
        f = f.expand(shape)
        parts, rows_of = [], []
        for is_exact, rows in _kinds(targets):
            at, (lower, upper) = f[..., rows], targets[..., rows, :].unbind(-1)
            if is_exact:
                parts.append(inner_log_prob(self.likelihood, lower, at).to(f.dtype))
            else:
                given = self.likelihood.forward(at.double())
                parts.append(log_interval(given, lower.double(), upper.double()).to(f.dtype))
            rows_of.append(rows)
        return torch.cat(parts, -1)[..., torch.cat(rows_of).argsort()]

    def expected_log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return E[log p(l, u | f)] under N(mean, variance).

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        if bool((targets[..., 0] == targets[..., 1]).all()):
            return inner_expected(self.likelihood, targets[..., 0], mean, variance)
        return super().expected_log_density(targets, mean, variance)

    def log_density(self, targets: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Return log int p(l, u | f) N(f | mean, variance) df.

        Raises:
            TypeError, ValueError: as :meth:`check`.
        """
        if bool((targets[..., 0] == targets[..., 1]).all()):
            return inner_density(self.likelihood, targets[..., 0], mean, variance)
        return super().log_density(targets, mean, variance)

    def knots(self, targets: Tensor) -> Tensor:
        """Return those of the likelihood inside at both limits; or the limits."""
        lower, upper = targets.unbind(-1)
        limits = [_finite(lower, upper), _finite(upper, lower)]
        if bool((limits[0] == limits[1]).all()):
            limits = limits[:1]
        found = [inner_knots(self.likelihood, limit) for limit in limits]
        pairs = zip(limits, found, strict=True)
        return torch.cat([limit.unsqueeze(0) if knots is None else knots for limit, knots in pairs])

    def strip(self, targets: Tensor) -> Tensor | None:
        """Return the narrower strip of the likelihood inside at both limits: its tails are as smooth as its density."""
        lower, upper = targets.unbind(-1)
        limits = torch.stack([_finite(lower, upper), _finite(upper, lower)])
        strips = strip_of(self.likelihood, limits)
        return None if strips is None else strips.amin(0)

    def expansion_point(self, targets: Tensor) -> Tensor:
        """Return that of the likelihood inside, halfway between two finite limits, else at the finite one."""
        lower, upper = targets.unbind(-1)
        halfway = 0.5 * (_finite(lower, upper) + _finite(upper, lower))
        return inner_point(self.likelihood, halfway)

    def observed(self, targets: Tensor, mean: Tensor) -> list[Observed]:
        """Return the exact data as those of the likelihood inside, where they are the same in a batch."""
        lower, upper = targets.unbind(-1)
        index = (lower == upper).reshape(-1, lower.size(-1)).all(0).nonzero().squeeze(-1)
        if not len(index):
            return []
        return [Observed(index, self.likelihood, lower[..., index], mean[..., index])]


def _kinds(targets: Tensor) -> list[tuple[bool, Tensor]]:
    """Return data of one kind after another, and whether they are exact: each kind needs other tails.

    Exact data, those without a lower and those without an upper limit, and the others; data that are of several kinds
    in a batch are among the others.
    """
    lower, upper = targets.reshape(-1, *targets.shape[-2:]).unbind(-1)
    exact, left, right = (lower == upper).all(0), (lower == -torch.inf).all(0), (upper == torch.inf).all(0)
    masks = ((True, exact), (False, left), (False, right), (False, ~(exact | left | right)))
    found = [(is_exact, mask.nonzero().squeeze(-1)) for is_exact, mask in masks]
    return [(is_exact, rows) for is_exact, rows in found if len(rows)]


def _finite(limit: Tensor, other: Tensor) -> Tensor:
    """Return a limit, or the other one where it is infinite."""
    return torch.where(limit.isinf(), other, limit)
