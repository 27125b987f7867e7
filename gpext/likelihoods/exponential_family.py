r"""Any multivariate exponential family, from its parameter functions [Cha13 Sec. 2.1].

    log p(y | eta) = [T(y)' theta(eta) - b(theta(eta))] / a + log h(y, a),   with J = d theta / d eta

    u = J' [T - grad b] / a,   U = (J' hess b J - sum_j [T - grad b]_j hess theta_j) / a,   E[U] = J' hess b J / a

The derivatives are automatic, D backward passes for all data at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpytorch.constraints import Positive
from gpytorch.distributions import MultivariateNormal
from torch import Tensor
from torch.distributions import Distribution

from gpext.checks import whole_number, whole_number_or_none
from gpext.distributions import CompoundJointDistribution
from gpext.likelihoods.checks import floating_like
from gpext.likelihoods.curvature import BlockCurvature, Curvature
from gpext.likelihoods.joint import JointLikelihood

_REMEDY = (
    "Set it, likelihood.conditional = lambda f: ... of f (..., D, N), batch shape (..., N); nothing has to be trained "
    "again."
)


class ExponentialFamilyLikelihood(JointLikelihood):
    """A likelihood of D latent functions from T, b, h, a and theta; `Laplace` and `Taylor` serve it.

    Every function works datum by datum on whole tensors, in which the data are the last dimension and what belongs to
    one datum the second from behind. Blocks without known structure cost O((N D)^3): see `DenseBlocksWarning`. A family
    of one latent, D = 1, has a prior of batch shape (1,) and latent values (..., 1, N).

    Args:
        num_latents: D.
        statistic: T, maps targets to (..., P, N).
        log_partition: b, maps theta (..., P, N) to (..., N); three times differentiable.
        log_base: log h, maps targets and a, a number, to (..., N); zero by default.
        link: theta, maps eta (..., D, N) to (..., P, N); the canonical theta = eta by default.
        dispersion: the first value of a, learnt as `dispersion`; None for a = 1.
        num_targets: how many numbers a target has: targets are then (..., N, num_targets), else (..., N).
        conditional: maps f (..., D, N) to the distribution p(y | f) of batch shape (..., N), for predictions and draws.
            Training does without: it may be set later, as the attribute `conditional` of a trained likelihood.

    Raises:
        ValueError: fewer than one latent, or a dispersion that is not positive.

    Example:
        >>> import torch
        >>> likelihood = ExponentialFamilyLikelihood(  # a Poisson count for each of two latents
        ...     2, statistic=lambda y: y.mT, log_partition=lambda theta: theta.exp().sum(-2), num_targets=2,
        ...     log_base=lambda y, a: -(y + 1).lgamma().sum(-1),
        ... )
        >>> likelihood.log_prob(torch.tensor([[0.0, 1.0]]), torch.zeros(2, 1))
        tensor([-2.])
    """

    def __init__(
        self,
        num_latents: int,
        statistic: Callable[[Tensor], Tensor],
        log_partition: Callable[[Tensor], Tensor],
        log_base: Callable[[Tensor, Tensor], Tensor] | None = None,
        link: Callable[[Tensor], Tensor] | None = None,
        dispersion: float | None = None,
        *,
        num_targets: int | None = None,
        conditional: Callable[[Tensor], Distribution] | None = None,
    ) -> None:
        super().__init__()
        num_latents = whole_number("num_latents", num_latents, 1)
        if dispersion is not None and not dispersion > 0:
            raise ValueError(f"dispersion must be positive; got {dispersion}.")
        self.num_latents, self.num_targets = num_latents, whole_number_or_none("num_targets", num_targets, 1)
        self.statistic, self.log_partition, self.log_base = statistic, log_partition, log_base
        self.link, self.conditional = link, conditional
        self.has_dispersion = dispersion is not None
        if dispersion is not None:
            self.register_parameter("raw_dispersion", torch.nn.Parameter(torch.zeros(())))
            self.register_constraint("raw_dispersion", Positive())
            self.dispersion = dispersion

    @property
    def dispersion(self) -> Tensor:
        """A (), one if it is not learnt."""
        if not self.has_dispersion:
            return torch.ones(())
        return self.raw_dispersion_constraint.transform(self.raw_dispersion)

    @dispersion.setter
    def dispersion(self, value: float | Tensor) -> None:
        raw = self.raw_dispersion
        value = torch.as_tensor(value, dtype=raw.dtype, device=raw.device)
        self.initialize(raw_dispersion=self.raw_dispersion_constraint.inverse_transform(value))

    def check_support(self, targets: Tensor) -> None:
        """Raise ValueError if a target is outside the support."""
        if self.num_targets is not None and (targets.dim() < 2 or targets.size(-1) != self.num_targets):
            raise ValueError(f"targets must have shape (..., N, {self.num_targets}); got shape {tuple(targets.shape)}.")

    @property
    def target_numbers(self) -> int:
        """The number of numbers in the target of a datum."""
        return 1 if self.num_targets is None else self.num_targets

    def datum_shape(self, targets: Tensor) -> torch.Size:
        """Return (..., N)."""
        return targets.shape if self.num_targets is None else targets.shape[:-1]

    def _theta(self, f: Tensor) -> Tensor:
        return f if self.link is None else self.link(f)

    def unchecked_log_prob(self, targets: Tensor, f: Tensor) -> Tensor:
        """Return log p(targets | f) (..., N), for targets in the support."""
        targets, theta, a = floating_like(targets, f), self._theta(f), self.dispersion.to(f.device)
        T = self.statistic(targets)
        self._check_parameters(theta, f)
        self._check_statistic(T, targets, theta)
        b = self.log_partition(theta)
        if b.shape != theta.shape[:-2] + theta.shape[-1:]:
            raise ValueError(
                f"log_partition must map (..., P, N) to (..., N); it made {tuple(b.shape)} of {tuple(theta.shape)}. "
                "Sum over the second dimension from behind."
            )
        value = ((T * theta).sum(-2) - b) / a
        if self.log_base is None:
            return value
        base = self.log_base(targets, a)
        # A number would be counted once a datum, though it may be a sum over the data.
        if base.shape[-1:] != value.shape[-1:] or torch.broadcast_shapes(base.shape, value.shape) != value.shape:
            raise ValueError(f"log_base must give (..., N), here {tuple(value.shape)}; got {tuple(base.shape)}.")
        return value + base

    def _check_parameters(self, theta: Tensor, f: Tensor) -> None:
        """Raise ValueError unless theta of f (..., D, N) is (..., P, N)."""
        if theta.dim() < 2 or theta.size(-1) != f.size(-1):
            raise ValueError(
                f"link must map eta (..., D, N) to theta (..., P, N), the {f.size(-1)} data last; it made "
                f"{tuple(theta.shape)} of {tuple(f.shape)}.{_transposed(theta, f.size(-1))}"
            )

    def _check_statistic(self, T: Tensor, targets: Tensor, theta: Tensor) -> None:
        """Raise ValueError unless T of the targets has as many rows as theta (..., P, N), and its data last."""
        P, N = theta.shape[-2:]
        if P == N > 1 and T.shape[-2:] == (P, N):  # a square: only with one datum less are rows not columns
            N, targets = N - 1, self.take(targets, slice(N - 1))
            T = self.statistic(targets)
        if T.shape[-2:] != (P, N):
            raise ValueError(
                f"statistic must give T(y) of shape (..., P, N) = (..., {P}, {N}), a row for each of the {P} natural "
                f"parameters and the data last; it made {tuple(T.shape)} of targets {tuple(targets.shape)}."
                f"{_transposed(T, N)}"
            )

    def curvature(self, targets: Tensor, f: Tensor) -> Curvature | BlockCurvature:
        """Return log p(y | f) to second order at f (..., D, N), by automatic differentiation.

        Raises:
            TypeError, ValueError: as :meth:`check`; T and theta do not belong together.
        """
        self.check(targets)
        wanted = torch.is_grad_enabled()
        with torch.enable_grad():
            f = f if f.requires_grad else f.detach().requires_grad_()
            value = self.unchecked_log_prob(targets, f)
            gradient = _derivative(value, f)
            blocks = -_rows(gradient, f)
            expected = blocks if self.link is None else self._fisher_information(f)
            found = (value, gradient, 0.5 * (blocks + blocks.transpose(-3, -2)), expected)
        value, gradient, blocks, expected = found if wanted else (t.detach() for t in found)
        if self.num_latents > 1:
            return BlockCurvature(value, gradient, blocks, expected)
        none = torch.zeros_like(gradient)
        return Curvature(value, gradient, blocks.squeeze(-3), none.squeeze(-2), none, expected.squeeze(-3))

    def _fisher_information(self, f: Tensor) -> Tensor:
        """Return J' hess b J / a (..., D, D, N), outside the graph."""
        f = f.detach().requires_grad_()
        J = _rows(self._theta(f), f).detach()  # (..., P, D, N)
        theta = self._theta(f).detach().requires_grad_()
        bend = _rows(_derivative(self.log_partition(theta), theta), theta)
        return torch.einsum("...pdn,...pqn,...qen->...den", J, bend, J).detach() / self.dispersion.to(f).detach()

    def forward(self, function_samples: Tensor, *args: Any, **kwargs: Any) -> Distribution:
        """Return p(y | f) for f (..., D, N), from `conditional`.

        Raises:
            NotImplementedError: there is no `conditional`.
        """
        if self.conditional is None:
            raise NotImplementedError(
                f"p(y | f) as a distribution object needs `conditional`. {_REMEDY} Without it log_prob(targets, f) has "
                "its values, log_marginal(targets, function_dist) those of the prediction."
            )
        return self.conditional(function_samples)

    def marginal(self, function_dist: MultivariateNormal, *args: Any, **kwargs: Any) -> Distribution:
        """Return p(y), a :class:`gpext.distributions.CompoundJointDistribution`.

        It has mean, variance, log_prob and draws; of numbers also cdf and quantiles, where `conditional` has a cdf.

        Raises:
            NotImplementedError: there is no `conditional`.
        """
        if self.conditional is None:
            raise NotImplementedError(
                f"p(y) as a distribution object needs `conditional`. {_REMEDY} Without it log_marginal(targets, "
                "function_dist) has its log density, and gpext.quadrature.joint_expectation means."
            )
        return CompoundJointDistribution(self.conditional, *self._blocks(function_dist), self.joint_log_density)


def _transposed(found: Tensor, size: int) -> str:
    """Return the remedy for a result whose data come second from behind, if they do."""
    return " Its last two axes are the other way round: return its .mT." if found.shape[-2:-1] == (size,) else ""


def _derivative(value: Tensor, f: Tensor) -> Tensor:
    """Return d value_i / d f_i (..., D, N) for value (..., N), in the graph; zero where it does not depend on f."""
    if not value.requires_grad:
        return torch.zeros_like(f)
    (gradient,) = torch.autograd.grad(value.sum(), f, create_graph=True, materialize_grads=True)
    return gradient


def _rows(values: Tensor, f: Tensor) -> Tensor:
    """Return d values_pi / d f_di (..., P, D, N) for values (..., P, N)."""
    return torch.stack([_derivative(row, f) for row in values.unbind(-2)], -3)
